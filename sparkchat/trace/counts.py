"""Speculation counts recomputed from step lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparkchat.speculation import SpeculationCounts


def accepted_drafts(step: Mapping[str, Any]) -> int:
    """Drafts among the delivered tokens of a step; those behind the end of the answer do not count."""
    return min(step["correct_drafts"], len(step["committed_ids"]))


def count_step(counts: SpeculationCounts, step: Mapping[str, Any]) -> None:
    counts.record(
        proposed=len(step["draft_ids"]),
        verified=step["verify_len"],
        accepted=accepted_drafts(step),
        committed=len(step["committed_ids"]),
    )


def counts_of(steps: Iterable[Mapping[str, Any]]) -> SpeculationCounts:
    counts = SpeculationCounts()
    for step in steps:
        count_step(counts, step)
    return counts


def acceptance_by_position(counts: SpeculationCounts) -> list[dict[str, Any]]:
    """Accepted drafts by position with both denominators: all steps, and steps that verified that far."""
    rows = []
    for index, proposed in enumerate(counts.proposed_at_pos):
        verified, accepted = _at(counts.verified_at_pos, index), _at(counts.accepted_at_pos, index)
        rows.append(
            {
                "position": index + 1,
                "proposed": proposed,
                "verified": verified,
                "accepted": accepted,
                "rate_of_all_steps": accepted / counts.num_steps,
                "rate_of_verified_steps": accepted / verified if verified else None,
            }
        )
    return rows


def _at(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
