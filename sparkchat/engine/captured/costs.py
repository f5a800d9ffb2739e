"""What a captured step costs by its rows: the table that budgets are chosen by, from replays over empty caches."""

from __future__ import annotations

from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.laws import Draws
from sparkchat.params import CostTable

REPEATS = 9


def captured_costs(decoder: CapturedDecoder, concurrency: int, block: int) -> CostTable:
    """Milliseconds of steps that draft, for 1 and for ``concurrency`` requests at every verify length.

    Attention sees hardly a key here: what context adds, it adds to every length alike.
    """

    def time(count: int, is_drafting: bool, rows: int) -> float:
        return decoder.time_stages(count, is_drafting, rows, Draws.SAMPLED, REPEATS)

    plain_ms = time(1, False, 1)
    costs = {length + 1: time(1, True, length + 1) for length in range(block + 1)}
    for length in range(block + 1):
        rows = concurrency * (length + 1)
        if rows not in costs:
            costs[rows] = time(concurrency, True, rows)
    rows = sorted(costs)
    return CostTable(tuple(rows), tuple(costs[r] for r in rows), source="measured", plain_ms=plain_ms)
