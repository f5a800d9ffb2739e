"""Latents of rows normed, turned, rounded and kept in the window's ring, and their low ranks normed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.ahead import shares
from sparkchat.kernels.ahead.kernel import ask_share
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.small_floats import round_pairs_e4m3

if TYPE_CHECKING:
    from sparkchat.kernels.latent_attention import LatentRows, LatentShape


@triton.jit
def _row_of(
    x_ptr, row, part_stride, row_stride, column,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # Columns of a row, its parts added in order.
    inside = column < SIZE
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row * row_stride + column, mask=inside, other=0.0)
    return x


@triton.jit
def keep_latent(
    latents_ptr, norm_ptr, rope_ptr, cache_ptr, row, cache_row, position, part_stride, row_stride, cache_stride,
    slot_stride, first_slot, ring, eps,
    SIZE: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, ROUND_BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a row's latent, turn and round it, and keep it in the window's ring."""
    pair = tl.arange(0, SIZE // 2)
    left = _row_of(latents_ptr, row, part_stride, row_stride, 2 * pair, SIZE, PARTS)
    right = _row_of(latents_ptr, row, part_stride, row_stride, 2 * pair + 1, SIZE, PARTS)
    scale = tl.rsqrt(tl.sum(left * left + right * right, axis=0) / SIZE + eps)
    # Rounded as activations are before they are turned.
    kind = cache_ptr.dtype.element_ty
    left = (left * scale * tl.load(norm_ptr + 2 * pair)).to(kind).to(tl.float32)
    right = (right * scale * tl.load(norm_ptr + 2 * pair + 1)).to(kind).to(tl.float32)
    left, right = turn_pairs(left, right, rope_ptr, position, SIZE, ROPE)
    left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    if ROUND_BLOCK > 0:
        left, right = round_pairs_e4m3(left, right, (SIZE - ROPE) // 2, SIZE // 2, ROUND_BLOCK)
    slot = first_slot + position % ring
    to = cache_ptr + cache_row * cache_stride + slot * slot_stride + 2 * pair
    tl.store(to, left.to(kind))
    tl.store(to + 1, right.to(kind))


@triton.jit
def norm_low_rank(
    low_ptr, norm_ptr, out_ptr, row, part_stride, row_stride, eps,
    LOW: tl.constexpr, LOW_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Norm a row's low rank."""
    column = tl.arange(0, LOW_BLOCK)
    x = _row_of(low_ptr, row, part_stride, row_stride, column, LOW, PARTS)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / LOW + eps)
    out = x * scale * tl.load(norm_ptr + column, mask=column < LOW, other=0.0)
    tl.store(out_ptr + row * LOW + column, out.to(out_ptr.dtype.element_ty), mask=column < LOW)


@triton.jit
def _write_latents(
    positions_ptr, rows_ptr, rope_ptr,
    latents_ptr, latent_norm_ptr, cache_ptr, low_ptr, low_norm_ptr, out_ptr,
    latent_part, latent_row, low_part, low_row, cache_stride, slot_stride, first_slot, ring, eps,
    ahead_ptr, ahead_size, ahead2_ptr, ahead2_size,
    SIZE: tl.constexpr, ROPE: tl.constexpr, LATENT_PARTS: tl.constexpr, LATENT_BLOCK: tl.constexpr, LOW: tl.constexpr,
    LOW_BLOCK: tl.constexpr, LOW_PARTS: tl.constexpr, ASKING: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    program = tl.program_id(1)
    if ASKING > 0:
        first = tl.num_programs(1) - ASKING
        if program >= first:
            place, count = (program - first) * tl.num_programs(0) + tl.program_id(0), ASKING * tl.num_programs(0)
            ask_share(ahead_ptr, ahead_size, place, count, WARPS)
            ask_share(ahead2_ptr, ahead2_size, place, count, WARPS)
    position = tl.load(positions_ptr + row).to(tl.int32)
    cache_row = tl.load(rows_ptr + row).to(tl.int64)
    if tl.program_id(1) == 0:
        keep_latent(
            latents_ptr, latent_norm_ptr, rope_ptr, cache_ptr, row, cache_row, position, latent_part, latent_row,
            cache_stride, slot_stride, first_slot, ring, eps, SIZE, ROPE, LATENT_PARTS, LATENT_BLOCK,
        )  # fmt: skip
    elif LOW > 0 and tl.program_id(1) == 1:
        norm_low_rank(low_ptr, low_norm_ptr, out_ptr, row, low_part, low_row, eps, LOW, LOW_BLOCK, LOW_PARTS)


@triton.jit
def turn_pairs(left, right, rope_ptr, position, SIZE: tl.constexpr, ROPE: tl.constexpr):
    """Pairs of a latent, ``left`` and ``right`` [SIZE / 2], the last ROPE / 2 turned by the position."""
    pair = tl.arange(0, SIZE // 2)
    angle = pair - (SIZE - ROPE) // 2
    at = rope_ptr + position * ROPE + 2 * angle
    cos = tl.load(at, mask=angle >= 0, other=1.0)
    sin = tl.load(at + 1, mask=angle >= 0, other=0.0)
    return left * cos - right * sin, left * sin + right * cos


def launch_write_latents(
    latents: Tensor,
    latent_norm: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    shape: LatentShape,
    low_rank: Tensor | None,
    low_rank_norm: Tensor | None,
    out: Tensor | None,
    ahead: Sequence[Tensor] = (),
) -> None:
    """See ``write_latents``."""
    from sparkchat.kernels.latent_attention import LatentRows

    check_flat(positions, rows, rope)
    written = LatentRows(latents, latent_norm, cache, shape, low_rank, low_rank_norm, out)
    arguments, sizes = written_of(written)
    programs = 1 if low_rank is None else 2
    asked, asking = shares(ahead, latents.shape[-2], latents)
    launch(
        _write_latents, (latents.shape[-2], programs + asking), positions, rows, rope, *arguments, *asked,
        ROPE=shape.rope_dim, **sizes, ASKING=asking, WARPS=4, num_warps=4,
    )  # fmt: skip


def written_of(written: LatentRows) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What a kernel that keeps latents is given of them: arguments, and numbers it is compiled for."""
    latents, cache, shape = written.latents, written.cache, written.shape
    check_cache(cache, shape)
    check_flat(written.latent_norm, written.low_rank_norm, written.out)
    size, low = latents.shape[-1], latents if written.low_rank is None else written.low_rank
    width = 0 if written.low_rank is None else low.shape[-1]
    arguments = (
        latents, written.latent_norm, cache, low,
        written.latent_norm if written.low_rank_norm is None else written.low_rank_norm,
        cache if written.out is None else written.out, latents.stride(0), latents.stride(-2), low.stride(0),
        low.stride(-2), cache.stride(0), cache.stride(1), shape.first_slot, shape.ring, shape.eps,
    )  # fmt: skip
    return arguments, {
        "SIZE": size,
        "LATENT_PARTS": 1 if latents.dim() == 2 else latents.shape[0],
        "LATENT_BLOCK": round_block_of(size - shape.rope_dim) if shape.has_roundings else 0,
        "LOW": width,
        "LOW_BLOCK": power_of_two(max(width, 1)),
        "LOW_PARTS": 1 if low.dim() == 2 else low.shape[0],
    }


def round_block_of(plain: int) -> int:
    """Pairs that share a scale where so many dimensions are rounded."""
    from sparkchat.kernels.latent_attention.reference import LATENT_BLOCK

    if plain % LATENT_BLOCK == 0:
        return LATENT_BLOCK // 2 if plain else 0
    if plain > LATENT_BLOCK or plain != power_of_two(plain):
        raise ValueError(f"no kernel rounds {plain} dimensions in blocks of {LATENT_BLOCK}")
    return plain // 2


def check_cache(cache: Tensor, shape: LatentShape) -> None:
    size = cache.shape[2]
    if size < 16 or size != power_of_two(size) or shape.rope_dim % 2:
        raise ValueError(f"no kernel for latents of {size} dimensions of which {shape.rope_dim} are turned")
    if cache.stride(2) != 1:
        raise ValueError("the last dimension of the cache must be contiguous")
