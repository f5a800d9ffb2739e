"""Compressed entries: one program keeps a row, and pools the entry that the row closes, if it closes one.

Beside them two more may do what a launch of their own would for the row's latent and low rank.

Tokens are pooled a few at a time, with the softmax of every channel carried along; the order does not depend on which
of them came in this pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.latent_attention.kernel import keep_latent, norm_low_rank, turn_pairs, written_of
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.small_floats import round_e2m1, round_pairs_e4m3

if TYPE_CHECKING:
    from sparkchat.kernels.compressor import Pool, PoolShape
    from sparkchat.kernels.latent_attention import LatentRows


@dataclass(frozen=True)
class Tile:
    """How an entry is pooled."""

    tokens: int
    """Pooled at a time"""
    warps: int


SPARSE_TILE, HEAVY_TILE = Tile(8, 4), Tile(16, 8)
"""Of overlapping entries of few tokens, all at once: four warps take the 512 channels of a latent side by side, so that
each keeps all tokens of a channel. And of entries of many tokens, as much as a program can have on its way."""
_NO_SIZES = {"SIZE": 0, "LATENT_PARTS": 1, "LATENT_BLOCK": 0, "LOW": 0, "LOW_BLOCK": 1, "LOW_PARTS": 1}


@triton.jit
def _of_rows(x_ptr, at, part_stride, mask, PARTS: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + at, mask=mask, other=0.0)
    return x


@triton.jit
def _pool(
    kv_ptr, scores_ptr, bias_ptr, raw_ptr, row, position, span_start, ring, part_stride, row_stride,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, OVERLAPS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    # The softmax over the tokens of the entry that ends at ``position``, channel by channel [WIDTH].
    HALVES: tl.constexpr = 2 if OVERLAPS else 1
    channel = tl.arange(0, WIDTH)
    top = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    pooled = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, HALVES * RATIO, TOKENS):
        place = first + tl.arange(0, TOKENS)
        token = position + 1 - HALVES * RATIO + place
        is_token = (place < HALVES * RATIO) & (token >= 0)
        is_new = token >= span_start
        column = channel[None, :]
        if OVERLAPS:
            # A token's first half goes into the entry after its own.
            column = column + tl.where(place >= RATIO, WIDTH, 0)[:, None]
        new = (is_token & is_new)[:, None]
        old = (is_token & ~is_new)[:, None]
        at = (row - (position - token))[:, None] * row_stride + column
        bias = tl.load(bias_ptr + (token % RATIO)[:, None] * (HALVES * WIDTH) + column, mask=new, other=0.0)
        kv = _of_rows(kv_ptr, at, part_stride, new, PARTS)
        score = _of_rows(scores_ptr, at, part_stride, new, PARTS) + bias
        at = (token % ring)[:, None] * (2 * HALVES * WIDTH) + column
        kv += tl.load(raw_ptr + at, mask=old, other=0.0)
        score += tl.load(raw_ptr + HALVES * WIDTH + at, mask=old, other=0.0)
        score = tl.where(is_token[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        peak = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - peak[None, :])
        shrink = tl.exp(top - peak)
        total = total * shrink + tl.sum(weight, axis=0)
        pooled = pooled * shrink + tl.sum(weight * kv, axis=0)
        top = new_top
    return pooled / total


@triton.jit
def _compress(
    kv_ptr, scores_ptr, bias_ptr, norm_ptr, raw_ptr, entries_ptr, rotation_ptr, rope_ptr, row, cache_row, position,
    span_start, ring, part_stride, row_stride, raw_stride, entries_stride, slot_stride, first_slot, eps,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, OVERLAPS: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr,
    ROUND_BLOCK: tl.constexpr, ROTATES: tl.constexpr, IS_INDEX: tl.constexpr, TOKENS: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 if OVERLAPS else 1
    raw_ptr += cache_row * raw_stride
    column = tl.arange(0, HALVES * WIDTH)
    at = row * row_stride + column
    # All that is read is asked for before anything is written: no pool reads a place that a row of this pass writes.
    kv = _of_rows(kv_ptr, at, part_stride, column >= 0, PARTS)
    score = _of_rows(scores_ptr, at, part_stride, column >= 0, PARTS)
    score += tl.load(bias_ptr + (position % RATIO) * (HALVES * WIDTH) + column)
    if (position + 1) % RATIO == 0:
        norm = tl.load(norm_ptr + tl.arange(0, WIDTH))
        kind = entries_ptr.dtype.element_ty
        pooled = _pool(
            kv_ptr, scores_ptr, bias_ptr, raw_ptr, row, position, span_start, ring, part_stride, row_stride, WIDTH,
            RATIO, OVERLAPS, PARTS, TOKENS,
        )  # fmt: skip
        # Rounded as activations are, before the norm.
        x = pooled.to(kind).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * norm
        left, right = tl.split(tl.reshape(x, (WIDTH // 2, 2)))
        left, right = turn_pairs(left, right, rope_ptr, position + 1 - RATIO, WIDTH, ROPE)
        slot = first_slot + position // RATIO
        entry = entries_ptr + cache_row * entries_stride + slot * slot_stride
        pair = tl.arange(0, WIDTH // 2)
        if ROTATES:
            dim = tl.arange(0, WIDTH)
            at_rotation = rotation_ptr + (2 * pair)[:, None] * WIDTH + dim[None, :]
            rotated = left[:, None] * tl.load(at_rotation) + right[:, None] * tl.load(at_rotation + WIDTH)
            blocks = tl.reshape(tl.sum(rotated, axis=0), (WIDTH // INDEX_BLOCK, INDEX_BLOCK))
            blocks = round_e2m1(blocks, tl.max(tl.abs(blocks), axis=1)[:, None])
            tl.store(entry + dim, tl.reshape(blocks, (WIDTH,)).to(kind))
        else:
            if not IS_INDEX:
                left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
                if ROUND_BLOCK > 0:
                    left, right = round_pairs_e4m3(left, right, (WIDTH - ROPE) // 2, WIDTH // 2, ROUND_BLOCK)
            tl.store(entry + 2 * pair, left.to(kind))
            tl.store(entry + 2 * pair + 1, right.to(kind))
    to = raw_ptr + (position % ring) * (2 * HALVES * WIDTH) + column
    tl.store(to, kv)
    tl.store(to + HALVES * WIDTH, score)


@triton.jit
def _compress_rows(
    positions_ptr, rows_ptr, starts_ptr, span_starts_ptr, rope_ptr, num_requests, eps,
    kv_ptr, scores_ptr, bias_ptr, norm_ptr, raw_ptr, entries_ptr, rotation_ptr,
    ring, part_stride, row_stride, raw_stride, entries_stride, slot_stride, first_slot,
    kv2_ptr, scores2_ptr, bias2_ptr, norm2_ptr, raw2_ptr, entries2_ptr, rotation2_ptr,
    ring2, part_stride2, row_stride2, raw_stride2, entries_stride2, slot_stride2, first_slot2,
    latents_ptr, latent_norm_ptr, cache_ptr, low_ptr, low_norm_ptr, out_ptr,
    latent_part, latent_row, low_part, low_row, cache_stride, latent_stride, first_latent, latent_ring, latent_eps,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ROUND_BLOCK: tl.constexpr, ROTATES: tl.constexpr, IS_INDEX: tl.constexpr,
    WIDTH2: tl.constexpr, PARTS2: tl.constexpr, ROUND_BLOCK2: tl.constexpr, ROTATES2: tl.constexpr,
    IS_INDEX2: tl.constexpr,
    SIZE: tl.constexpr, LATENT_PARTS: tl.constexpr, LATENT_BLOCK: tl.constexpr, LOW: tl.constexpr,
    LOW_BLOCK: tl.constexpr, LOW_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    POOLS: tl.constexpr = 2 if WIDTH2 > 0 else 1
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    num_rows = tl.load(starts_ptr + num_requests)
    position = tl.load(positions_ptr + row).to(tl.int32)
    span_start = tl.load(span_starts_ptr + row).to(tl.int32)
    cache_row = tl.load(rows_ptr + row).to(tl.int64)
    program = tl.program_id(1)
    if program >= POOLS:
        # Also for rows of nobody: what is made of them is multiplied on.
        if SIZE > 0:
            if program == POOLS:
                keep_latent(
                    latents_ptr, latent_norm_ptr, rope_ptr, cache_ptr, row, cache_row, position, latent_part,
                    latent_row, cache_stride, latent_stride, first_latent, latent_ring, latent_eps, SIZE, ROPE,
                    LATENT_PARTS, LATENT_BLOCK,
                )  # fmt: skip
            elif LOW > 0:
                norm_low_rank(
                    low_ptr, low_norm_ptr, out_ptr, row, low_part, low_row, latent_eps, LOW, LOW_BLOCK, LOW_PARTS,
                )  # fmt: skip
    elif row < num_rows:
        if program == 0:
            _compress(
                kv_ptr, scores_ptr, bias_ptr, norm_ptr, raw_ptr, entries_ptr, rotation_ptr, rope_ptr, row, cache_row,
                position, span_start, ring, part_stride, row_stride, raw_stride, entries_stride, slot_stride,
                first_slot, eps, WIDTH, RATIO, OVERLAPS, ROPE, PARTS, ROUND_BLOCK, ROTATES, IS_INDEX, TOKENS,
                INDEX_BLOCK,
            )  # fmt: skip
        elif WIDTH2 > 0:
            _compress(
                kv2_ptr, scores2_ptr, bias2_ptr, norm2_ptr, raw2_ptr, entries2_ptr, rotation2_ptr, rope_ptr, row,
                cache_row, position, span_start, ring2, part_stride2, row_stride2, raw_stride2, entries_stride2,
                slot_stride2, first_slot2, eps, WIDTH2, RATIO, OVERLAPS, ROPE, PARTS2, ROUND_BLOCK2, ROTATES2,
                IS_INDEX2, TOKENS, INDEX_BLOCK,
            )  # fmt: skip


def launch_compress_rows(
    pools: Sequence[Pool],
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    span_starts: Tensor,
    rope: Tensor,
    shape: PoolShape,
    written: LatentRows | None = None,
    tile: Tile | None = None,
) -> None:
    """See ``compress_rows``. ``tile`` stands in for the tuned one, for measuring."""
    from sparkchat.kernels.compressor.reference import INDEX_BLOCK

    tile = tile or (SPARSE_TILE if shape.overlaps else HEAVY_TILE)
    check_flat(positions, rows, starts, span_starts, rope)
    for pool in pools:
        _check(pool, shape, tile)
    first, second = pools[0], pools[-1]
    sizes = _sizes_of(first, shape)
    for name, value in _sizes_of(second, shape).items():
        sizes[f"{name}2"] = value if len(pools) > 1 else 0
    latents, latent_sizes = ((*[rope] * 6, *[0] * 8, 0.0), _NO_SIZES) if written is None else written_of(written)
    programs = len(pools) + (latent_sizes["SIZE"] > 0) + (latent_sizes["LOW"] > 0)
    launch(
        _compress_rows, (positions.shape[0], programs),
        positions, rows, starts, span_starts, rope, starts.shape[0] - 1, shape.eps, *_arguments_of(first),
        *_arguments_of(second), *latents,
        RATIO=shape.ratio, OVERLAPS=shape.overlaps, ROPE=shape.rope_dim, TOKENS=tile.tokens,
        INDEX_BLOCK=min(INDEX_BLOCK, second.norm.shape[0]),
        **sizes, **latent_sizes, num_warps=tile.warps,
    )  # fmt: skip


def _arguments_of(pool: Pool) -> tuple[Any, ...]:
    parts = pool.kv.stride(0) if pool.kv.dim() == 3 else 0
    return (
        pool.kv, pool.scores, pool.bias, pool.norm, pool.raw, pool.entries,
        pool.norm if pool.rotation is None else pool.rotation, pool.raw.shape[1], parts, pool.kv.stride(-2),
        pool.raw.stride(0), pool.entries.stride(0), pool.entries.stride(1), pool.first_slot,
    )  # fmt: skip


def _sizes_of(pool: Pool, shape: PoolShape) -> dict[str, int]:
    from sparkchat.kernels.latent_attention.kernel import round_block_of

    width = pool.norm.shape[0]
    is_rounded = pool.has_roundings and not pool.is_index
    return {
        "WIDTH": width,
        "PARTS": 1 if pool.kv.dim() == 2 else pool.kv.shape[0],
        "ROUND_BLOCK": round_block_of(width - shape.rope_dim) if is_rounded else 0,
        "ROTATES": int(pool.rotation is not None),
        "IS_INDEX": int(pool.is_index),
    }


def _check(pool: Pool, shape: PoolShape, tile: Tile) -> None:
    width = pool.norm.shape[0]
    if width != power_of_two(width) or shape.rope_dim > width:
        raise ValueError(f"no kernel for entries of {width} dimensions of which {shape.rope_dim} are turned")
    if shape.overlaps and 2 * shape.ratio > tile.tokens:
        raise ValueError(f"no kernel for overlapping entries of {shape.ratio} tokens")
    if pool.kv.stride() != pool.scores.stride() or pool.kv.stride(-1) != 1 or pool.entries.stride(2) != 1:
        raise ValueError("values and scores must be laid out alike, and flat in their last dimension as entries are")
    check_flat(pool.bias, pool.norm, pool.rotation, pool.raw[0])
