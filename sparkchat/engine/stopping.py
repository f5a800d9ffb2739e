"""When an answer ends: rules on token ids, and stop strings on text.

Both work on every token of a committed run, so an end in the middle of a block ends the answer there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "stop_string"]


@dataclass(frozen=True)
class RunEnd:
    """What the id rules make of one committed run."""

    num_delivered: int
    """Leading ids of the run that are delivered; an end token is not."""
    finish_reason: FinishReason | None
    """None: the answer goes on."""
    stop: int | None
    """The end token that was met."""


@dataclass(frozen=True)
class StopRules:
    """The id rules of one request."""

    end_ids: frozenset[int]
    """Ids that end the answer: the model's, and explicit ones."""
    max_tokens: int | None
    """Most delivered tokens; None leaves the context limit alone."""
    context: int
    """Most tokens, prompt and answer together."""
    prompt_len: int
    min_tokens: int = 0
    """Before this many delivered tokens an end id is an ordinary token (its logit is -inf, so it does not occur)."""
    ignore_eos: bool = False

    def room(self, num_delivered: int) -> int:
        """Tokens that may still be delivered."""
        room = self.context - self.prompt_len - num_delivered
        return room if self.max_tokens is None else min(room, self.max_tokens - num_delivered)

    def apply(self, run: Sequence[int], num_delivered: int) -> RunEnd:
        """Judge the ids of ``run``, committed after ``num_delivered`` delivered tokens, one by one.

        The answer has its last token when the room is used up: an end id after it is never looked at.
        """
        room = self.room(num_delivered)
        for i, token_id in enumerate(run):
            if i >= room:
                return RunEnd(max(0, room), "length", None)
            if not self.ignore_eos and token_id in self.end_ids and num_delivered + i >= self.min_tokens:
                return RunEnd(i, "stop", token_id)
        return RunEnd(len(run), "length" if len(run) >= room else None, None)


@dataclass(frozen=True)
class StopText:
    """Text that became certain, and whether a stop string was met."""

    text: str
    """Newly certain text: never taken back, ends exactly before the stop string."""
    stop: str | None
    """The stop string that was met; the answer ends."""


class StopStrings:
    """Finds stop strings in the text of one answer, token by token.

    The match that completes first wins; of those completing at the same character, the one that begins first. The
    token that completes it is the last one delivered, so the delivered ids may spell more than the text, which is cut
    exactly before the match. A match that begins before the ``min_tokens``-th token has shown a character does not
    count: the text that is left reaches into that token. Text that may still become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stop)]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._held = ""
        # A match may begin here or later; without stop strings, or before min_tokens, nowhere yet.
        self._first_start = 0 if stop and min_tokens == 0 else sys.maxsize

    def push(self, text: str) -> StopText:
        """Add the next token with the text it made certain (often one piece, sometimes none)."""
        self._num_tokens += 1
        if self._patterns and self._num_tokens == self._min_tokens:
            self._first_start = self._num_chars + 1
        return self._scan(text)

    def finish(self, text: str = "") -> StopText:
        """The answer ended for another reason: add trailing text of tokens already pushed, then let everything go."""
        last = self._scan(text)
        if last.stop is not None:
            return last
        held, self._held = self._held, ""
        return StopText(last.text + held, None)

    def _scan(self, text: str) -> StopText:
        if not self._patterns:
            return StopText(text, None)
        for i in range(max(0, self._first_start - self._num_chars), len(text)):
            # Every pattern must see every character, so no any().
            met = [pattern.text for pattern in self._patterns if pattern.push(text[i])]
            if met:
                return self._cut(text[: i + 1], max(met, key=len))
        self._num_chars += len(text)
        held = max((pattern.num_matched for pattern in self._patterns), default=0)
        everything = self._held + text
        self._held = everything[len(everything) - held :]
        return StopText(everything[: len(everything) - held], None)

    def _cut(self, text: str, stop: str) -> StopText:
        everything, self._held = self._held + text, ""
        return StopText(everything[: len(everything) - len(stop)], stop)


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: constant amortised work per character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Longest prefix of ``text`` that the characters so far end with."""
        self._fallback = [0] * (len(text) + 1)
        for i in range(1, len(text)):
            self._fallback[i + 1] = self._advance(self._fallback[i], text[i])

    def push(self, character: str) -> bool:
        """Add one character; True when the stop string is complete."""
        self.num_matched = self._advance(self.num_matched, character)
        return self.num_matched == len(self.text)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + 1 if self.text[matched] == character else 0
