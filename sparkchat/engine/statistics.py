"""Counts of one request's decode steps, as the result object reports them."""

from __future__ import annotations

from typing import Any

from sparkchat.speculation import SpeculationCounts


class SpeculationStatistics(SpeculationCounts):
    """Counts of one request."""

    def to_json(self, block_size: int, reason_off: str | None) -> dict[str, Any]:
        """The ``speculation`` object of ``sparkchat.result/1``; lists reach the block size."""
        return {**self.figures(block_size), "reason_off": reason_off}
