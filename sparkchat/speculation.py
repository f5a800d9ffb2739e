"""Counts of decode steps, by the definitions of ``sparkchat.result/1``; the engine and the trace both count with it.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationCounts:
    """Sums over steps. Lengths count drafts only, unless a name says acceptance length, which includes the bonus token.

    ``*_at_pos[k]`` counts steps that got at least to draft k + 1.
    """

    num_steps: int = 0
    num_committed: int = 0
    """Delivered tokens of all steps, bonus tokens included."""
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
        # Hundreds of requests may decode together, and plain steps draft nothing.
        if proposed:
            _count_up_to(self.proposed_at_pos, proposed)
            _count_up_to(self.verified_at_pos, verified)
            _count_up_to(self.accepted_at_pos, accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens a step, the bonus token included; None without steps."""
        return self.num_committed / self.num_steps if self.num_steps else None

    def figures(self, block_size: int | None = None) -> dict[str, Any]:
        """Names of the result's ``speculation`` object; lists reach the block size, or their last count without one."""
        drafts, lengths = (0, 0) if block_size is None else (block_size, block_size + 1)
        return {
            "num_steps": self.num_steps,
            "num_proposed_draft_tokens": self.num_proposed,
            "num_verified_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": _padded(self.acceptance_histogram, lengths),
            "proposed_at_pos": _padded(self.proposed_at_pos, drafts),
            "verified_at_pos": _padded(self.verified_at_pos, drafts),
            "accepted_at_pos": _padded(self.accepted_at_pos, drafts),
            "verify_len_histogram": _padded(self.verify_len_histogram, lengths),
        }


def _padded(counts: list[int], length: int) -> list[int]:
    return counts + [0] * (length - len(counts))


def _count(histogram: list[int], value: int) -> None:
    if value >= len(histogram):
        histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1
