"""Counts of one request's decode steps, as the result object and the trace report them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStatistics:
    """Lengths count drafts only, unless a name says acceptance length, which includes the bonus token."""

    num_steps: int = 0
    num_committed: int = 0
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    verify_len_histogram: list[int] = field(default_factory=list)
    proposed_at_pos: list[int] = field(default_factory=list)
    verified_at_pos: list[int] = field(default_factory=list)
    accepted_at_pos: list[int] = field(default_factory=list)

    def record(self, *, proposed: int, verified: int, accepted: int, committed: int) -> None:
        """One decode step: drafts proposed, drafts verified, drafts delivered, tokens delivered."""
        self.num_steps += 1
        self.num_committed += committed
        self.num_proposed += proposed
        self.num_verified += verified
        self.num_accepted += accepted
        _count(self.acceptance_histogram, accepted)
        _count(self.verify_len_histogram, verified)
        for counts, length in (
            (self.proposed_at_pos, proposed),
            (self.verified_at_pos, verified),
            (self.accepted_at_pos, accepted),
        ):
            _grow(counts, length)
            for position in range(length):
                counts[position] += 1

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.num_committed / self.num_steps if self.num_steps else None

    def to_json(self, block_size: int, reason_off: str | None) -> dict[str, Any]:
        """The ``speculation`` object of ``sparkchat.result/1``; lists reach the block size."""
        for counts in (self.proposed_at_pos, self.verified_at_pos, self.accepted_at_pos):
            _grow(counts, block_size)
        for histogram in (self.acceptance_histogram, self.verify_len_histogram):
            _grow(histogram, block_size + 1)
        return {
            "num_steps": self.num_steps,
            "num_proposed_draft_tokens": self.num_proposed,
            "num_verified_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": list(self.acceptance_histogram),
            "proposed_at_pos": list(self.proposed_at_pos),
            "verified_at_pos": list(self.verified_at_pos),
            "accepted_at_pos": list(self.accepted_at_pos),
            "verify_len_histogram": list(self.verify_len_histogram),
            "reason_off": reason_off,
        }


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def _count(histogram: list[int], value: int) -> None:
    _grow(histogram, value + 1)
    histogram[value] += 1
