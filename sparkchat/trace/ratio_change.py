"""How a ratio of sums changed between two sessions, with an interval.

A figure such as acceptance length is a ratio: tokens over steps. Steps of one answer are alike, so the answer, not the
step, is the unit. The interval is that of the delta method (linearised ratio, clustered by answer): each answer's
residual is e = (numerator - R * denominator) / sum of denominators; an answer that both sessions have contributes the
difference of its two residuals, which takes out what is common to both; the variance is G / (G - 1) times the sum of
their squares, and Student's t with G - 1 degrees of freedom gives the width (G answers).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LEVEL = 0.95
METHOD = "delta method for a ratio of sums, clustered by answer (paired where both sessions have it), Student's t"
METHOD_WITHIN = "delta method, clusters of neighbouring steps of the only answer; says nothing about other questions"


class Cluster(NamedTuple):
    """Sums of one answer in both sessions; zeros where a session does not have it."""

    numerator_a: float = 0.0
    denominator_a: float = 0.0
    numerator_b: float = 0.0
    denominator_b: float = 0.0


@dataclass(frozen=True)
class RatioChange:
    """``low`` and ``high`` bound the change at ``LEVEL``; None where there is too little to say."""

    a: float | None
    b: float | None
    change: float | None
    """b - a, or b / a for a factor."""
    low: float | None
    high: float | None
    num_clusters: int
    is_factor: bool
    method: str | None
    """How the interval was made."""

    def to_json(self) -> dict[str, Any]:
        name = "factor" if self.is_factor else "difference"
        interval = None if self.low is None else {"low": self.low, "high": self.high, "level": LEVEL}
        return {
            "a": self.a,
            "b": self.b,
            name: self.change,
            "interval": interval,
            "num_clusters": self.num_clusters,
            "method": self.method,
        }


def ratio_change(clusters: Iterable[Cluster], *, is_factor: bool = False, method: str = METHOD) -> RatioChange:
    """The change of sum(numerators) / sum(denominators) from session a to session b."""
    used = [each for each in clusters if each.denominator_a > 0 or each.denominator_b > 0]
    total_a, total_b = sum(each.denominator_a for each in used), sum(each.denominator_b for each in used)
    a = sum(each.numerator_a for each in used) / total_a if total_a > 0 else None
    b = sum(each.numerator_b for each in used) / total_b if total_b > 0 else None
    if a is None or b is None or (is_factor and not (a > 0 and b > 0)):
        return RatioChange(a, b, None, None, None, len(used), is_factor, None)
    change = b / a if is_factor else b - a
    most_a, most_b = (sum(each[side] > 0 for each in used) for side in (1, 3))
    if min(most_a, most_b) < 2:
        return RatioChange(a, b, change, None, None, len(used), is_factor, None)
    residuals = []
    for each in used:
        residual_a = (each.numerator_a - a * each.denominator_a) / total_a
        residual_b = (each.numerator_b - b * each.denominator_b) / total_b
        residuals.append(residual_b / b - residual_a / a if is_factor else residual_b - residual_a)
    count = len(residuals)
    error = math.sqrt(count / (count - 1) * sum(value * value for value in residuals))
    width = student_t(LEVEL, count - 1) * error
    low, high = (change * math.exp(-width), change * math.exp(width)) if is_factor else (change - width, change + width)
    return RatioChange(a, b, change, low, high, count, is_factor, method)


def within_one_answer(steps_a: Sequence[int], steps_b: Sequence[int]) -> Iterable[Cluster]:
    """Clusters of neighbouring steps, about as many as each is long; none where there are too few steps.

    ``steps_a`` and ``steps_b`` are the tokens that each step committed.
    """
    if min(len(steps_a), len(steps_b)) < 16:
        return
    for steps, is_a in ((steps_a, True), (steps_b, False)):
        size = math.isqrt(len(steps))
        for first in range(0, len(steps) - size + 1, size):
            last = first + size if first + 2 * size <= len(steps) else len(steps)
            sums = (float(sum(steps[first:last])), float(last - first))
            yield Cluster(*sums) if is_a else Cluster(0.0, 0.0, *sums)


def student_t(level: float, degrees: int) -> float:
    """The t beyond which Student's distribution has 1 - level of its mass, on both sides together."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass_within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _mass_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) for t = sqrt(degrees) * tan(angle), in closed form (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, 0.0
        for k in range(1, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        return 2 / math.pi * (angle + sine * total)
    term, total = 1.0, 0.0
    for k in range(1, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return sine * total
