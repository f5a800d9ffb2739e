"""Which part of a stream of text came from a draft, which the target added itself, and in which step.

An event carries the text of several tokens at once; the step that belongs to it names its drafts, and that tells
where their text ends. It is a matter of colour only: the text itself is passed on whole and in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Event = dict[str, Any]


class TextRun(NamedTuple):
    text: str
    origin: str
    """prefill | draft | bonus (after a block that was accepted) | corrected (in place of a rejected draft) | plain"""
    step: int | None = None
    """The step's number within its answer, from 0; None for the token of the prompt pass."""


class TokenText:
    """Splits the deltas of one request by origin. A delta that holds the target's own token waits for its step."""

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._looks = 0
        self._newest: Event | None = None
        self._num_steps = 0
        self.bonus_text: str | None = None
        """What the target added in the newest step, as far as it has become text."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def has_waited(self) -> bool:
        """True on the second look at the same waiting text: its step is not coming."""
        if self._waiting:
            self._looks += 1
        return self._looks > 1

    def add_delta(self, event: Event) -> list[tuple[str, TextRun]]:
        origins = event.get("origins") or ()
        self._newest = event
        if "bonus" in origins and event.get("text"):
            self._waiting.append(event)
            return []
        found = self.flush()
        if event.get("text"):
            origin = origins[0] if origins else "plain"
            step = None if origin == "prefill" else self._num_steps
            found.append((event.get("channel", "answer"), TextRun(event["text"], origin, step)))
        return found

    def add_step(self, event: Event) -> list[tuple[str, TextRun]]:
        accepted = int(event.get("correct_drafts") or 0)
        drafts = "".join(str(text) for text in (event.get("draft_text") or ())[:accepted])
        newest, self._newest = self._newest, None
        has_bonus = newest is not None and newest.get("origins") and newest["origins"][-1] != "draft"
        self.bonus_text = newest["text"][len(drafts) :] if newest is not None and has_bonus else None
        number = event.get("i")
        step = number if isinstance(number, int) else self._num_steps
        self._num_steps = step + 1
        return self._release(len(drafts), step, "corrected" if event.get("reject") is not None else "bonus")

    def flush(self) -> list[tuple[str, TextRun]]:
        return self._release(None, self._num_steps, "bonus")

    def _release(self, draft_len: int | None, step: int, own: str) -> list[tuple[str, TextRun]]:
        waiting, self._waiting, self._looks = self._waiting, [], 0
        found: list[tuple[str, TextRun]] = []
        for event in waiting:
            text, origins, channel = event["text"], event["origins"], event.get("channel", "answer")
            # Drafts come first in a step, the target's own token last; a step may reach over both channels.
            cut = len(text) if draft_len is None else min(draft_len, len(text))
            cut = 0 if origins[0] != "draft" else cut
            draft_len = None if draft_len is None else draft_len - cut
            last = own if origins[-1] == "bonus" else origins[-1]
            runs = (TextRun(text[:cut], origins[0], step), TextRun(text[cut:], last, step))
            found += [(channel, run) for run in runs if run.text]
        return found
