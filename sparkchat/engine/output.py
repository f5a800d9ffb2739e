"""What one request says: token ids to text, split into thinking and answer, ended by the first stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkchat.detokenize import Detokenizer, token_bytes, token_text
from sparkchat.engine.stopping import StopRules, StopStrings
from sparkchat.thinking import ThinkingSplitter


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
    """What a committed run came to."""

    parts: list[DeltaPart]
    num_delivered: int
    finish_reason: str | None = None
    stop: str | int | None = None


class Spellings:
    """What single tokens look like, found once for all requests of an engine; at most the whole vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` None: nothing is known of any."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def text_of(self, token_id: int) -> str:
        """One token by itself, for display."""
        if self._tokenizer is None:
            return ""
        if token_id not in self._texts:
            self._texts[token_id] = token_text(self._tokenizer, token_id)
        return self._texts[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token by itself, which need not be whole characters."""
        if self._tokenizer is None:
            return b""
        if token_id not in self._bytes:
            self._bytes[token_id] = token_bytes(self._tokenizer, token_id)
        return self._bytes[token_id]


class OutputStream:
    """Text of one answer. Every token of a run is judged, so an end inside a block ends the answer there.

    The token that completes a stop string is delivered; its text is cut exactly before the stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        rules: StopRules,
        stop: Sequence[str],
        splitter: ThinkingSplitter | None,
        spellings: Spellings | None = None,
    ) -> None:
        """``tokenizer`` and ``splitter`` are None for a model without a tokenizer, whose answers are ids alone.

        ``spellings`` None: of its own.
        """
        spellings = spellings or Spellings(tokenizer)
        self.text_of, self.bytes_of = spellings.text_of, spellings.bytes_of
        self._tokenizer = tokenizer
        self._rules = rules
        self._stop = tuple(stop)
        self._splitter = splitter
        self._channel: str = "answer" if splitter is None else splitter.channel
        self._detokenizer = self._fresh_detokenizer()
        self._num_tokens = 0
        self._strings = self._fresh_strings()
        self._texts: dict[str, list[str]] = {"answer": [], "thinking": []}

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._rules.end_ids

    @property
    def channel(self) -> str:
        """Where the next token's text goes: answer or thinking."""
        return self._channel

    @property
    def text(self) -> str:
        return "".join(self._texts["answer"])

    @property
    def thinking(self) -> str:
        return "".join(self._texts["thinking"])

    def push(self, run: Sequence[int], num_delivered: int) -> Delta:
        """Deliver the tokens of a run, committed after ``num_delivered`` delivered ones, up to the first end."""
        end = self._rules.apply(run, num_delivered)
        delta = Delta([], end.num_delivered, end.finish_reason, end.stop)
        for index, token in enumerate(run[: end.num_delivered]):
            found = self._push_token(token, index, delta.parts)
            if found is not None:
                delta.num_delivered, delta.finish_reason, delta.stop = index + 1, "stop_string", found
                return delta
        if delta.finish_reason is not None:
            found = self._end(delta.parts)
            if found is not None:
                delta.finish_reason, delta.stop = "stop_string", found
        return delta

    def flush(self) -> list[DeltaPart]:
        """The answer ended from outside: show what was held back."""
        parts: list[DeltaPart] = []
        self._end(parts)
        return parts

    def _push_token(self, token: int, index: int, parts: list[DeltaPart]) -> str | None:
        """Returns the stop string that this token completed."""
        channel, is_tag = (self._channel, False) if self._splitter is None else self._splitter.push(token)
        if channel != self._channel:
            found = self._end(parts)
            if found is not None:
                # The tag ended an unfinished character, and its stand-in completed a stop string.
                self._deliver(token, index, parts)
                return found
            self._channel, self._strings, self._detokenizer = channel, self._fresh_strings(), self._fresh_detokenizer()
        text = "" if self._detokenizer is None or is_tag else self._detokenizer.push(token)
        certain = self._strings.push(text)
        self._deliver(token, index, parts)
        self._release(certain.text, parts)
        return certain.stop

    def _deliver(self, token: int, index: int, parts: list[DeltaPart]) -> None:
        self._num_tokens += 1
        part = self._part(parts)
        part.token_ids.append(token)
        part.indices.append(index)

    def _end(self, parts: list[DeltaPart]) -> str | None:
        certain = self._strings.finish("" if self._detokenizer is None else self._detokenizer.flush())
        self._release(certain.text, parts)
        return certain.stop

    def _part(self, parts: list[DeltaPart]) -> DeltaPart:
        if not parts or parts[-1].channel != self._channel:
            parts.append(DeltaPart(self._channel))
        return parts[-1]

    def _release(self, text: str, parts: list[DeltaPart]) -> None:
        if text:
            self._part(parts).text += text
            self._texts[self._channel].append(text)

    def _fresh_detokenizer(self) -> Detokenizer | None:
        return None if self._tokenizer is None else Detokenizer(self._tokenizer)

    def _fresh_strings(self) -> StopStrings:
        return StopStrings(self._stop, max(0, self._rules.min_tokens - self._num_tokens))


class SilentOutput:
    """Delivers every token and makes no text: for probes."""

    eos_ids: frozenset[int] = frozenset()
    text = ""
    thinking = ""

    def push(self, run: Sequence[int], num_delivered: int) -> Delta:
        return Delta([], len(run))

    def flush(self) -> list[DeltaPart]:
        return []

    def text_of(self, token_id: int) -> str:
        return ""
