"""Split, normalise, rotate, store: one program per row and head, or per row and several heads where rows are many."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, reads_ahead, wait

MANY_ROWS = 32
"""From here on a program takes several heads: a program for each is more than the card holds at a time."""
_MOST_GROUPED = 8


@triton.jit
def _place(position, cache_row, pages_ptr, page_stride, slot_stride, pages_stride, capacity, PAGE: tl.constexpr):
    # Where a layer's keys and values of this position begin. Only rows of slots may be rings.
    if PAGE > 0:
        page = tl.load(pages_ptr + cache_row * pages_stride + position // PAGE).to(tl.int64)
        slot = position % PAGE
    else:
        page = cache_row
        slot = (position.to(tl.int32) % capacity).to(tl.int64)
    return page * page_stride + slot * slot_stride


@triton.jit
def _load_pairs(qkv_ptr, GROUP: tl.constexpr, DIM: tl.constexpr):
    # [GROUP, DIM/2] twice, from GROUP heads side by side: the numbers of a pair lie next to each other.
    at = tl.arange(0, GROUP)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.split(tl.reshape(tl.load(qkv_ptr + at).to(tl.float32), (GROUP, DIM // 2, 2)))


@triton.jit
def _write_qkv_groups(
    qkv_ptr, positions_ptr, rows_ptr, rope_ptr, norm_ptr, cache_ptr, pages_ptr, q_ptr,
    qkv_stride, part_stride, layer_stride, page_stride, head_stride, slot_stride, pages_stride, capacity,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # As _write_qkv for GROUP heads, all of them queries, keys or values.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP
    layer = tl.program_id(2)
    qkv_ptr += layer * (HEADS + 2 * KV_HEADS) * DIM + row * qkv_stride + head * DIM
    norm_ptr += layer * (HEADS + KV_HEADS) * DIM + head * DIM
    cache_ptr += layer.to(tl.int64) * layer_stride
    if not SETTLED:
        wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cache_row = tl.load(rows_ptr + row).to(tl.int64)
    angles = tl.load(rope_ptr + position * DIM + tl.arange(0, DIM))
    cos, sin = tl.split(tl.reshape(angles, (DIM // 2, 2)))
    if SETTLED:
        wait(PDL)
    left, right = _load_pairs(qkv_ptr, GROUP, DIM)
    for part in tl.static_range(1, PARTS):
        more_left, more_right = _load_pairs(qkv_ptr + part * part_stride, GROUP, DIM)
        left += more_left
        right += more_right
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / DIM + eps)[:, None]
            weight_left, weight_right = _load_pairs(norm_ptr, GROUP, DIM)
            left = left * scale * weight_left
            right = right * scale * weight_right
        turned = left * cos[None, :] - right * sin[None, :]
        right = left * sin[None, :] + right * cos[None, :]
        left = turned
    both = tl.reshape(tl.join(left, right), (GROUP, DIM))
    nth, dim = tl.arange(0, GROUP)[:, None], tl.arange(0, DIM)[None, :]
    if head < HEADS:
        tl.store(q_ptr + (row * HEADS + head + nth) * DIM + dim, both.to(q_ptr.dtype.element_ty))
    else:
        if cache_row >= 0:
            place = _place(position, cache_row, pages_ptr, page_stride, slot_stride, pages_stride, capacity, PAGE)
            out = cache_ptr + place + (head - HEADS + nth) * head_stride + dim
            tl.store(out, both.to(cache_ptr.dtype.element_ty))


@triton.jit
def _write_qkv(
    qkv_ptr, positions_ptr, rows_ptr, rope_ptr, norm_ptr, cache_ptr, pages_ptr, q_ptr,
    qkv_stride, part_stride, layer_stride, page_stride, head_stride, slot_stride, pages_stride, capacity,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    layer = tl.program_id(2)
    qkv_ptr += layer * (HEADS + 2 * KV_HEADS) * DIM
    norm_ptr += layer * (HEADS + KV_HEADS) * DIM
    cache_ptr += layer.to(tl.int64) * layer_stride
    pair = tl.arange(0, DIM // 2)
    is_turned = head < HEADS + KV_HEADS
    if not SETTLED:
        wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cache_row = tl.load(rows_ptr + row).to(tl.int64)
    angle = rope_ptr + position * DIM + 2 * pair
    cos = tl.load(angle, mask=is_turned, other=1.0)
    sin = tl.load(angle + 1, mask=is_turned, other=0.0)
    if SETTLED:
        wait(PDL)
    base = qkv_ptr + row * qkv_stride + head * DIM + 2 * pair
    left = tl.load(base).to(tl.float32)
    right = tl.load(base + 1).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        left += tl.load(base + part * part_stride)
        right += tl.load(base + part * part_stride + 1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(left * left + right * right, axis=0) / DIM + eps)
        weight = norm_ptr + head * DIM + 2 * pair
        left = tl.where(is_turned, left * scale * tl.load(weight, mask=is_turned, other=1.0), left)
        right = tl.where(is_turned, right * scale * tl.load(weight + 1, mask=is_turned, other=1.0), right)
    turned_left = left * cos - right * sin
    turned_right = left * sin + right * cos
    if head < HEADS:
        out = q_ptr + (row * HEADS + head) * DIM + 2 * pair
        tl.store(out, turned_left.to(q_ptr.dtype.element_ty))
        tl.store(out + 1, turned_right.to(q_ptr.dtype.element_ty))
    else:
        if cache_row >= 0:
            place = _place(position, cache_row, pages_ptr, page_stride, slot_stride, pages_stride, capacity, PAGE)
            out = cache_ptr + place + (head - HEADS) * head_stride + 2 * pair
            tl.store(out, turned_left.to(cache_ptr.dtype.element_ty))
            tl.store(out + 1, turned_right.to(cache_ptr.dtype.element_ty))


def launch_write_qkv(
    qkv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    q: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    pages: Tensor | None,
    is_settled: bool = False,
) -> None:
    """See ``write_qkv``."""
    num_rows, heads, dim = q.shape
    _launch(qkv, positions, rows, rope, cache[None], q, num_rows, heads, dim, qk_norm, eps, pages, is_settled)


def launch_write_context(
    kv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    k_norm: Tensor | None,
    eps: float,
    pages: Tensor | None = None,
    is_settled: bool = False,
) -> None:
    """See ``write_context``."""
    _launch(kv, positions, rows, rope, cache, kv, positions.shape[0], 0, cache.shape[4], k_norm, eps, pages, is_settled)


def _launch(
    qkv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    q: Tensor,
    num_rows: int,
    heads: int,
    dim: int,
    norm: Tensor | None,
    eps: float,
    pages: Tensor | None,
    is_settled: bool,
) -> None:
    """cache [layers, pages, 2K, slots, D]; q is not touched with 0 heads."""
    layers, kv_heads, page_size = cache.shape[0], cache.shape[2] // 2, cache.shape[3]
    parts = 1 if qkv.dim() == 2 else qkv.shape[0]
    group = math.gcd(math.gcd(heads, kv_heads), _MOST_GROUPED) if num_rows >= MANY_ROWS else 1
    kernel, grouped, warps = (_write_qkv, {}, 1) if group == 1 else (_write_qkv_groups, {"GROUP": group}, 2)
    launch(
        kernel, (num_rows, (heads + 2 * kv_heads) // group, layers),
        qkv, positions, rows, rope, rope if norm is None else norm, cache, rows if pages is None else pages, q,
        qkv.stride(-2), qkv.stride(0) if parts > 1 else 0,
        cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3),
        0 if pages is None else pages.stride(0),
        page_size, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PARTS=parts, HAS_NORM=norm is not None,
        PAGE=0 if pages is None else page_size,
        SETTLED=reads_ahead(is_settled), num_warps=warps, **grouped,
    )  # fmt: skip
