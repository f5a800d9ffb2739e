"""Decode attention: every span of keys by itself, then the spans of a row folded together in order.

The query heads of a group and the rows of a request share the keys they read. Sums run in an order that depends on
the position of a key alone: spans and tiles begin where positions say, tiles have the same size whatever is in them,
and what a row does not see adds zeros.

Spans grow with the position as the steps of a floating point number do: 64 keys below 2048, then 16 spans to every
doubling. So a short context has a program on every multiprocessor and a long one has few sums to fold. Four spans are
folded into a bundle, and bundles into the row. Who folds is only a matter of speed: one program all of a row where
there are many rows; a program its bundle, and a second launch the bundles, where there are some; the second launch
everything where there are few (a fold by the last program to arrive took longer at every size on an H200:
benchmarks/results/2026-11-30-kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.cards import card_of
from sparkchat.kernels.launch import launch, power_of_two, prefetch, reads_ahead, wait

if TYPE_CHECKING:
    from sparkchat.kernels.attention import AttentionWorkspace

QUERIES = 32
"""Queries of a tile, always: fewer would have other sums, as the layout decides what is added first."""
_PROGRAMS = 528
"""About how many programs to start: two on each multiprocessor of an H200, and as many that follow. The longest spans
come first."""
_MANY_GROUPS = 128
"""Groups (of rows and a key head) from which on one program reads everything of a group."""
_SOME_GROUPS = 32
"""Groups from which on one program reads a bundle: with eight rows of eight requests at 1k keys the sums of single
spans were 18 MB to write and to read, half as much as the keys."""
_AHEAD = 2
"""Bundles that the second launch reads at a time."""
_PIECE = 64
"""Numbers of a head that one program of the second launch folds."""
BUNDLE = tl.constexpr(4)
"""Spans that are folded before what they come to is folded into a row's sums."""


@dataclass(frozen=True)
class Tile:
    """How the work is cut; no number of it changes what a row's sums look like but ``keys``."""

    keys: int
    """Of a tile, at most ``UNIT``."""
    warps: int
    stages: int
    """Depth of the pipeline of loads. With pages a key lies behind two loads, its page's number and itself, which share
    the depth: as many tiles are under way only where it is nearly doubled. With three stages for both, the compiler has
    every tile waited for, and the steps of an H200 took longer (benchmarks/results/2026-11-30-gpu-decode.md)."""
    programs: int = _PROGRAMS
    many_groups: int = _MANY_GROUPS
    some_groups: int = _SOME_GROUPS


HALF_TILE, EXACT_TILE = Tile(64, 4, 3), Tile(32, 4, 1)


@triton.jit
def _span_of(keys, UNIT: tl.constexpr):
    # The span that keys lie in: 0 to 31, then 16 to every doubling of the unit's number.
    units = keys // UNIT
    doublings = keys * 0
    for step in tl.static_range(5, 24):
        doublings += ((units >> step) > 0).to(tl.int32)
    return 16 * doublings + (units >> doublings)


