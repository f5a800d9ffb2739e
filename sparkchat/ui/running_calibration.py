"""How well the drafter's survival estimates fit what is accepted, counted while an answer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkchat.trace.calibration import NUM_BINS, observations


@dataclass(frozen=True)
class CalibrationNumbers:
    """Over every judged draft of the answer; the trace's ``end`` line has the same figures by position."""

    count: int
    predicted: float
    """Mean survival."""
    reached: float
    """Share of the drafts whose prefix was accepted up to them."""
    error: float
    """Expected calibration error over equal-width bins."""


class RunningCalibration:
    """A fixed number of sums, whatever the length of the answer."""

    def __init__(self) -> None:
        self._estimates = [0.0] * NUM_BINS
        self._reached = [0] * NUM_BINS
        self._count = 0

    def add(self, step: Mapping[str, Any]) -> None:
        for _, survival, reached in observations(step):
            cell = min(int(survival * NUM_BINS), NUM_BINS - 1)
            self._estimates[cell] += survival
            self._reached[cell] += reached
            self._count += 1

    @property
    def numbers(self) -> CalibrationNumbers | None:
        """None before anything was judged."""
        count = self._count
        if not count:
            return None
        gaps = (abs(a - b) for a, b in zip(self._estimates, self._reached, strict=True))
        return CalibrationNumbers(count, sum(self._estimates) / count, sum(self._reached) / count, sum(gaps) / count)
