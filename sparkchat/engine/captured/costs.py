"""What a captured step costs by its rows, requests and their context: the table that budgets are chosen by, from
replays of requests that nobody made.

What a cached token adds is measured for many numbers of requests: alone its attention is a chain of waits, among many
it is bytes. By what it costs one request, steps of 32 on an H200 were foretold 40 % too long
(benchmarks/results/2026-11-30-gpu-decode.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.tiers import round_up, row_tiers
from sparkchat.engine.cost_table import context_costs, table_of
from sparkchat.models.fused import MOST_SMALL_ROWS
from sparkchat.params import BatchCosts, ContextCosts, CostTable

REPEATS = 9
LONG_TOKENS, LONG_TOKENS_OF_MANY = 8192, 2048
"""Cached tokens of one request, and of each of several, behind a long context: a GPU reads a thousand in some 50
microseconds, which a step of 5 milliseconds does not show."""
_SAME_PLACE = 128
"""Both contexts end at the same place in every window and every compressed block."""
FINE, COARSE = 4, 2
"""Row counts timed from each power of two to the next, times the requests: of one request and of the most, and of the
numbers between. Each captures a graph that serving then needs as well, and numbers of requests share them."""

Time = Callable[..., float]


def captured_costs(decoder: CapturedDecoder, block: int, counts: Sequence[int]) -> CostTable:
    """Milliseconds of steps of so many requests (ascending from 1), with and without drafting, by rows, and what
    filters and a cached token add."""

    def time(count: int, is_drafting: bool, rows: int, context: int = 1, draws: Draws = Draws.SAMPLED) -> float:
        return decoder.time_stages(count, is_drafting, rows, draws, REPEATS, context)

    batches: list[BatchCosts] = []
    some = {*counts[::2], counts[-1]}
    # The largest first: what is captured later finds room in the memory that it took.
    for count in reversed(counts):
        is_end = count in (counts[0], counts[-1])
        tiers = tiers_of(block, count)
        known = {n: time(count, True, n) for n in reversed(timed_rows(tiers, count, FINE if is_end else COARSE))}
        batch = BatchCosts(count, tiers, filled(known, tiers), time(count, False, count))
        if count in some:
            # Filters cost by the laws that are drawn from; a middle number of rows stands for all.
            middle = sorted(known)[len(known) // 2]
            filtered_ms = max(0.0, time(count, True, middle, draws=Draws.FILTERED) - known[middle])
            room = decoder.room_for_strangers(count) - block - 2
            batch = replace(batch, filtered_ms=filtered_ms, context=_context(time, batch, room))
        batches.insert(0, batch)
    by_count = {batch.requests: batch.filtered_ms for batch in batches if batch.requests in some}
    filters = filled(by_count, counts)
    batches = [replace(batch, filtered_ms=ms) for batch, ms in zip(batches, filters, strict=True)]
    return table_of(batches, pads_up=True, context=batches[0].context)


def _context(time: Time, batch: BatchCosts, room: int) -> ContextCosts | None:
    """What cached tokens add to steps of ``batch``, each of whose requests has room for ``room`` of them."""
    count, rows = batch.requests, batch.rows
    wanted = LONG_TOKENS if count == 1 else LONG_TOKENS_OF_MANY
    more = min(wanted, room) // _SAME_PLACE * _SAME_PLACE
    if more <= 0:
        return None
    pairs = [(batch.step_ms[i], time(count, True, rows[i], 1 + more)) for i in (0, -1)]
    return context_costs(count, count * (1 + more), rows[-1] / count - 1, pairs)


def tiers_of(block: int, count: int) -> tuple[int, ...]:
    """Row counts of ``count`` requests, from one row of each to a whole window of each."""
    tiers = tuple(n for n in row_tiers(block, count) if n >= count)
    return tiers if tiers[0] == count else (count, *tiers)


def timed_rows(tiers: Sequence[int], count: int, steps: int) -> tuple[int, ...]:
    """Those of ``tiers`` that are timed: ``steps`` between every two powers of two times ``count``, the ends, and the
    first behind the rows that have products of their own kind."""
    wanted, base = {tiers[0], tiers[-1]}, count
    while base <= tiers[-1]:
        wanted |= {-(-base * (steps + i) // steps) for i in range(steps)}
        base *= 2
    if tiers[0] <= MOST_SMALL_ROWS < tiers[-1]:
        wanted |= {MOST_SMALL_ROWS, MOST_SMALL_ROWS + 1}
    return tuple(sorted({round_up(n, tuple(tiers)) for n in wanted if n <= tiers[-1]}))


def filled(known: dict[int, float], wanted: Sequence[int]) -> tuple[float, ...]:
    """Of each of ``wanted``, ascending as ``known`` is: what is known, or the line between its neighbours."""
    places, found, high = sorted(known), [], 0
    for n in wanted:
        while places[high] < n:
            high += 1
        low = max(0, high - 1)
        a, b = places[low], places[high]
        share = (n - a) / (b - a) if b > a else 1.0
        found.append(known[b] if n == b else known[a] + share * (known[b] - known[a]))
    return tuple(found)
