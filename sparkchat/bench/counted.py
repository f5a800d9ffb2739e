"""Which steps of a round count, and what they come to.

A step counts in which as many requests decode as do together, none of them so near its end that the step would be cut,
and beside which nothing was captured. Its time is that from the step before it, which has as many requests: prompts,
requests that sit down, and the last stragglers are in none. Where drafts pass by simulated chances, tokens are those
that are expected from the chances: what happened to be drawn differs between arms by more than the arms do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Counted:
    """Sums over steps that count."""

    seconds: float = 0.0
    steps: int = 0
    """Of the engine."""
    answer_steps: int = 0
    """Each request's part of a step."""
    tokens: int = 0
    """Delivered."""
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    expected: float = 0.0
    """Of simulated runs: drafts that the chances of each step accept on average, by what was verified and may be
    taken."""
    of_block: float = 0.0
    """The same, were all drafts verified."""
    of_profile: float = 0.0
    """What the profile says that ``of_block`` is on average."""
    simulated_steps: int = 0
    """Those of ``answer_steps`` whose chances are known."""
    predicted_steps: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    """Of the steps that were predicted."""
    left_out: int = 0
    """Steps beside which something was captured."""

    @property
    def is_simulated(self) -> bool:
        return self.simulated_steps > 0

    @property
    def expected_tokens(self) -> float | None:
        """What these steps yield on average; None where nothing is simulated.

        A step yields one token and the accepted drafts, whose mean, given its chances, is ``expected``. Which chances
        were drawn is luck as well, and the same luck for the whole block: its mean is known (``of_profile``), so that
        what was drawn of it tells how much too good the chances were. Of steps that verify everything nothing is left
        of luck, of those that verify nothing there is none.
        """
        if not self.is_simulated:
            return None
        luck = self.of_profile / self.of_block if self.of_block else 1.0
        return self.answer_steps + self.expected * luck

    @property
    def yielded(self) -> float:
        """Tokens that speeds are told by."""
        expected = self.expected_tokens
        return self.tokens if expected is None else expected

    @property
    def tokens_per_second(self) -> float | None:
        return self.yielded / self.seconds if self.seconds else None


def total(parts: Iterable[Counted]) -> Counted:
    listed = list(parts)
    return Counted(**{field.name: sum(getattr(part, field.name) for part in listed) for field in fields(Counted)})


def counted(steps: Sequence[Event], together: int) -> Counted:
    """Of the ``batch_step`` events of one round. Answers too short for any whole step count as they are."""
    pairs = [(before, step) for before, step in pairwise(steps) if before["requests"] == step["requests"] == together]
    clean = [(before, step) for before, step in pairs if before["num_graphs"] == step["num_graphs"]]
    whole = [(before, step) for before, step in clean if not step["limited"]]
    found = [_one(step, (step["t_ns"] - before["t_ns"]) / 1e9) for before, step in whole or clean]
    if not pairs:
        # Of one step alone there is none before it: by its own time.
        found = [_one(step, step["step_ms"] / 1e3) for step in steps if step["requests"] == together]
    return total([*found, Counted(left_out=len(pairs) - len(clean))])


def most_together(steps: Sequence[Event]) -> int:
    """Requests that decoded at once; caches may have no room for all."""
    return max((step["requests"] for step in steps), default=0)


def _one(step: Event, seconds: float) -> Counted:
    expected, of_block, of_profile = step["expected"] or (0.0, 0.0, 0.0)
    is_predicted = step["predicted_step_ms"] is not None
    return Counted(
        seconds=seconds,
        steps=1,
        answer_steps=step["requests"],
        tokens=step["tokens"],
        proposed=step["proposed"],
        verified=step["verified"],
        accepted=step["accepted"],
        expected=expected,
        of_block=of_block,
        of_profile=of_profile,
        simulated_steps=0 if step["expected"] is None else step["requests"],
        predicted_steps=int(is_predicted),
        predicted_ms=step["predicted_step_ms"] if is_predicted else 0.0,
        measured_ms=step["step_ms"] if is_predicted else 0.0,
    )
