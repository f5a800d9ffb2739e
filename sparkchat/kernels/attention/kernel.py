"""Decode attention in two passes: every span of keys by itself, then the spans of a row together.

The query heads of a group and the rows of a request share the keys they read. Sums run in an order that depends on
the position of a key alone: spans and tiles begin at multiples of their size, tiles have the same size whatever is in
them, and what a row does not see adds zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, power_of_two, wait

if TYPE_CHECKING:
    from sparkchat.kernels.attention import AttentionWorkspace

QUERIES = 32
"""Queries of a tile, always: fewer would have other sums, as the layout decides what is added first."""
_PROGRAMS = 264
"""About how many programs to start: two on each multiprocessor of an H200."""


@dataclass(frozen=True)
class Tile:
    """Keys of a tile, warps of a program, depth of the pipeline of loads."""

    keys: int
    warps: int
    stages: int


HALF_TILE, EXACT_TILE = Tile(64, 4, 3), Tile(32, 4, 1)


@triton.jit
def _attend(
    q_ptr, cache_ptr, starts_ptr, rows_ptr, positions_ptr, ends_ptr, pages_ptr, mixed_ptr, stats_ptr,
    scale, page_stride, head_stride, slot_stride, pages_stride, capacity, page_size, num_spans,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PAGED: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERIES // GROUP
    HEADS: tl.constexpr = GROUP * KV_HEADS
    request = tl.program_id(0) // TILES
    head = tl.program_id(1)
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
        slot_of_query = row * HEADS + (query % GROUP) * KV_HEADS + head
        q = tl.load(q_ptr + slot_of_query[:, None] * DIM + dim[None, :], mask=is_query[:, None], other=0.0)
        q = q.to(cache_ptr.dtype.element_ty)
        cache_row = tl.load(rows_ptr + first).to(tl.int64)
        key_base = cache_ptr + head * head_stride
        value_base = key_base + KV_HEADS * head_stride
        for span in range(lowest // SPAN + tl.program_id(2), tl.cdiv(highest, SPAN), PROGRAMS):
            top = tl.full((QUERIES,), float("-inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            mixed = tl.zeros((QUERIES, DIM), tl.float32)
            for start in range(span * SPAN, tl.minimum(span * SPAN + SPAN, highest), BLOCK):
                at = start + tl.arange(0, BLOCK)
                stored = (at < highest) & (at >= lowest)
                slot = (at % capacity).to(tl.int64)
                page = cache_row
                if PAGED:
                    page = tl.load(pages_ptr + cache_row * pages_stride + slot // page_size, mask=stored, other=0)
                    page = page.to(tl.int64)
                    slot = slot % page_size
                offset = (page * page_stride + slot * slot_stride)[:, None] + dim[None, :]
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
                total = total * shrink + tl.sum(weight, axis=1)
                if EXACT:
                    mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
                else:
                    mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
                top = new_top
            part = slot_of_query * num_spans + span
            tl.store(mixed_ptr + part[:, None] * DIM + dim[None, :], mixed, mask=is_query[:, None])
            tl.store(stats_ptr + part * 2, top, mask=is_query)
            tl.store(stats_ptr + part * 2 + 1, total, mask=is_query)


@triton.jit
def _join_spans(
    mixed_ptr, stats_ptr, starts_ptr, positions_ptr, ends_ptr, out_ptr, num_requests, num_spans,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    wait(PDL)
    if row < tl.load(starts_ptr + num_requests):
        dim = tl.arange(0, DIM)
        end = tl.load(ends_ptr + row).to(tl.int32)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(tl.load(positions_ptr + row).to(tl.int32) - WINDOW + 1, 0) // SPAN
        last = tl.cdiv(end, SPAN)
        base = (row * HEADS + head) * num_spans
        every = tl.arange(0, SPANS)
        is_span = (every >= first) & (every < last)
        peak = tl.max(tl.load(stats_ptr + (base + every) * 2, mask=is_span, other=float("-inf")), axis=0)
        mixed = tl.zeros((DIM,), tl.float32)
        total = 0.0
        # Groups of spans begin at multiples of BLOCK whatever the window, so that their sums are the same.
        for start in range(first // BLOCK * BLOCK, last, BLOCK):
            span = start + tl.arange(0, BLOCK)
            inside = (span >= first) & (span < last)
            top = tl.load(stats_ptr + (base + span) * 2, mask=inside, other=float("-inf"))
            share = tl.exp2(top - peak)
            total += tl.sum(share * tl.load(stats_ptr + (base + span) * 2 + 1, mask=inside, other=0.0), axis=0)
            part = tl.load(mixed_ptr + (base + span)[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
            mixed += tl.sum(share[:, None] * part, axis=0)
        out = out_ptr + (row * HEADS + head) * DIM + dim
        tl.store(out, (mixed / total).to(out_ptr.dtype.element_ty))


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
) -> None:
    """See ``decode_attention``. ``tile`` stands in for the tuned one, for measuring."""
    from sparkchat.kernels.attention import SPAN

    num_rows, heads, dim = q.shape
    kv_heads, page_size = cache.shape[1] // 2, cache.shape[2]
    group = heads // kv_heads
    _check(q, cache, out, group)
    is_exact = cache.dtype == torch.float32
    tile = tile or (EXACT_TILE if is_exact else HALF_TILE)
    requests, spans = starts.shape[0] - 1, workspace.mixed.shape[2]
    tiles = -(-max_rows // (QUERIES // group))
    programs = max(1, min(spans, _PROGRAMS // max(1, requests * tiles * kv_heads)))
    launch(
        _attend, (requests * tiles, kv_heads, programs),
        q, cache, starts, rows, positions, ends, rows if pages is None else pages, workspace.mixed, workspace.stats,
        dim**-0.5 * 1.4426950408889634, cache.stride(0), cache.stride(1), cache.stride(2),
        0 if pages is None else pages.stride(0),
        page_size if pages is None else pages.shape[1] * page_size, page_size, spans,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, QUERIES=QUERIES, TILES=tiles, PROGRAMS=programs, SPAN=SPAN,
        BLOCK=tile.keys, WINDOW=window or 0, PAGED=pages is not None, EXACT=is_exact,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        _join_spans, (num_rows, heads),
        workspace.mixed, workspace.stats, starts, positions, ends, out, requests, spans,
        HEADS=heads, DIM=dim, SPAN=SPAN, SPANS=power_of_two(spans), BLOCK=16, WINDOW=window or 0, num_warps=4,
    )  # fmt: skip


def _check(q: Tensor, cache: Tensor, out: Tensor, group: int) -> None:
    if group > QUERIES or q.shape[2] != power_of_two(q.shape[2]):
        raise ValueError(f"no attention kernel for {group} query heads a key head of size {q.shape[2]}")
    if not (q.is_contiguous() and out.is_contiguous() and cache.stride(3) == 1):
        raise ValueError("q and out must be contiguous, and so must the last dimension of the cache")
