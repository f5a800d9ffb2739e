"""Attention over latents for many rows in one launch: a program takes all keys of a row for some heads, span by span.

The same spans, tiles and folds in the same order as by a program for each span (kernel.py), so a row's bits are the
same either way. What spans leave stays in registers instead of in memory, which many rows would wait for; a few rows
would leave most of the card idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.latent_attention.kernel import (
    attend_tile,
    load_queries,
    load_tile,
    span_size,
    turn_back,
    turn_queries,
)
from sparkchat.kernels.launch import launch, wait

if TYPE_CHECKING:
    from sparkchat.kernels.latent_attention import LatentShape


@triton.jit
def _attend_rows(
    q_ptr, cache_ptr, rows_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, chosen_ptr, sinks_ptr, out_ptr,
    part_stride, row_stride, cache_stride, slot_stride, first_slot, ring, scale, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, RATIO: tl.constexpr,
    TOPK: tl.constexpr, SPAN: tl.constexpr, WINDOWS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_head = heads < HEADS
    top = tl.load(sinks_ptr + heads, mask=is_head, other=0.0) * 1.4426950408889634
    wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.int32)
    low = tl.maximum(tl.load(first_seen_ptr + row).to(tl.int32), 0)
    high = tl.load(ends_ptr + row).to(tl.int32)
    base = cache_ptr + tl.load(rows_ptr + row).to(tl.int64) * cache_stride
    q = load_queries(q_ptr, row, heads, part_stride, row_stride, HEADS, SIZE, PARTS)
    chosen_ptr += row * TOPK
    lap = low - low % ring
    window_size = span_size(high - low, SPAN, WINDOWS)
    # Spans are whole tiles, so tiles are counted through: those of the window, then those of the entries.
    windows = (high - low + BLOCK - 1) // BLOCK
    tiles, count, entries_size, is_sparse = windows, 0, SPAN, windows < 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if TOPK > 0:
            is_sparse = count > TOPK
            count = tl.minimum(count, TOPK)
        entries_size = span_size(count, SPAN, MOST)
        tiles += (count + BLOCK - 1) // BLOCK
    unit = q * tl.rsqrt(tl.sum(q * q, axis=1) / SIZE + eps)[:, None]
    turned = turn_queries(unit, rope_ptr, position, TILE, SIZE, ROPE).to(cache_ptr.dtype.element_ty)
    total = tl.full((TILE,), 1.0, tl.float32)
    mixed = tl.zeros((TILE, SIZE), tl.float32)
    span_top = tl.full((TILE,), float("-inf"), tl.float32)
    span_total = tl.zeros((TILE,), tl.float32)
    span_mixed = tl.zeros((TILE, SIZE), tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        is_window = tile < windows
        first = tl.where(is_window, tile, tile - windows) * BLOCK
        length = tl.where(is_window, high - low, count)
        before = tl.where(is_window, low, 0)
        latents = load_tile(
            base, chosen_ptr, before + first + tl.arange(0, BLOCK), before + length, is_window, is_sparse & ~is_window,
            lap, first_slot, ring, slot_stride, SIZE, RATIO, TOPK,
        )  # fmt: skip
        is_key = first + tl.arange(0, BLOCK) < length
        span_top, span_total, span_mixed = attend_tile(
            turned, latents, is_key, span_top, span_total, span_mixed, scale, EXACT
        )  # fmt: skip
        end = first + BLOCK
        if (end >= length) | (end % tl.where(is_window, window_size, entries_size) == 0):
            new_top = tl.maximum(top, span_top)
            old, new = tl.exp2(top - new_top), tl.exp2(span_top - new_top)
            total = tl.fma(total, old, span_total * new)
            mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], (TILE, SIZE)), span_mixed * new[:, None])
            top = new_top
            span_top = tl.full((TILE,), float("-inf"), tl.float32)
            span_total = tl.zeros((TILE,), tl.float32)
            span_mixed = tl.zeros((TILE, SIZE), tl.float32)
    pair = tl.arange(0, SIZE // 2)
    angle = pair - (SIZE - ROPE) // 2
    at = rope_ptr + position * ROPE + 2 * angle
    cos = tl.broadcast_to(tl.load(at, mask=angle >= 0, other=1.0)[None, :], (TILE, SIZE // 2))
    sin = tl.broadcast_to(tl.load(at + 1, mask=angle >= 0, other=0.0)[None, :], (TILE, SIZE // 2))
    left, right = tl.split(tl.reshape(mixed / total[:, None], (TILE, SIZE // 2, 2)))
    left, right = turn_back(left, right, cos, sin)
    out = tl.reshape(tl.join(left, right), (TILE, SIZE)).to(out_ptr.dtype.element_ty)
    to = out_ptr + (row * HEADS + heads)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(to, out, mask=is_head[:, None])


def launch_attend_rows(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    out: Tensor,
    shape: LatentShape,
    chosen: Tensor | None,
    scale: float,
    *,
    heads: int,
    warps: int,
    stages: int,
    **sizes: int | bool,
) -> None:
    """What ``launch_latent_attention`` does for many rows; ``heads`` of a program."""
    num_rows, num_heads, size = out.shape
    launch(
        _attend_rows, (num_rows, -(-num_heads // heads)),
        q, cache, rows, positions, first_seen, ends, rope, rows if chosen is None else chosen, sinks, out,
        q.stride(0) if q.dim() == 3 else 0, q.stride(-2), cache.stride(0), cache.stride(1), shape.first_slot,
        shape.ring, scale, shape.eps,
        HEADS=num_heads, SIZE=size, ROPE=shape.rope_dim, PARTS=1 if q.dim() == 2 else q.shape[0], RATIO=shape.ratio,
        TOPK=shape.topk, TILE=heads,
        # Where entries are chosen, what is loaded depends on a load: the pipeline needs a second stage for each.
        STAGES=2 * stages - 1 if shape.topk else stages, **sizes, num_warps=warps,
    )  # fmt: skip
