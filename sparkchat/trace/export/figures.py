"""What the plots of a trace show, gathered in one pass and in bounded memory, and the plots themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkchat.trace.counts import acceptance_by_position, accepted_drafts
from sparkchat.trace.export import plot
from sparkchat.trace.reader import TraceLine
from sparkchat.trace.summary import Totals

MOST_BINS = 400
"""Points of a curve; in a longer session each stands for several steps."""
_MOST_POSITIONS = 32


@dataclass
class _Bin:
    """Sums over neighbouring steps."""

    steps: int = 0
    committed: int = 0
    verified: int = 0
    accepted: int = 0
    timed: int = 0
    ms: float = 0.0
    timed_committed: int = 0
    predicted: int = 0
    predicted_ms: float = 0.0

    def add(self, step: Mapping[str, object]) -> None:
        committed = len(step["committed_ids"])  # type: ignore[arg-type]
        self.steps += 1
        self.committed += committed
        self.verified += step["verify_len"]  # type: ignore[operator]
        self.accepted += accepted_drafts(step)
        if (ms := step.get("step_ms")) is not None:
            self.timed += 1
            self.timed_committed += committed
            self.ms += ms  # type: ignore[operator]
        if (predicted := step.get("predicted_step_ms")) is not None:
            self.predicted += 1
            self.predicted_ms += predicted  # type: ignore[operator]

    def merge(self, other: _Bin) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Figures:
    """``add`` takes every line; ``plots`` gives the bodies of the SVGs, each ``plot.WIDTH`` by ``plot.HEIGHT``."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._bins: list[_Bin] = []
        self._steps_a_bin = 1

    def add(self, line: TraceLine) -> None:
        self.totals.add(line)
        if line.type != "step":
            return
        if not self._bins or self._bins[-1].steps >= self._steps_a_bin:
            if len(self._bins) >= MOST_BINS:
                self._halve()
            if not self._bins or self._bins[-1].steps >= self._steps_a_bin:
                self._bins.append(_Bin())
        self._bins[-1].add(line.data)

    def _halve(self) -> None:
        self._steps_a_bin *= 2
        pairs = [self._bins[index : index + 2] for index in range(0, len(self._bins), 2)]
        for pair in pairs:
            for other in pair[1:]:
                pair[0].merge(other)
        self._bins = [pair[0] for pair in pairs]

    def plots(self) -> list[str]:
        return [
            self._lengths(),
            self._speed(),
            self._times(),
            self._positions(),
            self._histogram(),
            self._reliability(),
        ]

    def _curve(self, name: str, value: str, count: str, scale: float = 1.0) -> plot.Series:
        """A mean of each bin over the numbers of the steps."""
        points, first = [], 0
        for each in self._bins:
            divisor = getattr(each, count)
            if divisor:
                points.append((first + (each.steps + 1) / 2, scale * getattr(each, value) / divisor))
            first += each.steps
        return plot.Series(name, points)

    def _lengths(self) -> str:
        series = [
            self._curve("verified", "verified", "steps"),
            self._curve("accepted", "accepted", "steps"),
        ]
        return plot.line_plot("Drafts verified and accepted", "step", "drafts a step", series)

    def _speed(self) -> str:
        curve = self._curve("tokens/s of the steps", "timed_committed", "ms", 1e3)
        return plot.line_plot("Speed", "step", "tokens/s", [curve])

    def _times(self) -> str:
        series = [self._curve("measured", "ms", "timed"), self._curve("predicted", "predicted_ms", "predicted")]
        return plot.line_plot("Time of a step", "step", "ms", series)

    def _positions(self) -> str:
        rows = acceptance_by_position(self.totals.all.counts)[:_MOST_POSITIONS]
        groups = [
            plot.Bars("of all steps", [row["rate_of_all_steps"] for row in rows]),
            plot.Bars("of steps that verified it", [row["rate_of_verified_steps"] for row in rows]),
        ]
        names = [str(row["position"]) for row in rows]
        return plot.bar_plot("Acceptance by draft position", "position", "accepted", names, groups, 1.0)

    def _histogram(self) -> str:
        counts = self.totals.all.counts
        lists = (counts.acceptance_histogram[:_MOST_POSITIONS], counts.verify_len_histogram[:_MOST_POSITIONS])
        length = max(map(len, lists))
        padded = [[*values, *[0] * (length - len(values))] for values in lists]
        groups = [plot.Bars("accepted", padded[0]), plot.Bars("verified", padded[1])]
        names = [str(number) for number in range(length)]
        return plot.bar_plot("How many drafts a step", "drafts", "steps", names, groups)

    def _reliability(self) -> str:
        bins = self.totals.all.calibration.reliability()
        most = max((count for _, _, count in bins), default=1)
        points = [(estimate, rate) for estimate, rate, _ in bins]
        series = plot.Series("drafts, by estimate", points, [count / most for _, _, count in bins])
        return plot.mark_plot("Calibration", "estimated survival", "reached", series)
