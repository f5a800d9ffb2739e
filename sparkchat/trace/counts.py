"""Speculation counts recomputed from step lines, by the definitions of ``sparkchat.result/1``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def accepted_drafts(step: Mapping[str, Any]) -> int:
    """Drafts among the delivered tokens of a step; those behind the end of the answer do not count."""
    return min(step["correct_drafts"], len(step["committed_ids"]))


@dataclass
class SpeculationCounts:
    """Sums over steps. ``*_at_pos[k]`` counts steps that got at least to draft k + 1."""

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

    @classmethod
    def of(cls, steps: Iterable[Mapping[str, Any]]) -> SpeculationCounts:
        counts = cls()
        for step in steps:
            counts.add(step)
        return counts

    def add(self, step: Mapping[str, Any]) -> None:
        proposed, verified, accepted = len(step["draft_ids"]), step["verify_len"], accepted_drafts(step)
        self.num_steps += 1
        self.num_committed += len(step["committed_ids"])
        self.num_proposed += proposed
        self.num_verified += verified
        self.num_accepted += accepted
        _count(self.acceptance_histogram, accepted)
        _count(self.verify_len_histogram, verified)
        _count_up_to(self.proposed_at_pos, proposed)
        _count_up_to(self.verified_at_pos, verified)
        _count_up_to(self.accepted_at_pos, accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens a step, the bonus token included; None without steps."""
        return self.num_committed / self.num_steps if self.num_steps else None

    def to_json(self) -> dict[str, Any]:
        """Names of the result's ``speculation`` object; lists end at the last count that is not 0."""
        return {
            "num_steps": self.num_steps,
            "num_proposed_draft_tokens": self.num_proposed,
            "num_verified_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": self.acceptance_histogram,
            "verify_len_histogram": self.verify_len_histogram,
            "proposed_at_pos": self.proposed_at_pos,
            "verified_at_pos": self.verified_at_pos,
            "accepted_at_pos": self.accepted_at_pos,
        }

    def acceptance_by_position(self) -> list[dict[str, Any]]:
        """Accepted drafts by position with both denominators: all steps, and steps that verified that far."""
        rows = []
        for index, proposed in enumerate(self.proposed_at_pos):
            verified, accepted = _at(self.verified_at_pos, index), _at(self.accepted_at_pos, index)
            rows.append(
                {
                    "position": index + 1,
                    "proposed": proposed,
                    "verified": verified,
                    "accepted": accepted,
                    "rate_of_all_steps": accepted / self.num_steps,
                    "rate_of_verified_steps": accepted / verified if verified else None,
                }
            )
        return rows


def _count(histogram: list[int], value: int) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for index in range(length):
        counts[index] += 1


def _at(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
