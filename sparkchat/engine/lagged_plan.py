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
from itertools import chain
from struct import calcsize, pack, unpack

import numpy as np

from sparkchat.engine.cost_table import StepCosts

LAG = 2
"""Age in steps of the newest confidences that a budget is chosen by."""
PAST_BLOCKS = 8
"""Blocks that a budget is chosen by, of all requests together: the confidences of a single past block say little of the
coming one, those of many requests say enough at once."""

_DOUBLE = calcsize("d")


@dataclass
class StaleSurvival:
    """The survivals of one request's last rounds, by round."""

    by_round: dict[int, bytes] = field(default_factory=dict)
    """As doubles: of bytes nothing is left for the collector to look at, of tuples ten a request."""

    def keep(self, round_: int, survival: Sequence[float]) -> None:
        self.by_round[round_] = pack(f"{len(survival)}d", *survival)
        for old in [r for r in self.by_round if r <= round_ - LAG - PAST_BLOCKS]:
            del self.by_round[old]

    def is_known(self, round_: int) -> bool:
        """Whether a block of this request is there to plan round ``round_`` by."""
        return bool(self.by_round.get(round_ - LAG))

    def before(self, round_: int, block: int, back: int = 0) -> tuple[float, ...]:
        """Survivals to plan round ``round_`` by, ``back`` rounds older than they have to be.

        Where that round drafted nothing, all drafts count as certain; where only the older one did not, the newest do.
        """
        kept = self.by_round.get(round_ - LAG - back, b"") or self.by_round.get(round_ - LAG, b"")
        found = unpack(f"{len(kept) // _DOUBLE}d", kept)
        return (*found[:block], *([1.0 if not found else found[-1]] * (block - len(found))))


def past_blocks(requests: int) -> int:
    """How many past rounds of each of so many requests a budget is chosen by."""
    return max(1, PAST_BLOCKS // max(1, requests))


@dataclass(frozen=True)
class Budget:
    """What a step may verify."""

    drafts: int
    predicted_ms: float | None
    predicted_theta: float | None
    """Tokens per second of the batch under the stale confidences."""
    plain_theta: float | None = None
    """The same without drafting; None when not measured."""
    is_planned: bool = True
    """False for a cap of the user's own."""


def choose_budget(
    stale: Sequence[Sequence[float]],
    cost: StepCosts | None,
    extra_rows: int = 0,
    extra_tokens: float = 0.0,
    older: Sequence[Sequence[Sequence[float]]] = (),
) -> Budget:
    """The best budget for requests with these stale survivals; ``extra_*`` as in ``planner.plan``.

    ``older`` holds the same requests' survivals of rounds before: the best budget is that of the mean over all of them.
    Of equally good budgets the smallest is taken. Without a cost table everything is verified.
    """
    pooled = [np.sort(np.fromiter(chain.from_iterable(one), dtype=np.float64))[::-1] for one in (stale, *older)]
    if cost is None:
        return Budget(len(pooled[0]), None, None)
    rows, tokens = len(stale) + extra_rows, len(stale) + extra_tokens
    gained = np.cumsum(np.mean(pooled, axis=0))
    times = cost.times(rows, 1 + len(gained))
    thetas = (tokens + np.concatenate([[0.0], gained])) / times
    best = int(np.argmax(thetas))
    return Budget(best, float(times[best]), 1000.0 * float(thetas[best]))


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
