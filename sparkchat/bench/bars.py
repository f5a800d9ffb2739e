"""The claims of planning, told plainly: compact against the best fixed length, predicted against measured steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from sparkchat.bench.arms import BASELINE
from sparkchat.bench.counted import Counted, total
from sparkchat.bench.measuring import Tally

PLANNED = "compact"
RESAMPLES = 1000


def bars_of(tallies: Mapping[int, Mapping[str, Tally]], refused: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For each concurrency at which compact ran: its throughput over that of the best fixed length, no drafting among
    them, and over that of the whole block; and by how much predicted steps are longer than measured ones.

    Ratios come with a 95 % bootstrap interval over rounds, in which all arms answered the same prompts. ``refused``
    arms answer otherwise than plain decoding and have none.
    """
    found = []
    for together, by_arm in tallies.items():
        planned = by_arm.get(PLANNED)
        if planned is None or PLANNED in refused:
            continue
        fixed = {name: tally for name, tally in by_arm.items() if _is_fixed(name) and name not in refused}
        best = max(fixed, key=lambda name: _speed(fixed[name].by_round), default=None)
        found.append(
            {
                "concurrency": together,
                "best_fixed": best,
                "fixed_arms": list(fixed),
                "compact_to_best_fixed": None if best is None else ratio(planned.by_round, fixed[best].by_round),
                "compact_to_static": ratio(planned.by_round, fixed["static"].by_round) if "static" in fixed else None,
                "step_time_error": planned.step_time_error,
            }
        )
    return found


def told(bars: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each concurrency."""
    lines = []
    for bar in bars:
        found, error = bar["compact_to_best_fixed"], bar["step_time_error"]
        parts = ["compact has no fixed length beside it"]
        if found is not None:
            best = f"the best fixed length, {bar['best_fixed']} of {len(bar['fixed_arms'])}"
            parts = [f"compact is {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}) of {best}"]
        if error is not None:
            parts.append(f"its steps were predicted {abs(error):.1%} too {'long' if error >= 0 else 'short'}")
        lines.append(f"{bar['concurrency']} together: " + "; ".join(parts))
    return lines


def ratio(rounds: Sequence[Counted], others: Sequence[Counted]) -> dict[str, float] | None:
    """Of throughputs; None where a side has none."""
    if len(rounds) != len(others) or not _speed(rounds) or not _speed(others):
        return None
    draw, values = random.Random(17), []
    for _ in range(RESAMPLES):
        chosen = [draw.randrange(len(rounds)) for _ in rounds]
        base = _speed([others[i] for i in chosen])
        values.append(_speed([rounds[i] for i in chosen]) / base if base else 0.0)
    values.sort()
    edge = RESAMPLES // 40
    return {"ratio": _speed(rounds) / _speed(others), "low": values[edge], "high": values[-edge - 1]}


def _is_fixed(name: str) -> bool:
    return name in (BASELINE, "static") or name.startswith("static-")


def _speed(rounds: Sequence[Counted]) -> float:
    return total(rounds).tokens_per_second or 0.0
