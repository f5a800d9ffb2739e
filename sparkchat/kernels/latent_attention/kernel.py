"""Attention over latents: every span of a row's keys by itself, then the spans of a row folded in order.

All heads of a row share its keys, so heads are the rows of the products, and a tile of latents is read once for both of
them. The first spans of a row are its window, the others hold its entries; where a span begins and how the keys in it
are added depends on the row's own position alone. Rows of one request find each other's keys in L2.

A decode step's rows see so little that a launch takes as long as one program: spans are short, most programs see one
tile of keys and load all of it at once, and what they run is kept few instructions long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.small_floats import round_pairs_e4m3

if TYPE_CHECKING:
    from sparkchat.kernels.latent_attention import LatentRows, LatentShape, LatentWorkspace

_LOG2E = 1.4426950408889634
_PAIRS = 64
"""Pairs of dimensions that one program of the second launch folds."""


_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Tile:
    """How the products are cut."""

    heads: int
    keys: int
    warps: int
    span: int = 0
    """Keys of the shortest spans; 0: SPAN"""
    reads_ahead: bool = True
    """Whether a program that takes one span asks for its keys before it turns its queries."""
    many_heads: int = 32
    """Heads of a program that takes all keys of a row, where programs of ``heads`` do not all run at once"""
    many_stages: int = 2
    """Depth of such a program's pipeline of loads"""
    many_rows: int = 25
    """So many rows or more are taken by such programs: one launch, in which the card is full without cutting rows."""


HALF_TILE, EXACT_TILE = Tile(16, 64, 8), Tile(16, 16, 4, many_stages=1)


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
    SIZE: tl.constexpr, ROPE: tl.constexpr, LATENT_PARTS: tl.constexpr, LATENT_BLOCK: tl.constexpr, LOW: tl.constexpr,
    LOW_BLOCK: tl.constexpr, LOW_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.int32)
    cache_row = tl.load(rows_ptr + row).to(tl.int64)
    if tl.program_id(1) == 0:
        keep_latent(
            latents_ptr, latent_norm_ptr, rope_ptr, cache_ptr, row, cache_row, position, latent_part, latent_row,
            cache_stride, slot_stride, first_slot, ring, eps, SIZE, ROPE, LATENT_PARTS, LATENT_BLOCK,
        )  # fmt: skip
    elif LOW > 0:
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


@triton.jit
def _partners(x, SHAPE: tl.constexpr, PAIRS: tl.constexpr):
    # x [*SHAPE] float32, as PAIRS [*, n/2, 2] with the two numbers of every pair exchanged. Neighbours lie in one
    # thread, so nothing is loaded twice and nothing moves. Sums of whole numbers, which wrap around, lose nothing.
    bits = tl.reshape(x, PAIRS).to(tl.int32, bitcast=True)
    sums = tl.sum(bits, axis=len(PAIRS) - 1, keep_dims=True)
    return tl.reshape((sums - bits).to(tl.float32, bitcast=True), SHAPE)


