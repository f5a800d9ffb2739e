"""How many drafts of each request to verify: the hardware-aware prefix scheduler (paper section 4, Algorithm 1).

Lossless by construction. Whether draft k of a request is admitted may depend only on what is known before draft k is
looked at: its own confidences up to k (functions of the drafts before k), other requests, and the cost table. The
early stop has this property; taking the best of all budgets from confidences of this same step does not (paper
appendix A), however good its prediction, and must not be added here. Costs that would make the early stop stop early
are smoothed instead, which looks at no confidence (``StepCosts.planned_ms``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkchat.engine.cost_table import CostLookup, StepCosts


@dataclass(frozen=True)
class Plan:
    """Verify lengths for one step of a batch."""

    verify_lens: tuple[int, ...]
    """Drafts to verify, per request."""
    budget: int
    """Their sum."""
    predicted_ms: float | None
    """Predicted time of the whole step; None without a cost table."""
    predicted_theta: float | None
    """Predicted tokens per second of the batch, the paper's theta; None without a cost table."""


def plan(
    survival: Sequence[Sequence[float]],
    limits: Sequence[int],
    cost: StepCosts | CostLookup | None,
    extra_rows: int = 0,
    extra_tokens: float = 0.0,
    floors: Sequence[int] | None = None,
) -> Plan:
    """Admit drafts in order of survival while predicted tokens per second strictly grow; stop at the first that loses.

    ``survival[r][j]`` is the calibrated probability that drafts 1..j+1 of request r are all accepted (non-increasing in
    j); ``limits[r]`` the most drafts of it worth verifying. Every request also verifies its anchor: one row, one
    token. ``extra_rows`` are rows of the same step that are not planned here, ``extra_tokens`` what they are expected
    to deliver. The first ``floors[r]`` drafts are admitted whatever they bring; like the limits, floors must be settled
    by the past. Without a cost table everything up to the limits is verified. Raises ValueError when a survival is not
    a probability or grows with j.
    """
    if len(survival) != len(limits):
        raise ValueError(f"survival of {len(survival)} requests but limits of {len(limits)}")
    if cost is None:
        return Plan(tuple(max(0, limit) for limit in limits), sum(max(0, limit) for limit in limits), None, None)
    rows = len(limits) + extra_rows
    tokens = len(limits) + extra_tokens
    lens = [min(floor, limit) for floor, limit in zip(floors or [0] * len(limits), limits, strict=True)]
    given = [sum(row[:length]) for row, length in zip(survival, lens, strict=True)]
    rows, tokens = rows + sum(lens), tokens + sum(given)
    milliseconds = cost.planned_ms(rows)
    for negative_alive, place, request in _candidates(survival, limits):
        if place <= lens[request]:
            continue
        more_ms = cost.planned_ms(rows + 1)
        is_free = cost.step_ms(rows + 1) <= cost.step_ms(rows)
        if not is_free and (tokens - negative_alive) / more_ms <= tokens / milliseconds:
            break
        lens[request] = place
        rows, tokens, milliseconds = rows + 1, tokens - negative_alive, more_ms
    milliseconds = cost.step_ms(rows)
    return Plan(tuple(lens), sum(lens), milliseconds, 1000.0 * tokens / milliseconds)


def _candidates(survival: Sequence[Sequence[float]], limits: Sequence[int]) -> list[tuple[float, int, int]]:
    """(-survival, position from 1, request) of every draft that may be admitted, best first.

    Equal survivals (a saturated confidence of 1.0) go by position, then request, so that a draft never comes before
    an earlier one of its own request and the order depends on nothing the drafts themselves decide.
    """
    candidates = []
    for request, (alive, limit) in enumerate(zip(survival, limits, strict=True)):
        before = 1.0
        for place, value in enumerate(alive[: max(0, limit)], start=1):
            if not 0.0 <= value <= before:
                raise ValueError(f"survival {value} of request {request} at position {place} follows {before}")
            if value > 0.0:
                candidates.append((-value, place, request))
            before = value
    return sorted(candidates)
