"""The tokens of every answer of a session, packed small, with where each came from; for comparing two sessions."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkchat.strict_json import dumps
from sparkchat.trace.counts import accepted_drafts
from sparkchat.trace.open_answers import OpenAnswers
from sparkchat.trace.reader import Damage, TraceLine, read_lines
from sparkchat.trace.summary import Totals
from sparkchat.trace.writer import prompt_sha256


@dataclass
class AnswerTokens:
    """One answer. Its tokens are those that were streamed."""

    number: int = -1
    key: str = ""
    """The request's id as JSON text."""
    prompt: str | None = None
    """sha256 of the prompt's ids; None where the file does not say."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    decode_ms: float | None = None
    num_verified: int = 0
    num_accepted: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    committed: array[int] = field(default_factory=lambda: array("H"))
    """Tokens of each step."""
    _texts: list[str] = field(default_factory=list)
    _token_ends: array[int] = field(default_factory=lambda: array("Q"))
    _text_ends: array[int] = field(default_factory=lambda: array("Q"))
    """Tokens and characters streamed up to and with each piece."""
    _line_ends: array[int] = field(default_factory=lambda: array("Q"))
    _lines: array[int] = field(default_factory=lambda: array("Q"))
    """Tokens streamed up to and with each line, and its number."""
    modes: set[str] = field(default_factory=set)

    def add(self, line: TraceLine) -> None:
        data = line.data
        if self.number < 0:
            self.number, self.key = data["turn"], dumps(data.get("id"))
        if line.type == "turn":
            ids = data.get("prompt_token_ids")
            self.prompt = data.get("prompt_sha256") if ids is None else prompt_sha256(ids)
            self.sampling = data.get("sampling") or {}
            return
        if line.type == "step":
            self.num_verified += data["verify_len"]
            self.num_accepted += accepted_drafts(data)
            self.committed.append(len(data["committed_ids"]))
            if len(self.modes) < 8:
                self.modes.add(data["mode"])
        else:
            self.finish_reason = data["finish_reason"]
            self.decode_ms = (data.get("timing") or {}).get("decode_ms")
        for piece in data.get("deltas") or ():
            self._texts.append(piece["text"])
            self.token_ids.extend(piece["token_ids"])
            self._token_ends.append(len(self.token_ids))
            self._text_ends.append((self._text_ends[-1] if self._text_ends else 0) + len(piece["text"]))
        self._line_ends.append(len(self.token_ids))
        self._lines.append(line.number)

    def finish(self) -> None:
        """No more lines come."""
        self._texts = ["".join(self._texts)]

    @property
    def text(self) -> str:
        """Everything streamed, thinking included."""
        return "".join(self._texts)

    @property
    def is_greedy(self) -> bool:
        return self.sampling.get("temperature") == 0

    def line_of(self, index: int) -> int | None:
        """The line that brought token ``index``; that of the end for the one behind the last."""
        at = bisect_right(self._line_ends, index)
        if at < len(self._lines):
            return self._lines[at]
        return self._lines[-1] if self._lines else None

    def text_before(self, index: int) -> int:
        """How many characters were certain before the piece with token ``index``."""
        at = bisect_right(self._token_ends, index)
        return self._text_ends[at - 1] if at else 0


@dataclass
class SessionTokens:
    path: Path
    totals: Totals
    damage: Damage
    answers: list[AnswerTokens]
    """In order of their numbers."""


def session_tokens(path: Path) -> SessionTokens:
    """Read a whole session; see ``read_lines`` for its errors."""
    totals, damage, done = Totals(), Damage(), []
    found: OpenAnswers[AnswerTokens] = OpenAnswers(AnswerTokens)
    for line in read_lines(path, damage):
        totals.add(line)
        if line.type in ("turn", "step", "end") and (answer := found.of(line)) is not None:
            answer.add(line)
            if line.type == "end":
                found.close(line)
                done.append(answer)
    done += found.left_open
    for answer in done:
        answer.finish()
    return SessionTokens(path, totals, damage, sorted(done, key=lambda answer: answer.number))
