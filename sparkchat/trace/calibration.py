"""How well the drafter's survival estimates fit what was accepted (paper, calibration section).

One observation is (position, survival a_k, whether the accepted prefix reached position k). It exists where the target
judged the draft: every position in static and cap-accept, the verified ones in compact. Positions dropped by compact
are unknown, so figures from compact are those of the drafts it chose to verify. A step whose run was cut by the end of
the answer says nothing about the drafts behind the cut and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

NUM_BINS = 20

Observation = tuple[int, float, bool]
"""(position from 1, survival, reached)"""


def observations(step: Mapping[str, Any]) -> list[Observation]:
    """What one step line says about its drafts; empty without survival estimates."""
    survival = step.get("survival") or []
    correct = step["correct_drafts"]
    if len(step["committed_ids"]) != correct + 1:
        return []
    reached = correct + (step.get("cap_trim") or 0)
    judged = step["verify_len"] if step["mode"] == "compact" else len(step["draft_ids"])
    return [
        (position, value, position <= reached)
        for position, value in enumerate(survival[:judged], start=1)
        if value is not None and 0.0 <= value <= 1.0
    ]


def calibration(found: Iterable[Observation]) -> dict[str, Any] | None:
    """ECE (20 equal bins), AUC and Brier score over all positions and by position; None without observations."""
    ordered = sorted(found)
    if not ordered:
        return None
    by_position = [
        {"position": position, **_scores([(value, label) for _, value, label in group])}
        for position, group in groupby(ordered, key=lambda observation: observation[0])
    ]
    whole = _scores([(value, label) for _, value, label in ordered])
    return {**whole, "num_bins": NUM_BINS, "by_position": by_position}


def expected_calibration_error(pairs: Sequence[tuple[float, bool]], num_bins: int = NUM_BINS) -> float | None:
    """Mean gap between estimate and rate over equal-width bins, weighted by their counts."""
    if not pairs:
        return None
    totals = [[0.0, 0.0] for _ in range(num_bins)]
    for value, label in pairs:
        cell = totals[min(int(value * num_bins), num_bins - 1)]
        cell[0] += value
        cell[1] += label
    return sum(abs(estimate - labels) for estimate, labels in totals) / len(pairs)


def area_under_curve(pairs: Sequence[tuple[float, bool]]) -> float | None:
    """Chance that a reached draft had the higher estimate than one not reached, ties half; None with one class only."""
    num_true = sum(label for _, label in pairs)
    num_false = len(pairs) - num_true
    if not num_true or not num_false:
        return None
    wins, false_below = 0.0, 0
    for _, group in groupby(sorted(pairs), key=lambda pair: pair[0]):
        labels = [label for _, label in group]
        true_here = sum(labels)
        false_here = len(labels) - true_here
        wins += true_here * (false_below + 0.5 * false_here)
        false_below += false_here
    return wins / (num_true * num_false)


def _scores(pairs: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    return {
        "count": len(pairs),
        "mean_survival": sum(value for value, _ in pairs) / len(pairs),
        "reached_rate": sum(label for _, label in pairs) / len(pairs),
        "ece": expected_calibration_error(pairs),
        "auc": area_under_curve(pairs),
        "brier": sum((value - label) ** 2 for value, label in pairs) / len(pairs),
    }
