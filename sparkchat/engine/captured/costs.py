"""What a captured step costs by its rows, requests and their context: the table that budgets are chosen by, from
replays of requests that nobody made.

What a cached token adds is measured for every number of requests: alone its attention is a chain of waits, among many
it is bytes. By what it costs one request, steps of 32 on an H200 were foretold 40 % too long
(benchmarks/results/2026-11-30-gpu-decode.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.cost_table import context_costs, table_of
from sparkchat.params import BatchCosts, CostTable

REPEATS = 9
LONG_TOKENS, LONG_TOKENS_OF_MANY = 8192, 2048
"""Cached tokens of one request, and of each of several, behind a long context: a GPU reads a thousand in some 50
microseconds, which a step of 5 milliseconds does not show."""
_SAME_PLACE = 128
"""Both contexts end at the same place in every window and every compressed block."""
MOST_POINTS = 24
"""Row counts timed for one number of requests; each captures a graph that serving then needs as well."""


def captured_costs(decoder: CapturedDecoder, block: int, counts: Sequence[int]) -> CostTable:
    """Milliseconds of steps of so many requests (ascending from 1), with and without drafting, by rows, and what
    filters and a cached token add."""

    def time(count: int, is_drafting: bool, rows: int, context: int = 1, draws: Draws = Draws.SAMPLED) -> float:
        return decoder.time_stages(count, is_drafting, rows, draws, REPEATS, context)

    batches, is_thinned = [], False
    for count in counts:
        tiers = [n for n in row_tiers(block, count) if n >= count]
        rows = thinned(tiers if tiers[0] == count else [count, *tiers])
        is_thinned |= len(rows) < len(tiers)
        times = tuple(time(count, True, n) for n in rows)
        # Filters cost by the laws that are drawn from; a middle number of rows stands for all.
        half = len(rows) // 2
        filtered_ms = max(0.0, time(count, True, rows[half], draws=Draws.FILTERED) - times[half])
        wanted = LONG_TOKENS if count == 1 else LONG_TOKENS_OF_MANY
        more = min(wanted, decoder.room_for_strangers(count) - block - 2) // _SAME_PLACE * _SAME_PLACE
        context = None
        if more > 0:
            pairs = [(times[i], time(count, True, rows[i], 1 + more)) for i in (0, -1)]
            context = context_costs(count, count * (1 + more), rows[-1] / count - 1, pairs)
        batches.append(BatchCosts(count, rows, times, time(count, False, count), filtered_ms, context))
    # Between rows that were left out a step up would be seen far too early.
    return table_of(batches, pads_up=not is_thinned, context=batches[0].context)


def thinned(rows: Sequence[int]) -> tuple[int, ...]:
    """At most ``MOST_POINTS`` of them, the ends among them, evenly spread."""
    if len(rows) <= MOST_POINTS:
        return tuple(rows)
    last = len(rows) - 1
    return tuple(rows[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS))
