"""Stops drafting where the plan says it does not pay, and tries again later."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW = 16
"""Drafting rounds averaged before the gate may close."""
_PAUSE = 48
"""Plain steps between two trials."""
_DECAY = 1.0 - 1.0 / _WINDOW


@dataclass
class DraftGate:
    """Per request. Reads only predictions of past rounds, so a closed gate cannot bias the output law.

    ``observe`` takes the predicted tokens per second of a drafting round; the gate closes when
    their running mean stays under that of plain decoding, and opens again for a trial of
    ``_WINDOW`` rounds after ``_PAUSE`` plain steps.
    """

    mean_theta: float = 0.0
    rounds: int = 0
    pause_left: int = 0

    @property
    def is_open(self) -> bool:
        return self.pause_left == 0

    def observe(self, theta: float, plain_ms: float | None) -> None:
        self.rounds += 1
        weight = max(1.0 - _DECAY, 1.0 / self.rounds)
        self.mean_theta += weight * (theta - self.mean_theta)
        if plain_ms is not None and self.rounds >= _WINDOW and self.mean_theta * plain_ms < 1000.0:
            self.pause_left, self.rounds, self.mean_theta = _PAUSE, 0, 0.0

    def pass_plain_step(self) -> None:
        self.pause_left = max(0, self.pause_left - 1)
