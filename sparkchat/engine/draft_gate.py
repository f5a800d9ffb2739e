"""Stops drafting where the plan says it does not pay, and tries again later."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW = 24
"""Drafting rounds averaged before the gate may close."""
_TRIAL = 8
"""Rounds of a trial, and of a clear loss."""
_PAUSE = 48
"""Plain steps before the first trial; twice as many before each further one."""
_LONGEST_PAUSE = 768
_LOSS, _CLEAR_LOSS = 0.02, 0.15
"""How much the mean must lose for the gate to close: predictions of single rounds are noisy, and what is as good as
plain decoding would open and close for ever. A clear loss needs fewer rounds to be seen."""
_DECAY = 1.0 - 1.0 / _WINDOW
_PATIENCE = 24
"""Rounds of drafting without one draft verified after which the next one is, whatever the plan says."""


@dataclass
class DraftGate:
    """Of a request that is planned alone. Reads only predictions of its own past rounds, so a closed gate cannot bias
    the output law, and depends on nobody else. (Requests that are planned together share an ``outlook``.)

    ``observe`` takes the predicted tokens per second of a drafting round, and those of plain decoding. The gate closes
    when the running mean of their ratio loses, opens for a trial after a pause, and closes again unless the trial wins.
    Trials that lose are ever rarer.
    """

    mean_ratio: float = 0.0
    rounds: int = 0
    pause_left: int = 0
    next_pause: int = _PAUSE
    is_trial: bool = False
    unverified: int = 0
    """Rounds in a row that drafted and verified nothing."""

    @property
    def is_open(self) -> bool:
        return self.pause_left == 0

    @property
    def is_starved(self) -> bool:
        """Others have taken every verified row for so long that the next one is this request's."""
        return self.unverified >= _PATIENCE

    def observe(self, theta: float, plain_theta: float | None, verify_len: int = 1) -> None:
        self.unverified = 0 if verify_len else self.unverified + 1
        if plain_theta is None:
            return
        self.rounds += 1
        weight = max(1.0 - _DECAY, 1.0 / self.rounds)
        self.mean_ratio += weight * (theta / plain_theta - self.mean_ratio)
        is_clear = self.mean_ratio < 1.0 - _CLEAR_LOSS
        if self.rounds < (_TRIAL if self.is_trial or is_clear else _WINDOW):
            return
        if self.mean_ratio < (1.0 if self.is_trial else 1.0 - _LOSS):
            self.pause_left, self.next_pause = self.next_pause, min(2 * self.next_pause, _LONGEST_PAUSE)
            self.rounds, self.mean_ratio, self.is_trial = 0, 0.0, True
        elif self.is_trial:
            self.next_pause, self.is_trial = _PAUSE, False

    def pass_plain_step(self) -> None:
        self.pause_left = max(0, self.pause_left - 1)