@triton.jit
def _start_of(span, UNIT: tl.constexpr):
    doublings = tl.maximum(span // 16 - 1, 0)
    return ((span - 16 * doublings) << doublings) * UNIT


@triton.jit
def _fold(run_top, run_total, run_mixed, top, total, mixed):
    # One span more. Multiplications and additions are spelled out, so that all who fold do the same.
    new_top = tl.maximum(run_top, top)
    # Where no key was seen yet, -inf - -inf would be NaN.
    peak = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(run_top - peak), tl.exp2(top - peak)
    run_total = tl.fma(new, total, run_total * old)
    wide = tl.broadcast_to(new[:, None], mixed.shape)
    return new_top, run_total, tl.fma(wide, mixed, run_mixed * old[:, None])


@triton.jit
def _places(
    at, first, pages_ptr, cache_row, page_stride, slot_stride, pages_stride, capacity,
    PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    # Where the keys of these positions begin. They lie in the page of the position ``first``, as pages are whole tiles.
    # Only rings divide by a number that the compiler does not know: such divisions were a third of a tile's
    # instructions, and eight calls (tests/kernels/ahead_attention.py counts).
    if RING:
        at = at % capacity
        first = first % capacity
    page = cache_row
    if PAGE > 0:
        page = tl.load(pages_ptr + cache_row * pages_stride + first // PAGE).to(tl.int64)
        at = at % PAGE
    return page * page_stride + at.to(tl.int64) * slot_stride


@triton.jit
def _call_tile(
    key_base, value_base, pages_ptr, start, lowest, highest, cache_row, page_stride, slot_stride, pages_stride,
    capacity, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    # Call a tile of keys and values into L2, without waiting for it.
    at = tl.minimum(tl.maximum(start + tl.arange(0, BLOCK), lowest), tl.maximum(highest - 1, lowest))
    first = tl.minimum(tl.maximum(start, lowest), tl.maximum(highest - 1, lowest))
    place = _places(at, first, pages_ptr, cache_row, page_stride, slot_stride, pages_stride, capacity, PAGE, RING)
    BYTES: tl.constexpr = DIM * (key_base.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(key_base + place, BYTES)
    prefetch(value_base + place, BYTES)


@triton.jit
def _attend_tile(
    q, key_base, value_base, pages_ptr, start, lowest, highest, low, end, cache_row, scale, top, totals, mixed,
    page_stride, slot_stride, pages_stride, capacity,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    stored = (at < highest) & (at >= lowest)
    place = _places(at, start, pages_ptr, cache_row, page_stride, slot_stride, pages_stride, capacity, PAGE, RING)
    offset = place[:, None] + tl.arange(0, DIM)[None, :]
    k = tl.load(key_base + offset, mask=stored[:, None], other=0.0)
    v = tl.load(value_base + offset, mask=stored[:, None], other=0.0)
    if EXACT:
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        score = tl.dot(q, tl.trans(k)) * scale
    visible = (at[None, :] < end[:, None]) & (at[None, :] >= low[:, None])
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # A query that has seen no key yet stays at -inf: exp2(-inf - -inf) would be NaN.
    peak = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - peak[:, None])
    shrink = tl.exp2(top - peak)
    # Weights are added up key by key, and across keys only at the end of a span.
    totals = totals * shrink[:, None] + weight
    if EXACT:
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    else:
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
    return new_top, totals, mixed


@triton.jit
def _attend(
    q_ptr, cache_ptr, starts_ptr, rows_ptr, positions_ptr, ends_ptr, pages_ptr, mixed_ptr, stats_ptr, out_ptr,
    scale, page_stride, head_stride, slot_stride, pages_stride, capacity, num_spans,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    EXACT: tl.constexpr, INSIDE: tl.constexpr, BUNDLED: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERIES // GROUP
    request = tl.program_id(0) // TILES
    head = tl.program_id(1)
    if not SETTLED:
        wait(PDL)
    first = tl.load(starts_ptr + request) + (tl.program_id(0) % TILES) * ROWS
    count = tl.minimum(tl.load(starts_ptr + request + 1) - first, ROWS)
    if count > 0:
        query = tl.arange(0, QUERIES)
        dim = tl.arange(0, DIM)
        row = (first + query // GROUP).to(tl.int64)
        is_query = query // GROUP < count
        position = tl.load(positions_ptr + row, mask=is_query, other=0).to(tl.int32)
        end = tl.load(ends_ptr + row, mask=is_query, other=0).to(tl.int32)
        low = tl.zeros((QUERIES,), tl.int32)
        if WINDOW > 0:
            low = tl.maximum(position - WINDOW + 1, 0)
        lowest = tl.min(tl.where(is_query, low, 2147483647), axis=0)
        highest = tl.max(end, axis=0)
        slot_of_query = row * (GROUP * KV_HEADS) + (query % GROUP) * KV_HEADS + head
        cache_row = tl.load(rows_ptr + first).to(tl.int64)
        key_base = cache_ptr + head * head_stride
        value_base = key_base + KV_HEADS * head_stride
        first_span = _span_of(lowest, UNIT)
        last_span = _span_of(tl.maximum(highest - 1, lowest), UNIT)
        if SETTLED:
            # Most of what this program reads first was written by earlier steps.
            span = first_span
            if BUNDLED:
                span = tl.maximum((last_span // BUNDLE - tl.program_id(2)) * BUNDLE, first_span)
            elif not INSIDE:
                span = tl.maximum(last_span - tl.program_id(2), first_span)
            _call_tile(
                key_base, value_base, pages_ptr, _start_of(span, UNIT), lowest, highest, cache_row, page_stride,
                slot_stride, pages_stride, capacity, DIM, BLOCK, PAGE, WINDOW > 0,
            )  # fmt: skip
            wait(PDL)
        q = tl.load(q_ptr + slot_of_query[:, None] * DIM + dim[None, :], mask=is_query[:, None], other=0.0)
        q = q.to(cache_ptr.dtype.element_ty)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        totals = tl.zeros((QUERIES, BLOCK), tl.float32)
        mixed = tl.zeros((QUERIES, DIM), tl.float32)
        to = out_ptr + slot_of_query[:, None] * DIM + dim[None, :]
        if INSIDE or BUNDLED:
            # One loop over all tiles, so that the loads of a span are under way before the one before it ends.
            bundle = last_span // BUNDLE - tl.program_id(2)
            from_span = first_span
            until = highest
            if BUNDLED:
                from_span = tl.maximum(bundle * BUNDLE, first_span)
                until = tl.minimum(_start_of((bundle + 1) * BUNDLE, UNIT), highest)
                if bundle < first_span // BUNDLE:
                    until = 0
            sums_top, sums_total, sums_mixed = top, tl.zeros((QUERIES,), tl.float32), mixed
            run_top, run_total, run_mixed = sums_top, sums_total, sums_mixed
            span = from_span
            span_end = _start_of(span + 1, UNIT)
            for start in range(_start_of(from_span, UNIT), until, BLOCK):
                top, totals, mixed = _attend_tile(
                    q, key_base, value_base, pages_ptr, start, lowest, highest, low, end, cache_row, scale, top,
                    totals, mixed, page_stride, slot_stride, pages_stride, capacity, DIM, BLOCK, PAGE, WINDOW > 0,
                    EXACT,
                )  # fmt: skip
                if (start + BLOCK >= span_end) | (start + BLOCK >= until):
                    sums_top, sums_total, sums_mixed = _fold(
                        sums_top, sums_total, sums_mixed, top, tl.sum(totals, axis=1), mixed
                    )
                    top = tl.full((QUERIES,), float("-inf"), tl.float32)
                    totals = tl.zeros((QUERIES, BLOCK), tl.float32)
                    mixed = tl.zeros((QUERIES, DIM), tl.float32)
                    span += 1
                    span_end = _start_of(span + 1, UNIT)
                    if INSIDE and ((span % BUNDLE == 0) | (start + BLOCK >= until)):
                        run_top, run_total, run_mixed = _fold(
                            run_top, run_total, run_mixed, sums_top, sums_total, sums_mixed
                        )
                        sums_top, sums_total, sums_mixed = top, tl.zeros((QUERIES,), tl.float32), mixed
            if INSIDE:
                tl.store(to, (run_mixed / run_total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query[:, None])
            else:
                if bundle >= first_span // BUNDLE:
                    part = slot_of_query * num_spans + bundle * BUNDLE
                    tl.store(mixed_ptr + part[:, None] * DIM + dim[None, :], sums_mixed, mask=is_query[:, None])
                    tl.store(stats_ptr + part * 2, sums_top, mask=is_query)
                    tl.store(stats_ptr + part * 2 + 1, sums_total, mask=is_query)
        else:
            for back in range(tl.program_id(2), last_span - first_span + 1, PROGRAMS):
                span = last_span - back
                top = tl.full((QUERIES,), float("-inf"), tl.float32)
                totals = tl.zeros((QUERIES, BLOCK), tl.float32)
                mixed = tl.zeros((QUERIES, DIM), tl.float32)
                for start in range(_start_of(span, UNIT), tl.minimum(_start_of(span + 1, UNIT), highest), BLOCK):
                    top, totals, mixed = _attend_tile(
                        q, key_base, value_base, pages_ptr, start, lowest, highest, low, end, cache_row, scale, top,
                        totals, mixed, page_stride, slot_stride, pages_stride, capacity, DIM, BLOCK, PAGE, WINDOW > 0,
                        EXACT,
                    )  # fmt: skip
                part = slot_of_query * num_spans + span
                tl.store(mixed_ptr + part[:, None] * DIM + dim[None, :], mixed, mask=is_query[:, None])
                tl.store(stats_ptr + part * 2, top, mask=is_query)
                tl.store(stats_ptr + part * 2 + 1, tl.sum(totals, axis=1), mask=is_query)
    elif SETTLED:
        wait(PDL)


@triton.jit
def _join_spans(
    mixed_ptr, stats_ptr, starts_ptr, positions_ptr, ends_ptr, out_ptr, num_requests, num_spans,
    HEADS: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr, BUNDLED: tl.constexpr, AHEAD: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if not SETTLED:
        wait(PDL)
    if row < tl.load(starts_ptr + num_requests):
        dim = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
        end = tl.load(ends_ptr + row).to(tl.int32)
        low = end * 0
        if WINDOW > 0:
            low = tl.maximum(tl.load(positions_ptr + row).to(tl.int32) - WINDOW + 1, 0)
        first_span = _span_of(low, UNIT)
        last_span = _span_of(tl.maximum(end - 1, low), UNIT)
        if SETTLED:
            wait(PDL)
        base = (row * HEADS + head) * num_spans + tl.arange(0, 1)
        run_top = tl.full((1,), float("-inf"), tl.float32)
        run_total = tl.zeros((1,), tl.float32)
        run_mixed = tl.zeros((1, PIECE), tl.float32)
        for start in range(first_span // BUNDLE, last_span // BUNDLE + 1, AHEAD):
            for nth in tl.static_range(AHEAD):
                sums_top = tl.full((1,), float("-inf"), tl.float32)
                sums_total = tl.zeros((1,), tl.float32)
                sums_mixed = tl.zeros((1, PIECE), tl.float32)
                for step in tl.static_range(1 if BUNDLED else BUNDLE):
                    span = (start + nth) * BUNDLE + step
                    part = base + span
                    is_part = span + tl.arange(0, 1) <= last_span
                    if not BUNDLED:
                        is_part &= span >= first_span
                    # Other multiprocessors wrote these: not from the cache of this one.
                    top = tl.load(stats_ptr + part * 2, mask=is_part, other=float("-inf"), cache_modifier=".cg")
                    total = tl.load(stats_ptr + part * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
                    at = mixed_ptr + part[:, None] * DIM + dim[None, :]
                    mixed = tl.load(at, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
                    sums_top, sums_total, sums_mixed = _fold(sums_top, sums_total, sums_mixed, top, total, mixed)
                run_top, run_total, run_mixed = _fold(run_top, run_total, run_mixed, sums_top, sums_total, sums_mixed)
        out = out_ptr + (row * HEADS + head) * DIM + dim[None, :]
        tl.store(out, (run_mixed / run_total[:, None]).to(out_ptr.dtype.element_ty))
    elif SETTLED:
        wait(PDL)


def launch_decode_attention(
    q: Tensor,
    cache: Tensor,
    starts: Tensor,
    rows: Tensor,
    positions: Tensor,
    ends: Tensor,
    out: Tensor,
    workspace: AttentionWorkspace,
    max_rows: int,
    window: int | None,
    pages: Tensor | None,
    tile: Tile | None = None,
    is_settled: bool = False,
) -> None:
    """See ``decode_attention``. ``tile`` stands in for the tuned one, for measuring."""
    from sparkchat.kernels.attention import UNIT

    num_rows, heads, dim = q.shape
    kv_heads, page_size = cache.shape[1] // 2, cache.shape[2]
    group = heads // kv_heads
    _check(q, cache, out, group)
    is_exact = cache.dtype == torch.float32
    tile = tile or (EXACT_TILE if is_exact else HALF_TILE)
    if pages is not None and page_size % tile.keys:
        raise ValueError(f"pages of {page_size} keys are not whole tiles of {tile.keys}")
    stages = min(tile.stages, _most_stages(tile.keys, dim, q.element_size(), card_of(q.device).shared_bytes))
    requests, spans = starts.shape[0] - 1, workspace.mixed.shape[2]
    tiles = -(-max_rows // (QUERIES // group))
    groups = requests * tiles * kv_heads
    is_bundled = tile.some_groups <= groups < tile.many_groups
    programs = 1 if groups >= tile.many_groups else max(1, min(spans, tile.programs // max(1, groups)))
    if is_bundled:
        programs = -(-spans // BUNDLE.value)
    launch(
        _attend, (requests * tiles, kv_heads, programs),
        q, cache, starts, rows, positions, ends, rows if pages is None else pages, workspace.mixed, workspace.stats,
        out, dim**-0.5 * 1.4426950408889634, cache.stride(0), cache.stride(1), cache.stride(2),
        0 if pages is None else pages.stride(0),
        page_size, spans,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, QUERIES=QUERIES, TILES=tiles, PROGRAMS=programs, UNIT=UNIT,
        BLOCK=tile.keys, WINDOW=window or 0, PAGE=0 if pages is None else page_size, EXACT=is_exact,
        INSIDE=groups >= tile.many_groups, BUNDLED=is_bundled, SETTLED=reads_ahead(is_settled),
        num_warps=tile.warps, num_stages=stages if pages is None else 2 * stages - 1,
    )  # fmt: skip
    if groups < tile.many_groups:
        piece = min(dim, _PIECE)
        launch(
            _join_spans, (num_rows, heads, dim // piece),
            workspace.mixed, workspace.stats, starts, positions, ends, out, requests, spans,
            HEADS=heads, DIM=dim, PIECE=piece, BUNDLED=is_bundled, AHEAD=_AHEAD, UNIT=UNIT, WINDOW=window or 0,
            SETTLED=reads_ahead(is_settled), num_warps=1,
        )  # fmt: skip


def _most_stages(keys: int, dim: int, element_size: int, shared_bytes: int) -> int:
    """Beside queries and chances shared memory holds one tile of keys and values for each stage but the first."""
    rest = shared_bytes - QUERIES * (dim + 2 * keys) * element_size
    return 1 + max(1, rest // (2 * keys * dim * element_size))


def _check(q: Tensor, cache: Tensor, out: Tensor, group: int) -> None:
    if group > QUERIES or q.shape[2] != power_of_two(q.shape[2]):
        raise ValueError(f"no attention kernel for {group} query heads a key head of size {q.shape[2]}")
    if not (q.is_contiguous() and out.is_contiguous() and cache.stride(3) == 1):
        raise ValueError("q and out must be contiguous, and so must the last dimension of the cache")
