"""What one request says: token ids to text, split into thinking and answer, ended by the first stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class DeltaPart:
    """Text and tokens of one channel, in order."""

    channel: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Positions of the tokens in the run that was pushed."""


@dataclass
class Delta:
    parts: list[DeltaPart]
    num_delivered: int
    finish_reason: str | None = None
    stop: str | int | None = None


class SilentOutput:
    """Delivers every token and makes no text: for probes and models without a tokenizer."""

    eos_ids: frozenset[int] = frozenset()
    text = ""
    thinking = ""

    def push(self, run: Sequence[int], *, num_delivered: int, limit: int) -> Delta:
        return Delta([], len(run))

    def flush(self) -> list[DeltaPart]:
        return []

    def text_of(self, token_id: int) -> str:
        return ""
