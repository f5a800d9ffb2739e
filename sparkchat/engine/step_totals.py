"""Sums over all requests of a decode step, for who measures: told in one event a step, where the records of 256
requests would take time of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkchat.simulation import SimulatedAcceptance


class Clock(Protocol):
    """Knows how long a step took, when it is over."""

    @property
    def total_ms(self) -> float: ...


@dataclass
class StepTotals:
    """Of the requests of one step that were told so far."""

    requests: int = 0
    tokens: int = 0
    """Delivered."""
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    limited: int = 0
    """Requests with less to deliver than their drafts and a token: their step is cut at the end of the answer."""
    expected: float = 0.0
    """Drafts that are accepted on average, given the simulated chances and how many of them may be taken."""
    of_block: float = 0.0
    """The same, were every draft verified and could be taken."""
    of_profile: float = 0.0
    """What ``of_block`` is on average over chances."""
    predicted_ms: float | None = None
    """Of the step as a whole; None where nobody plans."""
    _clocks: list[Clock] = field(default_factory=list)
    _foretold: list[Clock] = field(default_factory=list)

    def add(
        self,
        *,
        proposed: int,
        verified: int,
        accepted: int,
        tokens: int,
        remaining: int,
        clock: Clock,
        predicted_ms: float | None,
    ) -> None:
        """One request's part of a step of ``clock``; ``remaining``: tokens it may still deliver, after the step."""
        self.requests += 1
        self.tokens += tokens
        self.proposed += proposed
        self.verified += verified
        self.accepted += accepted
        self.limited += remaining + tokens <= proposed
        if not any(known is clock for known in self._clocks):
            self._clocks.append(clock)
        if predicted_ms is not None and not any(known is clock for known in self._foretold):
            self._foretold.append(clock)
            self.predicted_ms = (self.predicted_ms or 0.0) + predicted_ms

    def add_chances(self, simulated: SimulatedAcceptance, logits: Sequence[float], most: int) -> None:
        """A request's simulated chances, as logits of its drafts, the first ``most`` of which may be taken."""
        alive = 1.0
        for place, logit in enumerate(logits):
            alive *= 1.0 / (1.0 + math.exp(-logit)) if logit > -700.0 else 0.0
            self.of_block += alive
            if place < most:
                self.expected += alive
        self.of_profile += simulated.accepted_drafts(len(logits))

    def event(self, num_graphs: int, is_simulated: bool) -> dict[str, Any]:
        """``num_graphs``: captured steps that there are by now."""
        return {
            "event": "batch_step",
            "id": None,
            "t_ns": time.monotonic_ns(),
            "requests": self.requests,
            "tokens": self.tokens,
            "proposed": self.proposed,
            "verified": self.verified,
            "accepted": self.accepted,
            "limited": self.limited,
            "expected": [self.expected, self.of_block, self.of_profile] if is_simulated else None,
            "step_ms": sum(clock.total_ms for clock in self._clocks),
            "predicted_step_ms": self.predicted_ms,
            "num_graphs": num_graphs,
        }
