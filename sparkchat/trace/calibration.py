"""How well the drafter's survival estimates fit what was accepted (paper, calibration section).

One observation is (position, survival a_k, whether the accepted prefix reached position k). It exists where the target
judged the draft: every position in static and cap-accept, the verified ones in compact. Positions dropped by compact
are unknown, so figures from compact are those of the drafts it chose to verify. A step whose run was cut by the end of
the answer says nothing about the drafts behind the cut and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

NUM_BINS = 20
"""Equal-width bins of the calibration error, as in DeepSpec's evaluator."""
AUC_BINS = 1000
"""Estimates that fall into one of these count as ties, as in DeepSpec's evaluator, so that memory stays flat."""


class Observation(NamedTuple):
    position: int
    """Counted from 1."""
    survival: float
    reached: bool


def judged_labels(step: Mapping[str, Any]) -> list[bool]:
    """For each draft that the target judged, from the first on: did the accepted prefix reach it?"""
    correct = step["correct_drafts"]
    if len(step["committed_ids"]) != correct + 1:
        return []
    reached = correct + (step.get("cap_trim") or 0)
    judged = step["verify_len"] if step["mode"] == "compact" else len(step["draft_ids"])
    return [position < reached for position in range(judged)]


def observations(step: Mapping[str, Any]) -> list[Observation]:
    """What one step line says about its drafts; empty without survival estimates."""
    pairs = zip(step.get("survival") or [], judged_labels(step), strict=False)
    return [
        Observation(position, value, label)
        for position, (value, label) in enumerate(pairs, start=1)
        if value is not None and 0.0 <= value <= 1.0
    ]


class CalibrationScores:
    """ECE, AUC and Brier score over all positions and by position, counted as observations come."""

    def __init__(self) -> None:
        self._positions: dict[int, _Scores] = {}

    def add(self, found: Iterable[Observation]) -> None:
        for position, survival, reached in found:
            if position not in self._positions:
                self._positions[position] = _Scores()
            self._positions[position].add(survival, reached)

    def to_json(self) -> dict[str, Any] | None:
        """None without observations."""
        if not self._positions:
            return None
        whole = _Scores()
        by_position = []
        for position in sorted(self._positions):
            scores = self._positions[position]
            whole.merge(scores)
            by_position.append({"position": position, **scores.to_json()})
        return {**whole.to_json(), "num_bins": NUM_BINS, "by_position": by_position}

    def reliability(self) -> list[tuple[float, float, int]]:
        """(mean survival, reached rate, drafts) of every bin that holds any, over all positions."""
        whole = _Scores()
        for scores in self._positions.values():
            whole.merge(scores)
        return [(estimate / count, labels / count, count) for estimate, labels, count in whole.bins if count]


def calibration(found: Iterable[Observation]) -> dict[str, Any] | None:
    """The scores of these observations; None without any."""
    scores = CalibrationScores()
    scores.add(found)
    return scores.to_json()


class _Scores:
    def __init__(self) -> None:
        self.count = 0
        self.squares = 0.0
        self.bins: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * NUM_BINS
        """(sum of estimates, sum of labels, count)"""
        self.ranks: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """How many of the drafts (not reached, reached) have an estimate in each of the fine bins."""

    def add(self, value: float, label: bool) -> None:
        self.count += 1
        self.squares += (value - label) ** 2
        cell = min(int(value * NUM_BINS), NUM_BINS - 1)
        estimate, labels, count = self.bins[cell]
        self.bins[cell] = (estimate + value, labels + label, count + 1)
        ranks, fine = self.ranks[label], min(int(value * AUC_BINS), AUC_BINS - 1)
        ranks[fine] = ranks.get(fine, 0) + 1

    def merge(self, other: _Scores) -> None:
        self.count += other.count
        self.squares += other.squares
        self.bins = [(a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(self.bins, other.bins, strict=True)]
        for mine, theirs in zip(self.ranks, other.ranks, strict=True):
            for fine, count in theirs.items():
                mine[fine] = mine.get(fine, 0) + count

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean_survival": sum(estimate for estimate, _, _ in self.bins) / self.count,
            "reached_rate": sum(labels for _, labels, _ in self.bins) / self.count,
            "ece": sum(abs(estimate - labels) for estimate, labels, _ in self.bins) / self.count,
            "auc": self._area_under_curve(),
            "brier": self.squares / self.count,
        }

    def _area_under_curve(self) -> float | None:
        """Chance that a reached draft had the higher estimate than one not reached, ties half; None with one class."""
        num_false, num_true = (sum(ranks.values()) for ranks in self.ranks)
        if not num_true or not num_false:
            return None
        false, true = self.ranks
        wins, false_below = 0.0, 0
        for fine in sorted(false.keys() | true.keys()):
            false_here = false.get(fine, 0)
            wins += true.get(fine, 0) * (false_below + 0.5 * false_here)
            false_below += false_here
        return wins / (num_true * num_false)
