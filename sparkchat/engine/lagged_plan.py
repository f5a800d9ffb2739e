"""Verify budgets from confidences two steps old: the asynchronous form of the prefix scheduler (paper, section 5.2).

A device that replays captured steps has no time for the host to look at this step's confidences. The budget K of step
t is the best of all budgets, by predicted tokens per second, under the confidences of step t-2; who gets it is settled
by the confidences of step t, best first (``captured/allocation.py`` on the device, ``admit`` here). K depends on the
past alone and admission looks at earlier places only, so the output law stays the target's; and because K does not look
at this step, all budgets may be compared, however jagged the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkchat.engine.cost_table import StepCosts

LAG = 2
"""Age in steps of the confidences that a budget is chosen by."""


@dataclass
class StaleSurvival:
    """The survivals of one request's last rounds, by round."""

    by_round: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def keep(self, round_: int, survival: Sequence[float]) -> None:
        self.by_round[round_] = tuple(survival)
        for old in [r for r in self.by_round if r < round_ - LAG]:
            del self.by_round[old]

    def before(self, round_: int, block: int) -> tuple[float, ...]:
        """Survivals to plan round ``round_`` by. Where that round drafted nothing, all drafts count as certain."""
        found = self.by_round.get(round_ - LAG, ())
        return (*found[:block], *([1.0 if not found else found[-1]] * (block - len(found))))


@dataclass(frozen=True)
class Budget:
    """What a step may verify."""

    drafts: int
    predicted_ms: float | None
    predicted_theta: float | None
    """Tokens per second of the batch under the stale confidences."""
    plain_theta: float | None = None
    """The same without drafting; None when not measured."""


def choose_budget(
    stale: Sequence[Sequence[float]], cost: StepCosts | None, extra_rows: int = 0, extra_tokens: float = 0.0
) -> Budget:
    """The best budget for requests with these stale survivals; ``extra_*`` as in ``planner.plan``.

    Of equally good budgets the smallest is taken. Without a cost table everything is verified.
    """
    pooled = sorted((value for alive in stale for value in alive), reverse=True)
    if cost is None:
        return Budget(len(pooled), None, None)
    rows, tokens = len(stale) + extra_rows, len(stale) + extra_tokens
    best, best_theta = 0, tokens / cost.step_ms(rows)
    for drafts, value in enumerate(pooled, start=1):
        tokens += value
        theta = tokens / cost.step_ms(rows + drafts)
        if theta > best_theta:
            best, best_theta = drafts, theta
    return Budget(best, cost.step_ms(rows + best), 1000.0 * best_theta)


def admit(survival: Sequence[Sequence[float]], limits: Sequence[int], budget: int) -> list[int]:
    """Lengths of the ``budget`` likeliest drafts: the same rule as ``captured/allocation.allocate``."""
    cells = [
        (-value, place, request)
        for request, (alive, limit) in enumerate(zip(survival, limits, strict=True))
        for place, value in enumerate(alive[:limit])
    ]
    lens = [0] * len(limits)
    for _, _, request in sorted(cells)[: max(0, budget)]:
        lens[request] += 1
    return lens
