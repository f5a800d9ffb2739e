"""Thresholds of filtered laws without sorting and without passing over the vocabulary from one multiprocessor.

Two launches over all of it, of many programs a row: the first counts tokens and their mass by bins of the logit, the
second lists the few that lie where a threshold must be (``near``) and adds up, block by block, what is kept for sure.
One program a row then finds the threshold among those that are near, in registers (``select_law``).

Masses are whole numbers of 2^-40 of the largest token's, so that sums are the same in whatever order they arrive.
Every token below the lowest bin is one that no threshold can keep: for top-p, all of weight below (1 - p) / V of the
total, which together weigh less than 1 - p. Where more tokens are near than ROOM (a crowd of equal logits), the search
of ``kernel.py`` over the whole vocabulary takes the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, power_of_two, wait
from sparkchat.kernels.sampling import BINS, COPIES, INFO, ROOM, VOCAB_BLOCK, DrawSettings, NearScratch
from sparkchat.kernels.sampling.order import key_of, owner_of, unkey

if TYPE_CHECKING:
    from sparkchat.kernels.sampling import LawScratch

BLOCKS_A_PROGRAM = 32
"""Vocabulary blocks of one program: 38 programs a row of 152,000 tokens."""
ONE = 1099511627776.0
"""2^40"""
_HALVINGS = 12


@triton.jit
def has_filter(temperature, top_k, top_p, min_p, vocab):
    """Whether anything but the temperature shapes a law."""
    return (temperature >= 1e-5) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def floor_of(peak, temperature, min_p):
    """The least logit that min-p keeps; -inf without it."""
    return tl.where(min_p > 0.0, peak + temperature * tl.log(min_p * 0.999999), float("-inf"))


@triton.jit
def _bin_of(z, peak, inverse, BINS: tl.constexpr):
    # 0 for the largest logits; never less for a smaller one.
    return tl.minimum(((peak - z) * inverse).to(tl.int32), BINS - 1)


@triton.jit
def _count_bins(
    z_ptr, row_stride, max_ptr, sum_ptr, starts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    counts_ptr, masses_ptr, near_count_ptr, info_ptr, vocab, num_blocks, num_requests,
    REQUESTS: tl.constexpr, MAX_BLOCKS: tl.constexpr, TOKENS: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr,
    INFO: tl.constexpr, ONE: tl.constexpr, HALVINGS: tl.constexpr, BY_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    owner = row
    is_row = row >= 0
    if BY_STARTS:
        is_row = row < tl.load(starts_ptr + num_requests)
        owner = tl.minimum(owner_of(row, starts_ptr, num_requests, REQUESTS), num_requests - 1).to(tl.int64)
    temperature = tl.load(temperature_ptr + owner)
    top_k = tl.load(top_k_ptr + owner)
    top_p = tl.load(top_p_ptr + owner)
    if is_row & has_filter(temperature, top_k, top_p, tl.load(min_p_ptr + owner), vocab):
        block = tl.arange(0, MAX_BLOCKS)
        block_max = tl.load(max_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
        block_sum = tl.load(sum_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0)
        peak = tl.max(block_max, axis=0)
        weight = tl.exp((block_max - peak) / temperature)
        total = tl.sum(tl.where(block_max == float("-inf"), block_sum * 0.0, block_sum * weight), axis=0)
        has_k = (top_k > 0) & (top_k < vocab)
        low = peak - 104.0 * temperature
        if has_k:
            if top_k <= num_blocks:
                # Each of the k blocks with the largest maxima has a token of at least the k-th of these.
                high = peak
                low = tl.maximum(tl.min(tl.where(block_max == float("-inf"), peak, block_max), axis=0), low)
                if tl.sum((block_max >= low).to(tl.int32), axis=0) >= top_k:
                    for _ in range(HALVINGS):
                        middle = 0.5 * low + 0.5 * high
                        is_enough = tl.sum((block_max >= middle).to(tl.int32), axis=0) >= top_k
                        low = tl.where(is_enough, middle, low)
                        high = tl.where(is_enough, high, middle)
        elif top_p < 1.0:
            low = tl.maximum(low, peak + temperature * tl.log((1.0 - top_p) * 0.999 * total / vocab))
        inverse = tl.where(low < peak, BINS / (peak - low), 0.0)
        if tl.program_id(1) == 0:
            tl.store(info_ptr + row * INFO, peak)
            tl.store(info_ptr + row * INFO + 1, low)
            tl.store(info_ptr + row * INFO + 2, inverse)
            tl.store(info_ptr + row * INFO + 3, total)
            tl.store(near_count_ptr + row, 0)
        is_sound = (total > 0.0) & (total < float("inf")) & (tl.abs(peak) < float("inf"))
        if is_sound & (has_k | (top_p < 1.0)):
            token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
            z = tl.load(z_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            counted = z >= low
            to = (row * COPIES + tl.program_id(1) % COPIES) * BINS
            to += _bin_of(tl.where(counted, z, peak), peak, inverse, BINS)
            mass = (tl.exp((z - peak) / temperature).to(tl.float64) * ONE).to(tl.int64)
            tl.atomic_add(counts_ptr + to, 1, mask=counted, sem="relaxed")
            tl.atomic_add(masses_ptr + to, mass, mask=counted, sem="relaxed")


@triton.jit
def _list_near(
    z_ptr, row_stride, starts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, counts_ptr, masses_ptr,
    near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr, vocab, num_blocks,
    num_requests,
    REQUESTS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr,
    INFO: tl.constexpr, ROOM: tl.constexpr, ONE: tl.constexpr, BY_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    owner = row
    is_row = row >= 0
    if BY_STARTS:
        is_row = row < tl.load(starts_ptr + num_requests)
        owner = tl.minimum(owner_of(row, starts_ptr, num_requests, REQUESTS), num_requests - 1).to(tl.int64)
    raw = tl.load(temperature_ptr + owner)
    top_k = tl.load(top_k_ptr + owner)
    top_p = tl.load(top_p_ptr + owner)
    min_p = tl.load(min_p_ptr + owner)
    if is_row & has_filter(raw, top_k, top_p, min_p, vocab):
        peak = tl.load(info_ptr + row * INFO)
        low = tl.load(info_ptr + row * INFO + 1)
        inverse = tl.load(info_ptr + row * INFO + 2)
        total = tl.load(info_ptr + row * INFO + 3)
        has_k = (top_k > 0) & (top_k < vocab)
        # Bins [first, last] are near, those before are kept for sure; none is near where min-p alone filters.
        first = 0
        last = -1
        fits = is_row
        above = tl.full((), 0, tl.int64)
        if has_k | (top_p < 1.0):
            bin_ = tl.arange(0, BINS)
            at = row * COPIES * BINS + bin_
            count = tl.zeros((BINS,), tl.int32)
            mass = tl.zeros((BINS,), tl.int64)
            for copy in tl.static_range(COPIES):
                count += tl.load(counts_ptr + at + copy * BINS)
                mass += tl.load(masses_ptr + at + copy * BINS)
            counts = tl.cumsum(count, axis=0)
            masses = tl.cumsum(mass, axis=0)
            reached = counts >= top_k
            if has_k == 0:
                need = (top_p - 1e-6).to(tl.float64) * total.to(tl.float64) * ONE
                reached = masses.to(tl.float64) >= need
            last = tl.min(tl.where(reached, bin_, BINS), axis=0)
            until = tl.sum(tl.where(bin_ == last, counts, 0), axis=0)
            here = tl.sum(tl.where(bin_ == last, count, 0), axis=0)
            if (has_k == 0) & (until > ROOM):
                first = last
                until = here
                above = tl.sum(tl.where(bin_ == last, masses - mass, 0), axis=0)
            fits = (last < BINS) & (until <= ROOM)
        if tl.program_id(1) == 0:
            tl.store(found_ptr + row * 2, tl.where(fits, 1, 0).to(tl.int64))
            tl.store(found_ptr + row * 2 + 1, above)
        if fits:
            block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
            token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            z = tl.load(z_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            floor = floor_of(peak, raw, min_p)
            place = _bin_of(tl.where(z >= low, z, peak), peak, inverse, BINS)
            is_sure = (z >= floor) & (z > float("-inf")) & ((last < 0) | ((z >= low) & (place < first)))
            sure = tl.sum(tl.where(is_sure, tl.exp((z - peak) / raw), 0.0), axis=1)
            tl.store(sure_ptr + row * num_blocks + block, sure, mask=block < num_blocks)
            tl.store(near_mass_ptr + row * num_blocks + block, tl.zeros((BLOCKS,), tl.int64), mask=block < num_blocks)
            is_near = ((z >= low) & (place >= first) & (place <= last)).to(tl.int32)
            each = tl.sum(is_near, axis=1)
            number = tl.sum(each, axis=0)
            if number > 0:
                begin = tl.atomic_add(near_count_ptr + row, number, sem="relaxed")
                to = begin + (tl.cumsum(each, axis=0) - each)[:, None] + tl.cumsum(is_near, axis=1) - 1
                tl.store(near_ptr + row * ROOM + to, z, mask=is_near > 0)
                tl.store(near_id_ptr + row * ROOM + to, token, mask=is_near > 0)


@triton.jit
def clear_bins(counts_ptr, masses_ptr, BINS: tl.constexpr, COPIES: tl.constexpr):
    # For the next step, which adds to them.
    for copy in tl.static_range(COPIES):
        bin_ = copy * BINS + tl.arange(0, BINS)
        tl.store(counts_ptr + bin_, tl.zeros((BINS,), tl.int32))
        tl.store(masses_ptr + bin_, tl.zeros((BINS,), tl.int64))


@triton.jit
def select_law(
    near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, sum_ptr, info_ptr, found_ptr,
    peak, temperature, top_k, top_p, min_p, vocab, num_blocks,
    MAX_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Threshold, last tied id and total of a filtered law whose near tokens are listed; pointers are the row's.

    Masses of all blocks are left at ``sum_ptr``.
    """
    near = tl.load(near_count_ptr)
    index = tl.arange(0, ROOM)
    inside = index < near
    z = tl.load(near_ptr + index, mask=inside, other=float("-inf"))
    token = tl.load(near_id_ptr + index, mask=inside, other=0)
    weight = tl.where(inside, tl.exp((z - peak) / temperature), 0.0)
    mass = (weight.to(tl.float64) * ONE).to(tl.int64)
    key = key_of(z)
    above = tl.load(found_ptr + 1)
    least = float("-inf")
    last = 2147483647
    whole = tl.load(info_ptr + 3).to(tl.float64) * ONE
    lowest = tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=0)
    highest = tl.max(tl.where(inside, key, -0x7FFFFFFF), axis=0) + 1
    if (top_k > 0) & (top_k < vocab):
        low = lowest
        high = highest
        while high - low > 1:
            middle = low + (high - low) // 2
            if tl.sum((inside & (key >= middle)).to(tl.int32), axis=0) >= top_k:
                low = middle
            else:
                high = middle
        least = unkey(low)
        lowest = low
        whole = tl.sum(tl.where(key >= low, mass, 0), axis=0).to(tl.float64)
    if top_p < 1.0:
        need = (top_p - 1e-6).to(tl.float64) * whole
        low = lowest
        high = highest
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = above + tl.sum(tl.where(inside & (key >= middle), mass, 0), axis=0)
            if reached.to(tl.float64) >= need:
                low = middle
            else:
                high = middle
        least = unkey(low)
        tie = inside & (key == low)
        before = above + tl.sum(tl.where(inside & (key > low), mass, 0), axis=0)
        one = tl.maximum(tl.max(tl.where(tie, mass, 0), axis=0), 1)
        room = tl.maximum(tl.ceil((need - before.to(tl.float64)) / one.to(tl.float64)), 1.0)
        if room < tl.sum(tie.to(tl.int32), axis=0):
            # The id of the room-th tie, by halves of the ids.
            bottom = -1
            top = vocab - 1
            while top - bottom > 1:
                middle = bottom + (top - bottom) // 2
                if tl.sum((tie & (token <= middle)).to(tl.int32), axis=0) >= room:
                    top = middle
                else:
                    bottom = middle
            last = top
    floor = floor_of(peak, temperature, min_p)
    if floor > least:
        least = floor
        last = 2147483647
    kept = inside & ((z > least) | ((z == least) & (token <= last)))
    tl.atomic_add(near_mass_ptr + token // WIDTH, mass, mask=kept, sem="relaxed")
    tl.debug_barrier()
    block = tl.arange(0, MAX_BLOCKS)
    is_block = block < num_blocks
    # What was added just now lies in L2.
    added = tl.load(near_mass_ptr + block, mask=is_block, other=0, cache_modifier=".cg")
    masses = tl.load(sure_ptr + block, mask=is_block, other=0.0) + (added.to(tl.float64) / ONE).to(tl.float32)
    tl.store(sum_ptr + block, masses, mask=is_block)
    tl.debug_barrier()
    return least, last, tl.sum(masses, axis=0)


def launch_select(
    z: Tensor,
    row_stride: int,
    rows: int,
    scratch: LawScratch,
    near: NearScratch,
    settings: DrawSettings,
    vocab: int,
    starts: Tensor | None = None,
) -> None:
    """List what may lie at a threshold, for the rows of z that filters apply to; ``starts`` None: a row a request."""
    num_blocks = scratch.block_max.shape[1]
    programs = -(-num_blocks // BLOCKS_A_PROGRAM)
    requests = rows if starts is None else starts.shape[0] - 1
    s = settings
    laws = (s.temperature, s.top_k, s.top_p, s.min_p)
    bounds = scratch.entries if starts is None else starts
    launch(
        _count_bins, (rows, programs),
        z, row_stride, scratch.block_max, scratch.block_sum, bounds, *laws, near.counts, near.masses, near.near_count,
        near.info, vocab, num_blocks, requests,
        REQUESTS=power_of_two(requests), MAX_BLOCKS=power_of_two(num_blocks), TOKENS=BLOCKS_A_PROGRAM * VOCAB_BLOCK,
        BINS=BINS, COPIES=COPIES, INFO=INFO, ONE=ONE, HALVINGS=_HALVINGS, BY_STARTS=starts is not None, num_warps=8,
    )  # fmt: skip
    launch(
        _list_near, (rows, programs),
        z, row_stride, bounds, *laws, near.counts, near.masses, near.near, near.near_id, near.near_count,
        near.near_mass, near.sure, near.info, near.found, vocab, num_blocks, requests,
        REQUESTS=power_of_two(requests), BLOCKS=BLOCKS_A_PROGRAM, WIDTH=VOCAB_BLOCK, BINS=BINS, COPIES=COPIES,
        INFO=INFO, ROOM=ROOM, ONE=ONE, BY_STARTS=starts is not None, num_warps=8,
    )  # fmt: skip


NEAR_OPTIONS = {"NEAR": ROOM, "BINS": BINS, "COPIES": COPIES, "INFO": INFO}
"""What ``find_law`` is compiled for."""
