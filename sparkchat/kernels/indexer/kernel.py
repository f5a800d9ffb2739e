"""Scores of entries and the choice among them: a launch each.

Scores: a program takes some entries and a row; the rows of a request run side by side and find its keys in L2. (One
program for all of them took five times as long for six rows as for one.) Choice: a program takes a row, finds the k-th
highest score two bits at a time, as far as it takes to tell it from the next, and writes the entries above it and the
earliest of those that equal it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.indexer.reference import index_queries
from sparkchat.kernels.latent_attention.kernel import turn_queries
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

if TYPE_CHECKING:
    from sparkchat.kernels.indexer import IndexShape

_MOST_HELD = 16384
"""Scores that one program keeps in registers: those of 65,536 positions. Beyond that they are read again and again."""


@dataclass(frozen=True)
class Tile:
    """How the products are cut."""

    entries: int
    warps: int
    stages: int
    held: int = 256
    """Scores that a warp keeps to choose among"""


HALF_TILE, EXACT_TILE = Tile(128, 4, 2), Tile(64, 4, 1)


@triton.jit
def _score_entries(
    q_ptr, weights_ptr, keys_ptr, positions_ptr, rows_ptr, starts_ptr, rope_ptr, scores_ptr, num_requests,
    part_stride, row_stride, weights_stride, keys_stride, slot_stride, scores_stride,
    HEADS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr,
    RATIO: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_entry = tl.program_id(1) * BLOCK
    head, dim = tl.arange(0, TILE), tl.arange(0, SIZE)
    is_head = head < HEADS
    wait(PDL)
    # All that depends on the row alone is asked for before any of it is used.
    position = tl.load(positions_ptr + row).to(tl.int32)
    num_rows = tl.load(starts_ptr + num_requests)
    base = keys_ptr + tl.load(rows_ptr + row).to(tl.int64) * keys_stride
    at = q_ptr + row * row_stride + head[:, None] * SIZE + dim[None, :]
    q = tl.load(at, mask=is_head[:, None], other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        q += tl.load(at + part * part_stride, mask=is_head[:, None], other=0.0)
    weight = tl.load(weights_ptr + row * weights_stride + head, mask=is_head, other=0.0).to(tl.float32)
    seen = (position + 1) // RATIO
    # Rows behind the last request are copies of its last row, which alone is scored.
    if (row < num_rows) & (seen > TOPK) & (first_entry < seen):
        entry = first_entry + tl.arange(0, BLOCK)
        is_seen = entry < seen
        keys = tl.load(base + entry[:, None] * slot_stride + dim[None, :], mask=is_seen[:, None], other=0.0)
        if TURNS:
            q = turn_queries(q, rope_ptr, position, TILE, SIZE, ROPE)
        # Heads lie along a thread's numbers: their sum crosses few threads.
        if EXACT:
            products = tl.dot(keys, tl.trans(q), input_precision="ieee")
        else:
            products = tl.dot(keys, tl.trans(q.to(keys.dtype)))
        score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
        tl.store(scores_ptr + row * scores_stride + entry, score, mask=is_seen)


@triton.jit
def _ordered(scores_ptr, entry, seen):
    # Scores as whole numbers in the same order, the least of all for what is not seen: only the NaN last in order
    # becomes that too, and of equal ones the earliest are taken, which are seen.
    score = tl.load(scores_ptr + entry, mask=entry < seen, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(entry < seen, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)


@triton.jit
def _count_from(ordered, least, step):
    # How many reach one, two, three steps above ``least``: less than 2^15 each, so two share a number.
    one = (ordered >= least + step).to(tl.int32)
    two = (ordered >= least + step + step).to(tl.int32)
    three = (ordered >= least + step + step + step).to(tl.int32)
    both = tl.sum(one + (two << 16), axis=0)
    return both & 0xFFFF, both >> 16, tl.sum(three, axis=0)


@triton.jit
def _write_chosen(chosen_ptr, ordered, entry, least, room, above_before, level_before, TOPK: tl.constexpr):
    # Write those above the least chosen score, and those that equal it while there is room; returns the counts so far.
    is_above = (ordered > least).to(tl.int32)
    is_level = (ordered == least).to(tl.int32)
    both = is_above + (is_level << 16)
    counts = tl.cumsum(both, axis=0)
    above = above_before + (counts & 0xFFFF)
    level = level_before + (counts >> 16)
    is_chosen = (is_above > 0) | ((is_level > 0) & (level <= room))
    place = above + tl.minimum(level, room) - 1
    tl.store(chosen_ptr + place, entry, mask=is_chosen & (place < TOPK))
    total = tl.sum(both, axis=0)
    return above_before + (total & 0xFFFF), level_before + (total >> 16)


@triton.jit
def _choose_entries(
    scores_ptr, positions_ptr, starts_ptr, chosen_ptr, num_requests, scores_stride, chosen_stride,
    RATIO: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, IS_HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    seen = (tl.load(positions_ptr + row).to(tl.int32) + 1) // RATIO
    # Rows behind the last request are copies of its last row, which alone has scores.
    scored = tl.minimum(row, tl.maximum(tl.load(starts_ptr + num_requests) - 1, 0))
    if seen > TOPK:
        scores_ptr += scored * scores_stride
        chosen_ptr += row * chosen_stride
        held = _ordered(scores_ptr, tl.arange(0, BLOCK), seen)
        # The highest number that TOPK scores reach, from its highest bits down, until just so many reach it.
        least = tl.full((), -0x80000000, tl.int32)
        step = tl.full((), 1 << 30, tl.int32)
        above = tl.zeros((), tl.int32)
        reaching = seen
        while (step > 0) & (reaching != TOPK):
            one, two, three = _count_from(held, least, step)
            if not IS_HELD:
                for start in range(BLOCK, seen, BLOCK):
                    more = _count_from(_ordered(scores_ptr, start + tl.arange(0, BLOCK), seen), least, step)
                    one += more[0]
                    two += more[1]
                    three += more[2]
            steps = (one >= TOPK).to(tl.int32) + (two >= TOPK).to(tl.int32) + (three >= TOPK).to(tl.int32)
            # Those that reach the next candidate are above whatever is found.
            above = tl.where(steps == 0, one, tl.where(steps == 1, two, tl.where(steps == 2, three, above)))
            reaching = tl.where(steps == 0, reaching, tl.where(steps == 1, one, tl.where(steps == 2, two, three)))
            least += steps * step
            step = step >> 2
        # Where just so many reach it, all of them are taken as if they were above.
        is_even = reaching == TOPK
        least = tl.where(is_even, least - 1, least)
        room = tl.where(is_even, 0, TOPK - above)
        zero = tl.zeros((), tl.int32)
        before, level = _write_chosen(chosen_ptr, held, tl.arange(0, BLOCK), least, room, zero, zero, TOPK)
        if not IS_HELD:
            for start in range(BLOCK, seen, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                before, level = _write_chosen(
                    chosen_ptr, _ordered(scores_ptr, entry, seen), entry, least, room, before, level, TOPK
                )  # fmt: skip


def launch_choose_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    rope: Tensor,
    scores: Tensor,
    chosen: Tensor,
    shape: IndexShape,
    context: int,
    most_per_request: int,
    rotation: Tensor | None,
    tile: Tile | None = None,
    most_held: int = _MOST_HELD,
) -> None:
    """See ``choose_entries``. ``tile`` and ``most_held`` stand in for the tuned ones, for measuring."""
    _check(q, weights, keys, scores, chosen, shape, context)
    check_flat(positions, rows, starts, rope, rotation)
    is_exact = keys.dtype == torch.float32
    tile = tile or (EXACT_TILE if is_exact else HALF_TILE)
    entries = context // shape.ratio
    requests = starts.shape[0] - 1
    if rotation is not None:
        # Only where the published roundings are simulated: not worth a kernel.
        q = index_queries(q, positions, rope, shape, rotation).flatten(1)
    launch(
        _score_entries, (positions.shape[0], -(-entries // tile.entries)),
        q, weights, keys, positions, rows, starts, rope, scores, requests,
        q.stride(0) if q.dim() == 3 else 0, q.stride(-2), weights.stride(0), keys.stride(0), keys.stride(1),
        scores.stride(0),
        HEADS=shape.heads, TILE=max(16, power_of_two(shape.heads)), SIZE=shape.size, ROPE=shape.rope_dim,
        PARTS=1 if q.dim() == 2 else q.shape[0], RATIO=shape.ratio, TOPK=shape.topk, BLOCK=tile.entries,
        TURNS=rotation is None, EXACT=is_exact,
        lets_next=True, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    block = power_of_two(entries) if entries <= most_held else most_held // 2
    launch(
        _choose_entries, (positions.shape[0],),
        scores, positions, starts, chosen, requests, scores.stride(0), chosen.stride(0),
        RATIO=shape.ratio, TOPK=shape.topk, BLOCK=block, IS_HELD=block >= entries,
        lets_next=True, num_warps=max(1, min(16, block // tile.held)),
    )  # fmt: skip


def _check(
    q: Tensor, weights: Tensor, keys: Tensor, scores: Tensor, chosen: Tensor, shape: IndexShape, context: int
) -> None:
    if shape.size < 16 or shape.size != power_of_two(shape.size) or shape.heads > 128:
        raise ValueError(f"no kernel for {shape.heads} index heads of {shape.size}")
    rows = min(len(scores), len(chosen))
    if rows < q.shape[-2] or scores.shape[1] < context // shape.ratio or chosen.shape[1] < shape.topk:
        raise ValueError(f"{context // shape.ratio} entries of {q.shape[-2]} rows do not fit {tuple(scores.shape)}")
    if any(t.stride(-1) != 1 for t in (q, weights, keys, scores, chosen)):
        raise ValueError("the last dimension of what an indexer reads must be contiguous")
