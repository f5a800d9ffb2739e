"""Laws and draws on a GPU: statistics of blocks of the vocabulary, then one program per row that finds thresholds by
bisection, not by sorting: over the few blocks that can hold what is kept, until what is undecided fits in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from sparkchat.kernels.launch import power_of_two, wait
from sparkchat.kernels.sampling.order import key_of, owner_of, unkey
from sparkchat.kernels.sampling.select import ONE as _ONE
from sparkchat.kernels.sampling.select import clear_bins, has_filter, select_law

if TYPE_CHECKING:
    from torch import Tensor

    from sparkchat.kernels.sampling import NearScratch

ROW_WARPS = 16
_CHUNK = 64
ONE: tl.constexpr = tl.constexpr(_ONE)


def near_arguments(near: NearScratch | None, stand_in: Tensor) -> tuple[Tensor, ...]:
    """The pointers of ``find_law`` in its order."""
    if near is None:
        return (stand_in,) * 9
    return (near.counts, near.masses, near.near, near.near_id, near.near_count, near.near_mass, near.sure, near.info,
            near.found)  # fmt: skip


def chunk_of(num_blocks: int) -> int:
    """Blocks of a row looked at together."""
    return min(_CHUNK, power_of_two(num_blocks))


@triton.jit
def uniform(seed, step, slot, KIND: tl.constexpr):
    """engine/rng.py's number: Philox4x32-10 of (round, slot, kind) under the seed, 53 bits, float64 in [0, 1)."""
    low = (step & 0xFFFFFFFF).to(tl.uint32)
    high = ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = slot.to(tl.uint32)
    zero = place * 0
    word0, _, word2, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low + zero, high + zero, place, zero + KIND)
    left = (word0 >> 5).to(tl.int64).to(tl.float64)
    right = (word2 >> 6).to(tl.int64).to(tl.float64)
    return (left * 67108864.0 + right) * (1.0 / 9007199254740992.0)


@triton.jit
def divisor(temperature):
    """The temperature, 1 where it means greedy."""
    return tl.where(temperature < 1e-5, 1.0, temperature)


@triton.jit
def weight_of(z, token, peak, temperature, least, last_tie):
    """What a token weighs in a law, before ``scale``."""
    kept = (z > least) | ((z == least) & (token <= last_tie))
    return tl.where(kept, tl.exp((z - peak) / temperature), 0.0)


@triton.jit
def block_statistics(
    logits_ptr, temperature_ptr, starts_ptr, max_ptr, sum_ptr, vocab, logits_stride, num_blocks, num_requests,
    REQUESTS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Largest logit of every block of WIDTH tokens, and the sum of exp((z - largest) / temperature).
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    if row < tl.load(starts_ptr + num_requests):
        owner = owner_of(row, starts_ptr, num_requests, REQUESTS)
        temperature = divisor(tl.load(temperature_ptr + owner))
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        z = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        store_statistics(z, row, block, temperature, max_ptr, sum_ptr, num_blocks)


@triton.jit
def store_statistics(z, row, block, temperature, max_ptr, sum_ptr, num_blocks):
    # z [BLOCKS, WIDTH] of one row. A block of -inf weighs nothing; NaN and +inf end up in the sum.
    top = tl.max(z, axis=1)
    peak = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp((z - peak[:, None]) / temperature), axis=1)
    tl.store(max_ptr + row * num_blocks + block, top, mask=block < num_blocks)
    tl.store(sum_ptr + row * num_blocks + block, total, mask=block < num_blocks)