@triton.jit
def turn_queries(q, rope_ptr, position, HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr):
    """Queries q [HEADS, SIZE] float32 with their last ROPE dimensions turned by the position."""
    # Without tl.join or conditions: after these the compiler lays products out for numbers of fewer bits.
    dim = tl.arange(0, SIZE)
    odd = (dim % 2).to(tl.float32)
    even = 1.0 - odd
    angle = dim - (SIZE - ROPE)
    turn = tl.load(rope_ptr + position * ROPE + angle, mask=angle >= 0, other=even)
    partner = _partners(turn, (SIZE,), (SIZE // 2, 2))
    cos, sin = turn * even + partner * odd, turn * odd - partner * even
    return q * cos[None, :] + _partners(q, (HEADS, SIZE), (HEADS, SIZE // 2, 2)) * sin[None, :]


@triton.jit
def span_size(count, SPAN: tl.constexpr, MOST: tl.constexpr):
    """Keys of a span of a row that looks at ``count`` of them in at most MOST spans."""
    units = (count + SPAN - 1) // SPAN
    size = count * 0 + SPAN
    for step in tl.static_range(0, 16):
        size = tl.where(units > (MOST << step), SPAN << (step + 1), size)
    return size


@triton.jit
def load_queries(
    q_ptr, row, heads, part_stride, row_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """A row's queries as projected, of some heads: [heads, SIZE] float32."""
    at = q_ptr + row * row_stride + heads[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    q = tl.load(at, mask=(heads < HEADS)[:, None], other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        q += tl.load(at + part * part_stride, mask=(heads < HEADS)[:, None], other=0.0)
    return q


@triton.jit
def load_tile(
    base, chosen_ptr, key, stop, is_window, is_chosen, lap, first_slot, ring, slot_stride,
    SIZE: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Latents [keys, SIZE] of a window's positions or of entries ``key``, zeros from ``stop`` on. ``chosen_ptr`` of the
    row; ``lap`` the position in the ring's first slot when the window's first key was written."""
    is_key = key < stop
    slot = key - lap
    slot = first_slot + tl.where(slot >= ring, slot - ring, slot)
    if RATIO > 0:
        entry = key
        if TOPK > 0:
            # Also read where all entries are looked at, so as not to wait for the position.
            picked = tl.load(chosen_ptr + key, mask=is_key & ~is_window, other=0)
            entry = tl.where(is_chosen, picked, key)
        slot = tl.where(is_window, slot, first_slot + ring + entry)
    return tl.load(base + slot[:, None] * slot_stride + tl.arange(0, SIZE)[None, :], mask=is_key[:, None], other=0.0)


@triton.jit
def attend_tile(turned, latents, is_key, top, total, mixed, scale, EXACT: tl.constexpr):
    """One tile of keys more: largest score (base 2) and sum of weights [heads], weighted latents [heads, SIZE]."""
    if EXACT:
        score = tl.dot(turned, tl.trans(latents), input_precision="ieee") * scale
    else:
        score = tl.dot(turned, tl.trans(latents)) * scale
    score = tl.where(is_key[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = tl.fma(total, shrink, tl.sum(weight, axis=1))
    if EXACT:
        mixed = mixed * shrink[:, None] + tl.dot(weight, latents, input_precision="ieee")
    else:
        mixed = tl.dot(weight.to(latents.dtype), latents, mixed * shrink[:, None])
    return new_top, total, mixed


@triton.jit
def turn_back(left, right, cos, sin):
    """Pairs turned back by an angle. Which products are rounded is said, so that all kernels round alike."""
    return tl.fma(left, cos, right * sin), tl.fma(right, cos, -(left * sin))


@triton.jit
def _attend_latents(
    q_ptr, cache_ptr, rows_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, chosen_ptr, mixed_ptr, stats_ptr,
    part_stride, row_stride, cache_stride, slot_stride, first_slot, ring, scale, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, RATIO: tl.constexpr,
    TOPK: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, WINDOWS: tl.constexpr, MOST: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(2)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wait(PDL)
    # All that depends on the row alone is asked for before any of it is used.
    position = tl.load(positions_ptr + row).to(tl.int32)
    low = tl.maximum(tl.load(first_seen_ptr + row).to(tl.int32), 0)
    high = tl.load(ends_ptr + row).to(tl.int32)
    base = cache_ptr + tl.load(rows_ptr + row).to(tl.int64) * cache_stride
    q = load_queries(q_ptr, row, heads, part_stride, row_stride, HEADS, SIZE, PARTS)
    chosen_ptr += row * TOPK
    is_window = span < WINDOWS
    is_chosen = False
    # Keys of a row's window follow each other in the ring, and are fewer than it holds.
    lap = low - low % ring
    size = span_size(high - low, SPAN, WINDOWS)
    start = low + span * size
    stop = tl.minimum(start + size, high)
    if RATIO > 0:
        count = (position + 1) // RATIO
        if TOPK > 0:
            is_chosen = (count > TOPK) & ~is_window
            count = tl.minimum(count, TOPK)
        size = span_size(count, SPAN, MOST)
        start = tl.where(is_window, start, (span - WINDOWS) * size)
        stop = tl.where(is_window, stop, tl.minimum(start + size, count))
    if start < stop:
        if AHEAD:
            # Keys come while queries are turned, and each tile while the one before it is multiplied.
            latents = load_tile(
                base, chosen_ptr, start + tl.arange(0, BLOCK), stop, is_window, is_chosen, lap, first_slot, ring,
                slot_stride, SIZE, RATIO, TOPK,
            )  # fmt: skip
        unit = q * tl.rsqrt(tl.sum(q * q, axis=1) / SIZE + eps)[:, None]
        turned = turn_queries(unit, rope_ptr, position, TILE, SIZE, ROPE).to(cache_ptr.dtype.element_ty)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        mixed = tl.zeros((TILE, SIZE), tl.float32)
        for first in range(start, stop, BLOCK):
            key = first + tl.arange(0, BLOCK)
            if AHEAD:
                here = latents
                if first + BLOCK < stop:
                    latents = load_tile(
                        base, chosen_ptr, key + BLOCK, stop, is_window, is_chosen, lap, first_slot, ring, slot_stride,
                        SIZE, RATIO, TOPK,
                    )  # fmt: skip
            else:
                here = load_tile(
                    base, chosen_ptr, key, stop, is_window, is_chosen, lap, first_slot, ring, slot_stride, SIZE, RATIO,
                    TOPK,
                )  # fmt: skip
            top, total, mixed = attend_tile(turned, here, key < stop, top, total, mixed, scale, EXACT)
        is_head = heads < HEADS
        to = (row * HEADS + heads) * SPANS + span
        tl.store(mixed_ptr + to[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mixed, mask=is_head[:, None])
        tl.store(stats_ptr + to * 2, top, mask=is_head)
        tl.store(stats_ptr + to * 2 + 1, total, mask=is_head)


@triton.jit
def _join_latents(
    mixed_ptr, stats_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, sinks_ptr, out_ptr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, WINDOWS: tl.constexpr, MOST: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(2) * PAIRS
    pair = first + tl.arange(0, PAIRS)
    # The sink is a span with a weight and no value; sinks never change, so before the wait.
    top = tl.load(sinks_ptr + head) * 1.4426950408889634
    wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.int32)
    seen = tl.load(ends_ptr + row).to(tl.int32) - tl.maximum(tl.load(first_seen_ptr + row).to(tl.int32), 0)
    size = span_size(seen, SPAN, WINDOWS)
    windows = (seen + size - 1) // size
    spans = WINDOWS
    if RATIO > 0:
        count = (position + 1) // RATIO
        if TOPK > 0:
            count = tl.minimum(count, TOPK)
        size = span_size(count, SPAN, MOST)
        spans += (count + size - 1) // size
    total = tl.full((), 1.0, tl.float32)
    mixed = tl.zeros((PAIRS, 2), tl.float32)
    part = (row * HEADS + head) * ROOM
    for span in tl.static_range(SPANS):
        is_span = span < (windows if span < WINDOWS else spans)
        # Other multiprocessors wrote these: not from the cache of this one.
        span_top = tl.load(stats_ptr + (part + span) * 2, mask=is_span, other=float("-inf"), cache_modifier=".cg")
        span_total = tl.load(stats_ptr + (part + span) * 2 + 1, mask=is_span, other=0.0, cache_modifier=".cg")
        at = mixed_ptr + (part + span) * SIZE + 2 * pair[:, None] + tl.arange(0, 2)[None, :]
        span_mixed = tl.load(at, mask=is_span, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, span_top)
        old, new = tl.exp2(top - new_top), tl.exp2(span_top - new_top)
        total = tl.fma(total, old, span_total * new)
        mixed = tl.fma(mixed, old, span_mixed * new)
        top = new_top
    left, right = tl.split(mixed / total)
    angle = pair - (SIZE - ROPE) // 2
    at = rope_ptr + position.to(tl.int64) * ROPE + 2 * angle
    cos = tl.load(at, mask=angle >= 0, other=1.0)
    sin = tl.load(at + 1, mask=angle >= 0, other=0.0)
    left, right = turn_back(left, right, cos, sin)
    out = tl.join(left, right)
    to = out_ptr + (row * HEADS + head) * SIZE + 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty))


def launch_latent_attention(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    out: Tensor,
    workspace: LatentWorkspace,
    shape: LatentShape,
    context: int,
    chosen: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """See ``latent_attention``. ``tile`` stands in for the tuned one, for measuring."""
    from sparkchat.kernels.latent_attention import MOST_SPANS, SPAN, WINDOW_SPANS, latent_spans
    from sparkchat.kernels.latent_attention.many import launch_attend_rows

    num_rows, heads, size = out.shape
    is_exact = cache.dtype == torch.float32
    tile = tile or (EXACT_TILE if is_exact else HALF_TILE)
    room, spans = workspace.mixed.shape[2], latent_spans(shape, context, tile.span or SPAN)
    _check(cache, shape)
    check_flat(rows, positions, first_seen, ends, rope, sinks, out, chosen)
    if spans > room or workspace.mixed.shape[1] != heads or num_rows > workspace.mixed.shape[0]:
        raise ValueError(
            f"the workspace of {tuple(workspace.mixed.shape)} has no room for {num_rows} rows of {spans} spans"
        )
    scale, most_heads = size**-0.5 * _LOG2E, power_of_two(heads)
    cut = {"SPAN": tile.span or SPAN, "WINDOWS": WINDOW_SPANS, "MOST": MOST_SPANS}
    if num_rows >= tile.many_rows:
        runs_at_once = num_rows * -(-heads // tile.heads) <= _MULTIPROCESSORS
        launch_attend_rows(
            q, cache, rows, positions, first_seen, ends, rope, sinks, out, shape, chosen, scale,
            heads=max(16, min(tile.heads if runs_at_once else tile.many_heads, most_heads)), warps=tile.warps,
            stages=tile.many_stages, BLOCK=tile.keys, EXACT=is_exact, **cut,
        )  # fmt: skip
        return
    of_heads = max(16, min(tile.heads, most_heads))
    launch(
        _attend_latents, (num_rows, -(-heads // of_heads), spans),
        q, cache, rows, positions, first_seen, ends, rope, rows if chosen is None else chosen, workspace.mixed,
        workspace.stats, q.stride(0) if q.dim() == 3 else 0, q.stride(-2), cache.stride(0), cache.stride(1),
        shape.first_slot, shape.ring, scale, shape.eps,
        HEADS=heads, SIZE=size, ROPE=shape.rope_dim, PARTS=1 if q.dim() == 2 else q.shape[0], RATIO=shape.ratio,
        TOPK=shape.topk, SPANS=room, TILE=of_heads, BLOCK=tile.keys,
        AHEAD=tile.reads_ahead, EXACT=is_exact, **cut, lets_next=True, num_warps=tile.warps,
    )  # fmt: skip
    pairs = min(_PAIRS, size // 2)
    launch(
        _join_latents, (num_rows, heads, size // 2 // pairs),
        workspace.mixed, workspace.stats, positions, first_seen, ends, rope, sinks, out,
        HEADS=heads, SIZE=size, ROPE=shape.rope_dim, RATIO=shape.ratio, TOPK=shape.topk, ROOM=room, SPANS=spans,
        PAIRS=pairs, **cut, num_warps=1,
    )  # fmt: skip


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
) -> None:
    """See ``write_latents``."""
    from sparkchat.kernels.latent_attention import LatentRows

    check_flat(positions, rows, rope)
    written = LatentRows(latents, latent_norm, cache, shape, low_rank, low_rank_norm, out)
    arguments, sizes = written_of(written)
    launch(
        _write_latents, (latents.shape[-2], 1 if low_rank is None else 2), positions, rows, rope, *arguments,
        ROPE=shape.rope_dim, **sizes, num_warps=4,
    )  # fmt: skip


def written_of(written: LatentRows) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What a kernel that keeps latents is given of them: arguments, and numbers it is compiled for."""
    latents, cache, shape = written.latents, written.cache, written.shape
    _check(cache, shape)
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


def _check(cache: Tensor, shape: LatentShape) -> None:
    size = cache.shape[2]
    if size < 16 or size != power_of_two(size) or shape.rope_dim % 2:
        raise ValueError(f"no kernel for latents of {size} dimensions of which {shape.rope_dim} are turned")
    if cache.stride(2) != 1:
        raise ValueError("the last dimension of the cache must be contiguous")
