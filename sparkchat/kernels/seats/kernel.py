"""What surrounds the layers of a captured step, in one launch before them and one behind.

As torch operations the same is some 120 launches a round, of 2 us each inside a graph; the work itself is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

if TYPE_CHECKING:
    from sparkchat.kernels.accept import AcceptBuffers
    from sparkchat.kernels.sampling import Laws
    from sparkchat.kernels.seats import BlockTensors, PackedRows, SeatTensors, StepWords

COMPACT, CAP, SHARED = 1, 2, -1
"""As in engine/captured/state.py."""


@triton.jit
def _embed(table_ptr, token, x_ptr, row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # One row of the table as float32.
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(table_ptr + token * SIZE + column, mask=inside, other=0.0)
    tl.store(x_ptr + row * SIZE + column, values.to(tl.float32), mask=inside)


@triton.jit
def _enter_block(
    words_ptr, anchor_ptr, kv_len_ptr, draft_row_ptr, table_ptr, exponents_ptr,
    x_ptr, positions_ptr, rows_ptr, ends_ptr, starts_ptr, chance_ptr, confidence_ptr,
    count, seats, chances_at, mask_token, spare_row,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_CHANCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A row of a block to be drafted: [anchor, mask, ...] of a seat. A block of nobody is a copy of the last one.
    row = tl.program_id(0).to(tl.int64)
    place = row % WIDTH
    wait(PDL)
    num_requests = tl.load(words_ptr + 3 * seats).to(tl.int64)
    seat = tl.minimum(row // WIDTH, tl.maximum(num_requests - 1, 0))
    start = tl.load(kv_len_ptr + seat)
    drafted = tl.load(words_ptr + seat).to(tl.int64)
    token = tl.where(place == 0, tl.load(anchor_ptr + seat), mask_token)
    tl.store(positions_ptr + row, start + place)
    tl.store(rows_ptr + row, tl.where(num_requests > 0, tl.load(draft_row_ptr + seat), spare_row).to(tl.int32))
    tl.store(ends_ptr + row, tl.maximum(start + drafted, 1))
    if place == 0:
        tl.store(starts_ptr + row // WIDTH, row.to(tl.int32))
        tl.store(starts_ptr + count, (row + count * WIDTH).to(tl.int32), mask=row == 0)
    if HAS_CHANCES:
        # (u (2 - u)) ** exponent, where 0 ** 0 is 1.
        exponent = tl.load(exponents_ptr + place)
        u = tl.load(words_ptr + chances_at + row)
        chance = tl.exp(exponent * tl.log(tl.maximum(u * (2.0 - u), 1e-300)))
        tl.store(chance_ptr + row, chance)
        tl.store(confidence_ptr + row, tl.log(chance / (1.0 - chance)).to(tl.float32))
    _embed(table_ptr, token, x_ptr, row, SIZE, BLOCK)


@triton.jit
def _limit(
    words_ptr, remaining_ptr, limits_ptr, budget_ptr, count, seats,
    REQUESTS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Most drafts of each request that shares a budget, -1 for the others; and the budget.
    wait(PDL)
    request = tl.arange(0, REQUESTS)
    inside = request < count
    drafted = tl.load(words_ptr + request, mask=inside, other=0.0).to(tl.int64)
    planned = tl.load(words_ptr + seats + request, mask=inside, other=0.0).to(tl.int64)
    left = tl.load(remaining_ptr + request, mask=inside, other=1)
    limit = tl.minimum(drafted, tl.maximum(left - 1, 0))
    tl.store(limits_ptr + request, tl.where(planned == SHARED, limit, -1).to(tl.int32), mask=inside)
    tl.store(budget_ptr, tl.load(words_ptr + 3 * seats + 1).to(tl.int32))


@triton.jit
def _enter_rows(
    words_ptr, planned_ptr, anchor_ptr, kv_len_ptr, remaining_ptr, cache_row_ptr, draft_row_ptr, ids_ptr, table_ptr,
    x_ptr, positions_ptr, rows_ptr, draft_rows_ptr, ends_ptr, starts_ptr, lens_ptr, caps_ptr,
    count, seats, num_rows, spare_row, spare_draft_row,
    WIDTH: tl.constexpr, REQUESTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_PLAN: tl.constexpr,
    COMPACT: tl.constexpr, CAP: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A row to be verified. Every program plans all requests, which is a handful of numbers.
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    request = tl.arange(0, REQUESTS)
    inside = request < count
    drafted = tl.load(words_ptr + request, mask=inside, other=0.0).to(tl.int64)
    kind = tl.load(words_ptr + 2 * seats + request, mask=inside, other=0.0).to(tl.int64)
    num_requests = tl.load(words_ptr + 3 * seats).to(tl.int64)
    left = tl.load(remaining_ptr + request, mask=inside, other=1)
    limit = tl.minimum(drafted, tl.maximum(left - 1, 0))
    planned = tl.load(words_ptr + seats + request, mask=inside, other=0.0).to(tl.int64)
    if HAS_PLAN:
        shared = tl.load(planned_ptr + request, mask=inside, other=0).to(tl.int64)
        planned = tl.where(planned == SHARED, shared, planned)
    planned = tl.minimum(planned, limit)
    lens = tl.where(kind == COMPACT, planned, drafted)
    each = tl.where(inside & (request < num_requests), lens + 1, 0)
    after = tl.cumsum(each, axis=0)
    begins = tl.minimum(after - each, num_rows)
    ends = tl.minimum(after, num_rows)
    if row == 0:
        tl.store(starts_ptr + request, begins.to(tl.int32), mask=inside)
        tl.store(starts_ptr + count, tl.max(ends, axis=0).to(tl.int32))
        tl.store(lens_ptr + request, lens.to(tl.int32), mask=inside)
        tl.store(caps_ptr + request, tl.where(kind == CAP, planned, lens).to(tl.int32), mask=inside)
    owner = tl.sum((inside & (ends <= row)).to(tl.int32), axis=0)
    is_real = owner < count
    seat = tl.minimum(owner, count - 1)
    offset = tl.where(is_real, row - tl.sum(tl.where(request == seat, begins, 0), axis=0), 0)
    token = tl.load(anchor_ptr + seat)
    if WIDTH > 0:
        place = tl.minimum(tl.maximum(offset - 1, 0), WIDTH - 1)
        token = tl.where(offset > 0, tl.load(ids_ptr + seat.to(tl.int64) * WIDTH + place), token)
    position = tl.where(is_real, tl.load(kv_len_ptr + seat) + offset, 0)
    tl.store(positions_ptr + row, position)
    tl.store(ends_ptr + row, position + 1)
    tl.store(rows_ptr + row, tl.where(is_real, tl.load(cache_row_ptr + seat), spare_row).to(tl.int32))
    tl.store(draft_rows_ptr + row, tl.where(is_real, tl.load(draft_row_ptr + seat), spare_draft_row).to(tl.int32))
    _embed(table_ptr, token, x_ptr, row, SIZE, BLOCK)


@triton.jit
def _settle(
    words_ptr, starts_ptr, lens_ptr, accepted_ptr, full_ptr, next_ptr, p_target_ptr, ranks_ptr, peak_ptr,
    ids_ptr, index_ptr, own_confidence_ptr, draft_logits_ptr, q_peak_ptr, q_temperature_ptr, q_scale_ptr,
    anchor_ptr, kv_len_ptr, remaining_ptr, rounds_ptr, records_ptr, draft_stride, num_ranks, record_size,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # What the host is told of a request, and the anchor and lengths of its next round.
    request = tl.program_id(0).to(tl.int64)
    wait(PDL)
    first = tl.load(starts_ptr + request)
    has_rows = tl.load(starts_ptr + request + 1) > first
    taken = tl.load(accepted_ptr + request).to(tl.int64)
    full = tl.load(full_ptr + request).to(tl.int64)
    token = tl.maximum(tl.load(next_ptr + request), 0)
    lens = tl.load(lens_ptr + request)
    slot = tl.arange(0, SLOTS)
    at = records_ptr + request * record_size
    peak = tl.load(peak_ptr + first + slot, mask=has_rows & (slot <= lens) & (slot <= WIDTH), other=0.0)
    damaged = tl.min(tl.where(peak == peak, WIDTH + 1, slot), axis=0)
    part = tl.arange(0, RANKS)
    likelier = tl.sum(tl.load(ranks_ptr + request * num_ranks + part, mask=part < num_ranks, other=0), axis=0)
    sound = tl.full((), 1.0, tl.float64)
    if WIDTH > 0:
        inside = slot < WIDTH
        place = request * WIDTH + slot
        drafted = inside & (slot < tl.load(words_ptr + request).to(tl.int64))
        q_peak = tl.load(q_peak_ptr + place, mask=inside, other=0.0)
        sound = tl.where(tl.sum((q_peak != q_peak).to(tl.int32), axis=0) == 0, sound, 0.0)
        index = tl.load(index_ptr + place, mask=drafted, other=0)
        z = tl.load(draft_logits_ptr + place * draft_stride + index, mask=drafted, other=0.0).to(tl.float32)
        temperature = tl.load(q_temperature_ptr + place, mask=drafted, other=1.0)
        q = tl.exp((z - q_peak) / temperature) * tl.load(q_scale_ptr + place, mask=drafted, other=0.0)
        q = tl.where(drafted, q, float("nan"))
        confidence = tl.load(own_confidence_ptr + place, mask=inside, other=0.0)
        p = tl.load(p_target_ptr + place, mask=inside, other=0.0)
        tl.store(at + 7 + slot, tl.load(ids_ptr + place, mask=inside, other=0).to(tl.float64), mask=inside)
        tl.store(at + 7 + WIDTH + slot, confidence.to(tl.float64), mask=inside)
        tl.store(at + 7 + 2 * WIDTH + slot, q.to(tl.float64), mask=inside)
        tl.store(at + 7 + 3 * WIDTH + slot, p.to(tl.float64), mask=inside)
    tl.store(at, taken.to(tl.float64))
    tl.store(at + 1, full.to(tl.float64))
    tl.store(at + 2, token.to(tl.float64))
    tl.store(at + 3, lens.to(tl.float64))
    tl.store(at + 4, sound)
    tl.store(at + 5, damaged.to(tl.float64))
    tl.store(at + 6, (likelier + 1).to(tl.float64))
    if has_rows:
        tl.store(anchor_ptr + request, token)
        tl.store(kv_len_ptr + request, tl.load(kv_len_ptr + request) + taken + 1)
        tl.store(remaining_ptr + request, tl.load(remaining_ptr + request) - taken - 1)
        tl.store(rounds_ptr + request, tl.load(rounds_ptr + request) + 1)


def launch_enter_block(
    words: StepWords,
    seats: SeatTensors,
    table: Tensor,
    mask_token: int,
    rows: PackedRows,
    block: BlockTensors,
    spare_row: int,
    exponents: Tensor | None,
) -> None:
    """See ``enter_block``."""
    check_flat(words.device_words, table, rows.x, exponents, block.chance, block.confidence)
    count, width = rows.starts.shape[0] - 1, words.block
    size = table.shape[1]
    launch(
        _enter_block, (count * width,),
        words.device_words, seats.anchor, seats.kv_len, seats.draft_row, table,
        words.device_words if exponents is None else exponents,
        rows.x, rows.positions, rows.cache_rows, rows.ends, rows.starts, block.chance, block.confidence,
        count, words.seats, words.num_whole + words.seats * (3 * width + 1), mask_token, spare_row,
        WIDTH=width, SIZE=size, BLOCK=power_of_two(size), HAS_CHANCES=exponents is not None, num_warps=4,
    )  # fmt: skip


def launch_limit(words: StepWords, remaining: Tensor, limits: Tensor, budget: Tensor) -> None:
    """See ``limit``."""
    count = limits.shape[0]
    launch(
        _limit, (1,), words.device_words, remaining, limits, budget, count, words.seats,
        REQUESTS=power_of_two(count), SHARED=SHARED, num_warps=1,
    )  # fmt: skip


def launch_enter_rows(
    words: StepWords,
    seats: SeatTensors,
    table: Tensor,
    rows: PackedRows,
    block: BlockTensors,
    spare_row: int,
    spare_draft_row: int,
    planned: Tensor | None,
) -> None:
    """See ``enter_rows``."""
    check_flat(words.device_words, table, rows.x, block.ids, planned)
    count, size = rows.starts.shape[0] - 1, table.shape[1]
    launch(
        _enter_rows, (rows.x.shape[0],),
        words.device_words, words.device_words if planned is None else planned, seats.anchor, seats.kv_len,
        seats.remaining, seats.cache_row, seats.draft_row, block.ids, table,
        rows.x, rows.positions, rows.cache_rows, rows.draft_rows, rows.ends, rows.starts, rows.verify_lens, rows.caps,
        count, words.seats, rows.x.shape[0], spare_row, spare_draft_row,
        WIDTH=words.block, REQUESTS=power_of_two(count), SIZE=size, BLOCK=power_of_two(size),
        HAS_PLAN=planned is not None, COMPACT=COMPACT, CAP=CAP, SHARED=SHARED, num_warps=4,
    )  # fmt: skip


def launch_settle(
    words: StepWords,
    seats: SeatTensors,
    rows: PackedRows,
    accepted: AcceptBuffers,
    block: BlockTensors,
    draft_laws: Laws | None,
    records: Tensor,
) -> None:
    """See ``settle``."""
    check_flat(accepted.ranks, accepted.p_target, block.ids, block.index, block.confidence, records)
    count, width = rows.starts.shape[0] - 1, words.block
    q = accepted.laws if draft_laws is None else draft_laws
    num_ranks = accepted.ranks.shape[1]
    launch(
        _settle, (count,),
        words.device_words, rows.starts, rows.verify_lens, accepted.accepted_len, accepted.full_len, accepted.next_ids,
        accepted.p_target, accepted.ranks, accepted.laws.peak, block.ids, block.index, block.confidence, q.logits,
        q.peak, q.temperature, q.scale, seats.anchor, seats.kv_len, seats.remaining, seats.rounds, records,
        q.logits.stride(0), num_ranks, records.shape[1],
        WIDTH=width if draft_laws is not None else 0, SLOTS=power_of_two(width + 1), RANKS=power_of_two(num_ranks),
        num_warps=1,
    )  # fmt: skip