@triton.jit
def _tile(z_ptr, entries_ptr, first, count, vocab, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    # Tokens and logits [CHUNK, WIDTH] of the listed blocks from ``first`` on.
    entry = first + tl.arange(0, CHUNK)
    block = tl.load(entries_ptr + entry, mask=entry < count, other=0)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (entry < count)[:, None] & (token < vocab)
    return token, tl.load(z_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _at_least(
    z_ptr, entries_ptr, count, vocab, bound, peak, temperature, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    # How many listed tokens have a logit of at least ``bound``, and what they weigh.
    number = tl.zeros((CHUNK,), tl.int32)
    mass = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, count, CHUNK):
        _, z = _tile(z_ptr, entries_ptr, first, count, vocab, CHUNK, WIDTH)
        kept = (z >= bound) & (z > float("-inf"))
        number += tl.sum(kept.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(kept, tl.exp((z - peak) / temperature), 0.0), axis=1)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _kth_of(values, k):
    # The k-th largest of a vector held in registers; -inf when it has fewer.
    low = tl.min(key_of(values), axis=0)
    high = tl.max(key_of(values), axis=0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((key_of(values) >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle
    return unkey(low)


@triton.jit
def _floor_for_share(block_max, mass, peak, temperature, allowed, WIDTH: tl.constexpr):
    # The highest bound below which certainly no more than ``allowed`` lies. A block whose largest logit reaches the
    # bound has below it at most its mass less that of its largest, and at most WIDTH - 1 tokens of the bound.
    first = tl.exp((block_max - peak) / temperature)
    low = key_of(peak - 104.0 * temperature)
    high = key_of(peak) + 1
    while high - low > 4096:
        middle = low + (high - low) // 2
        bound = unkey(middle)
        most = tl.minimum(mass - first, (WIDTH - 1) * tl.exp((bound - peak) / temperature))
        below = tl.sum(tl.where(block_max >= bound, most, mass), axis=0)
        if below <= allowed:
            low = middle
        else:
            high = middle
    return unkey(low)


@triton.jit
def _last_tie(
    z_ptr, entries_ptr, count, vocab, bound, room, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    # The id of the ``room``-th token, in order of ids, whose logit equals ``bound``.
    seen = 0
    found = 2147483647
    for first in range(0, count, CHUNK):
        token, z = _tile(z_ptr, entries_ptr, first, count, vocab, CHUNK, WIDTH)
        tie = (z == bound).to(tl.int32)
        each = tl.sum(tie, axis=1)
        rank = seen + (tl.cumsum(each, axis=0) - each)[:, None] + tl.cumsum(tie, axis=1)
        found = tl.minimum(
            found, tl.min(tl.min(tl.where((tie > 0) & (rank >= room), token, 2147483647), axis=1), axis=0)
        )
        seen += tl.sum(each, axis=0)
    return found


@triton.jit
def _search(
    z_ptr, near_ptr, entries_ptr, count, vocab, least, peak, temperature, target, BY_MASS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The highest bound from ``least`` on that listed tokens reach ``target`` with, in number or in mass.

    Returns it (``least`` or the lowest listed logit if none does), how many tokens equal it, what those above weigh.
    Passes over all listed tokens halve the range only until what lies in it fits into ROOM numbers at ``near_ptr``;
    the rest of the search is in registers.
    """
    low = key_of(least)
    high = key_of(peak) + 1
    number, _whole = _at_least(z_ptr, entries_ptr, count, vocab, least, peak, temperature, CHUNK, WIDTH)
    above_number = 0
    above = 0.0
    step = 0
    while (number - above_number > ROOM) & (high - low > 1):
        # Halves of the logits' range, and now and then of the floats within it, lest a crowd at zero take forever.
        middle = low + (high - low) // 2
        if (step % 4 < 3) & (least > float("-inf")):
            middle = key_of(0.5 * unkey(low) + 0.5 * unkey(high))
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        here, mass = _at_least(z_ptr, entries_ptr, count, vocab, unkey(middle), peak, temperature, CHUNK, WIDTH)
        reached = here >= target
        if BY_MASS:
            reached = mass >= target
        if reached:
            low = middle
            number = here
        else:
            high = middle
            above_number = here
            above = mass
        step += 1
    if high - low > 1:
        near = 0
        for first in range(0, count, CHUNK):
            _token, z = _tile(z_ptr, entries_ptr, first, count, vocab, CHUNK, WIDTH)
            is_near = ((z >= unkey(low)) & (z < unkey(high)) & (z > float("-inf"))).to(tl.int32)
            each = tl.sum(is_near, axis=1)
            place = near + (tl.cumsum(each, axis=0) - each)[:, None] + tl.cumsum(is_near, axis=1) - 1
            tl.store(near_ptr + place, z, mask=is_near > 0)
            near += tl.sum(each, axis=0)
        tl.debug_barrier()
        index = tl.arange(0, MAX_BLOCKS)
        close = tl.load(near_ptr + index, mask=index < near, other=float("-inf"))
        tl.debug_barrier()
        weight = tl.where(index < near, tl.exp((close - peak) / temperature), 0.0)
        if near > 0:
            low = tl.maximum(low, key_of(tl.min(tl.where(index < near, close, float("inf")), axis=0)))
            high = tl.minimum(high, key_of(tl.max(close, axis=0)) + 1)
        outside = above_number
        outside_mass = above
        while high - low > 1:
            middle = low + (high - low) // 2
            kept = (index < near) & (close >= unkey(middle))
            here = outside + tl.sum(kept.to(tl.int32), axis=0)
            mass = outside_mass + tl.sum(tl.where(kept, weight, 0.0), axis=0)
            reached = here >= target
            if BY_MASS:
                reached = mass >= target
            if reached:
                low = middle
                number = here
            else:
                high = middle
                above_number = here
                above = mass
    return unkey(low), number - above_number, above


@triton.jit
def _nucleus(
    z_ptr, near_ptr, entries_ptr, count, vocab, least, peak, temperature, need,
    MAX_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    # Threshold and last tied id of the smallest set that weighs ``need``.
    bound, ties, above = _search(
        z_ptr, near_ptr, entries_ptr, count, vocab, least, peak, temperature, need, True, MAX_BLOCKS, CHUNK, WIDTH, ROOM
    )
    room = tl.maximum(tl.ceil((need - above) / tl.exp((bound - peak) / temperature)), 1.0)
    last = 2147483647
    if room < ties:
        last = _last_tie(z_ptr, entries_ptr, count, vocab, bound, room.to(tl.int32), CHUNK, WIDTH)
    return bound, last


@triton.jit
def find_law(
    z_ptr, max_ptr, sum_ptr, entries_ptr,
    counts_ptr, masses_ptr, near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr, row,
    vocab, num_blocks, raw_temperature, top_k, top_p, min_p,
    MAX_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HAS_NEAR: tl.constexpr, NEAR: tl.constexpr,
    BINS: tl.constexpr, COPIES: tl.constexpr, INFO: tl.constexpr,
):  # fmt: skip
    """The law of one row from its block statistics. Their sums are replaced by the masses of the listed blocks, their
    maxima make room for logits near a threshold. HAS_NEAR: ``launch_select`` went before, for all rows; row is ours.

    Returns peak, temperature, least, last_tie, total, and how many blocks are listed (-1: all, in order).
    """
    ROOM: tl.constexpr = MAX_BLOCKS // 2
    block = tl.arange(0, MAX_BLOCKS)
    is_block = block < num_blocks
    block_max = tl.load(max_ptr + block, mask=is_block, other=float("-inf"))
    block_sum = tl.load(sum_ptr + block, mask=is_block, other=0.0)
    temperature = divisor(raw_temperature)
    peak = tl.max(block_max, axis=0)
    mass = tl.where(block_max == float("-inf"), block_sum * 0.0, block_sum * tl.exp((block_max - peak) / temperature))
    total = tl.sum(mass, axis=0)
    least = float("-inf")
    last_tie = 2147483647
    count = -1
    is_sound = (total > 0.0) & (total < float("inf")) & (tl.abs(peak) < float("inf"))
    is_filtered = has_filter(raw_temperature, top_k, top_p, min_p, vocab)
    is_listed = is_sound & False
    if HAS_NEAR:  # noqa: SIM102
        if is_filtered:
            is_listed = is_sound & (tl.load(found_ptr + row * 2) != 0)
            clear_bins(counts_ptr + row * COPIES * BINS, masses_ptr + row * COPIES * BINS, BINS, COPIES)
    if is_listed:
        least, last_tie, total = select_law(
            near_ptr + row * NEAR, near_id_ptr + row * NEAR, near_count_ptr + row, near_mass_ptr + row * num_blocks,
            sure_ptr + row * num_blocks, sum_ptr, info_ptr + row * INFO, found_ptr + row * 2, peak, temperature, top_k,
            top_p, min_p, vocab, num_blocks, MAX_BLOCKS, WIDTH, NEAR, ONE,
        )  # fmt: skip
    elif is_sound:
        if raw_temperature < 1e-5:
            # Greedy: the lowest id of the largest logit.
            first = tl.min(tl.where(block_max == peak, block, 2147483647), axis=0)
            token = first * WIDTH + tl.arange(0, WIDTH)
            z = tl.load(z_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            last_tie = tl.min(tl.where(z == peak, token, 2147483647), axis=0)
            least = peak
            total = 1.0
        elif is_filtered:
            has_k = (top_k > 0) & (top_k < vocab)
            bound = float("-inf")
            floor = peak + temperature * tl.log(min_p * 0.999999)
            if has_k:
                # Each of the k blocks with the largest maxima has a token of at least the k-th of these.
                if top_k <= num_blocks:
                    bound = _kth_of(block_max, top_k)
            elif top_p < 1.0:
                bound = _floor_for_share(block_max, mass, peak, temperature, (1.0 - top_p) * total, WIDTH)
            else:
                bound = floor
            listed = is_block & (block_max >= bound) & (block_max > float("-inf"))
            place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
            count = tl.sum(listed.to(tl.int32), axis=0)
            tl.store(entries_ptr + place, block, mask=listed)
            tl.debug_barrier()
            least = bound
            if has_k:
                least, _ties, _above = _search(
                    z_ptr, max_ptr, entries_ptr, count, vocab, bound, peak, temperature, top_k, False,
                    MAX_BLOCKS, CHUNK, WIDTH, ROOM,
                )  # fmt: skip
                _number, total = _at_least(z_ptr, entries_ptr, count, vocab, least, peak, temperature, CHUNK, WIDTH)
            if top_p < 1.0:
                need = (top_p - 1e-6) * total
                least, last_tie = _nucleus(
                    z_ptr, max_ptr, entries_ptr, count, vocab, least, peak, temperature, need, MAX_BLOCKS, CHUNK,
                    WIDTH, ROOM,
                )  # fmt: skip
            if (min_p > 0.0) & (floor > least):
                least = floor
                last_tie = 2147483647
            total = 0.0
            for first in range(0, count, CHUNK):
                token, z = _tile(z_ptr, entries_ptr, first, count, vocab, CHUNK, WIDTH)
                part = tl.sum(weight_of(z, token, peak, temperature, least, last_tie), axis=1)
                entry = first + tl.arange(0, CHUNK)
                tl.store(sum_ptr + entry, part, mask=entry < count)
                total += tl.sum(part, axis=0)
            tl.debug_barrier()
        else:
            tl.store(sum_ptr + block, mass, mask=is_block)
            tl.debug_barrier()
    else:
        peak = float("nan")
        total = float("nan")
    return peak, temperature, least, last_tie, total, count


@triton.jit
def find_place(masses, target):
    """(index, what lies before it) of the first running sum above ``target``; the last of positive mass if none is."""
    index = tl.arange(0, masses.shape[0])
    wide = masses.to(tl.float64)
    sums = tl.cumsum(wide, axis=0)
    last = tl.max(tl.where(masses > 0, index, 0), axis=0)
    place = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), last)
    return place, tl.sum(tl.where(index == place, sums - wide, 0.0), axis=0)


@triton.jit
def draw_token(
    z_ptr, sum_ptr, entries_ptr, vocab, num_blocks, peak, temperature, least, last_tie, count, u,
    MAX_BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A token of the law that ``find_law`` left, by inverse CDF in order of ids, with ``u`` in [0, 1)."""
    block = tl.arange(0, MAX_BLOCKS)
    listed = count
    if count < 0:
        listed = num_blocks
    masses = tl.load(sum_ptr + block, mask=block < listed, other=0.0)
    target = u * tl.sum(masses.to(tl.float64), axis=0)
    place, before = find_place(masses, target)
    if count >= 0:
        place = tl.load(entries_ptr + place)
    token = place * WIDTH + tl.arange(0, WIDTH)
    z = tl.load(z_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    weights = weight_of(z, token, peak, temperature, least, last_tie)
    inside, _ = find_place(weights, tl.maximum(target - before, 0.0))
    return place * WIDTH + inside
