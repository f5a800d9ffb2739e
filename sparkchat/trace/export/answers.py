"""The answers of a trace as texts, each handed on when it has ended, with who wrote which part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sparkchat.trace.counts import accepted_drafts
from sparkchat.trace.open_answers import OpenAnswers
from sparkchat.trace.reader import Damage, TraceLine, read_lines


class TextRun(NamedTuple):
    channel: str
    """answer | thinking"""
    text: str
    origin: str
    """draft: proposed by the drafter and accepted; target: the model's own; prefill: the first token"""


@dataclass
class RecordedAnswer:
    """One answer, as far as the file has it."""

    number: int = 0
    start: Mapping[str, Any] = field(default_factory=dict)
    """The turn line; empty where it is missing."""
    end: Mapping[str, Any] = field(default_factory=dict)
    """The end line; empty where it is missing."""
    runs: list[TextRun] = field(default_factory=list)
    num_steps: int = 0
    num_committed: int = 0

    def text(self, channel: str) -> str:
        return "".join(run.text for run in self.runs if run.channel == channel)

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.num_committed / self.num_steps if self.num_steps else None

    def add(self, line: TraceLine) -> None:
        data = line.data
        self.number = data["turn"]
        if line.type == "turn":
            self.start = data
        elif line.type == "end":
            self.end = data
        elif line.type == "step":
            self.num_steps += 1
            self.num_committed += len(data["committed_ids"])
        if line.type in ("step", "end"):
            self.runs += _runs(data)


def answers(trace: Path, damage: Damage) -> Iterator[RecordedAnswer]:
    """Answers in the order they ended, then those without an end."""
    found: OpenAnswers[RecordedAnswer] = OpenAnswers(RecordedAnswer)
    for line in read_lines(trace, damage):
        if line.type not in ("turn", "step", "end"):
            continue
        answer = found.of(line)
        if answer is not None:
            answer.add(line)
            if line.type == "end":
                found.close(line)
                yield answer
    yield from found.left_open


def _runs(line: Mapping[str, Any]) -> Iterator[TextRun]:
    """The text that came with a line. A step's drafts come first in it, the target's own token last."""
    drafts = "" if line["type"] == "end" else "".join((line.get("draft_text") or ())[: accepted_drafts(line)])
    for piece in line.get("deltas") or ():
        channel, text, origins = piece["channel"], piece["text"], set(piece.get("origins") or ())
        if not text:
            continue
        if "draft" in origins and len(origins) > 1 and text.startswith(drafts):
            yield TextRun(channel, drafts, "draft")
            yield TextRun(channel, text[len(drafts) :], "target")
        elif origins in ({"draft"}, {"prefill"}):
            yield TextRun(channel, text, origins.pop())
        else:
            yield TextRun(channel, text, "target")
