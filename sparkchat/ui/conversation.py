"""The state of a chat: messages, settings, and the request that each new turn becomes. No terminal, no engine.

A chat is a tree: a question that is asked again, or changed, becomes a branch beside the first one, and nothing that
was said is lost. ``turns`` is the line from the root to where the chat stands now.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.options import SAMPLING, parse, unknown
from sparkchat.params import GenerateRequest, Mode, SamplingParams
from sparkchat.ui.long_text import LongText

_MAY_BE_NONE = ("max_tokens", "seed")
_IDS = ("prompt_token_ids", "token_ids")
"""Of a result, kept packed: as a list they would take ten times the text they stand for."""


class Answer:
    """One answer as it was received. Its text is kept once: the screen shows the same :class:`LongText`."""

    def __init__(
        self, text: str = "", thinking: str = "", result: dict[str, Any] | None = None, was_stopped: bool = False
    ) -> None:
        self.text = text
        self.thinking = thinking
        self.result = result
        self.was_stopped = was_stopped

    @property
    def text(self) -> str:
        return "".join(map(str, self._text))

    @text.setter
    def text(self, text: str) -> None:
        self._text = [LongText(text)]

    @property
    def thinking(self) -> str:
        return "".join(map(str, self._thinking))

    @thinking.setter
    def thinking(self, text: str) -> None:
        self._thinking = [LongText(text)]

    def add_part(self, channel: str, part: LongText) -> None:
        """A further part, which may still grow."""
        (self._thinking if channel == "thinking" else self._text).append(part)

    def add(self, channel: str, text: str) -> None:
        (self._thinking if channel == "thinking" else self._text)[-1].append(text)

    @property
    def result(self) -> dict[str, Any] | None:
        """The ``sparkchat.result/1`` object once the answer has ended, without its text and its tokens."""
        return self._result

    @result.setter
    def result(self, result: dict[str, Any] | None) -> None:
        whole = result or {}
        self._ids = {name: ids for name in _IDS if (ids := _packed(whole.get(name))) is not None}
        self._is_own_text = whole.get("text") == self.text
        apart = (*self._ids, "text") if self._is_own_text else tuple(self._ids)
        self._names = tuple(whole)
        self._result = None if result is None else {name: v for name, v in whole.items() if name not in apart}

    def whole_result(self) -> dict[str, Any] | None:
        """The result as the engine gave it."""
        if self._result is None:
            return None
        apart: dict[str, Any] = {name: ids.tolist() for name, ids in self._ids.items()}
        if self._is_own_text:
            apart["text"] = self.text
        return {name: apart[name] if name in apart else self._result[name] for name in self._names}

    @property
    def has_failed(self) -> bool:
        """Refused or broken off before a word of it came: such a turn is not part of what was said."""
        return self.result is not None and self.result.get("finish_reason") == "error" and not self.text


def _packed(ids: Any) -> array[int] | None:
    """Token ids as an array; None for what is no list of them."""
    try:
        return array("q", ids) if isinstance(ids, list) else None
    except (TypeError, OverflowError):
        return None


@dataclass(eq=False)
class Turn:
    """A question and its answer."""

    prompt: str
    request_id: str
    answer: Answer = field(default_factory=Answer)
    seed: int | None = None
    """What the answer was drawn with."""
    number: int = 0
    """Counts the questions of the chat in the order they were asked, from 1."""
    parent: Turn | None = None
    """What was said before; None at the start of the chat."""


class Conversation:
    """Turns of one session. Every request carries all messages, so the engine reuses the common prefix."""

    def __init__(self, config: RunConfig) -> None:
        self._raw = config.raw
        self._fixed_by: Callable[[str], str | None] = config.fixed_by
        self.sampling: SamplingParams = config.sampling
        self.system = config.system
        self.think = config.think
        self.reasoning_effort = config.reasoning_effort
        self.efforts: tuple[str, ...] = ()
        """The levels that the model knows, once it is loaded."""
        self.mode: Mode = config.spec.mode
        self.turns: list[Turn] = []
        self.every_turn: list[Turn] = []
        """All branches, in the order they were asked."""
        self._num_again = 0
        self._begin_session()

    def _begin_session(self) -> None:
        self.session = uuid.uuid4().hex[:12]

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """What was said so far; a stopped answer counts as what was shown of it."""
        found: list[dict[str, str]] = []
        for turn in self.turns:
            if turn.answer.has_failed:
                continue
            found.append({"role": "user", "content": turn.prompt})
            if turn.answer.text:
                found.append({"role": "assistant", "content": turn.answer.text})
        return tuple(found)

    def ask(self, prompt: str) -> Turn:
        """Begin a turn; :meth:`request` is what answers it."""
        number = self._next_number
        return self._add(Turn(prompt, f"{self.session}-{number}", number=number))

    def adopt(self, prompt: str, request_id: str) -> Turn:
        """A turn that was begun elsewhere."""
        return self._add(Turn(prompt, request_id, number=self._next_number))

    @property
    def _next_number(self) -> int:
        return self.every_turn[-1].number + 1 if self.every_turn else 1

    def _add(self, turn: Turn) -> Turn:
        turn.parent = self.turns[-1] if self.turns else None
        self.turns.append(turn)
        self.every_turn.append(turn)
        return turn

    # Branches

    def cut(self, length: int) -> None:
        """Stand after the first ``length`` questions; what follows them stays as a branch."""
        del self.turns[length:]

    def drop_last(self) -> str | None:
        """Step back before the last turn (to ask it again, or to edit it); returns its prompt."""
        return self.turns.pop().prompt if self.turns else None

    def branches(self, turn: Turn) -> list[Turn]:
        """Every turn that stands at the place of ``turn``, itself included, oldest first."""
        return [each for each in self.every_turn if each.parent is turn.parent]

    @property
    def fork_turn(self) -> Turn | None:
        """The last question of the present line that has branches beside it."""
        return next((turn for turn in reversed(self.turns) if len(self.branches(turn)) > 1), None)

    @property
    def branch_text(self) -> str:
        """Which branch of how many the chat stands on; empty when there is only one."""
        turn = self.fork_turn
        if turn is None:
            return ""
        beside = self.branches(turn)
        return f"branch {beside.index(turn) + 1} of {len(beside)}"

    def branch_at(self, number: int | None) -> Turn:
        """The turn that begins a branch, by its number, or the one after the present one. Raises UsageError."""
        turn = self.fork_turn
        beside = self.branches(turn) if turn is not None else self._roots_ahead()
        if not beside:
            raise UsageError("/branch: there is only one branch; /edit or /regen begins another")
        if number is None:
            return beside[(beside.index(turn) + 1) % len(beside)] if turn is not None else beside[-1]
        if not 1 <= number <= len(beside):
            raise UsageError(f"/branch {number} is not possible; give 1 to {len(beside)}")
        return beside[number - 1]

    def _roots_ahead(self) -> list[Turn]:
        """What follows the place where the chat stands, when it was stepped back."""
        last = self.turns[-1] if self.turns else None
        return [turn for turn in self.every_turn if turn.parent is last]

    def turn_at(self, number: int | None, command: str) -> Turn:
        """The question of that number on the present line, or the last one. Raises UsageError."""
        if not self.turns:
            raise UsageError(f"{command} needs a question: the chat is empty")
        if number is not None and not 1 <= number <= len(self.turns):
            raise UsageError(f"{command} {number} is not possible; give 1 to {len(self.turns)}")
        return self.turns[-1 if number is None else number - 1]

    def go_to(self, turn: Turn) -> None:
        """Stand at the newest end of the branch that ``turn`` begins."""
        path = [turn]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        while below := [each for each in self.every_turn if each.parent is path[-1]]:
            path.append(below[-1])
        self.turns[:] = path

    def take_over(self, every_turn: Sequence[Turn], path: Sequence[Turn], system: str | None) -> None:
        """Go on with a chat that was kept elsewhere."""
        self.clear()
        self.every_turn[:], self.turns[:] = every_turn, path
        if self._fixed_by("system") is None:
            self.system = system

    # Requests

    def request(self, turn: Turn) -> GenerateRequest:
        """The request for the newest turn, with the settings of this moment."""
        content: dict[str, Any] = {"messages": self.messages, "system": self.system, "think": self.think}
        content["reasoning_effort"] = None if self.think is False else self.reasoning_effort
        if self._raw:
            content = {"prompt": turn.prompt, "raw": True}
        return GenerateRequest(id=turn.request_id, sampling=self.sampling, session=self.session, **content)

    def request_again(self, turn: Turn) -> GenerateRequest:
        """The request of the newest turn as it was, its answer left out, under an id of its own."""
        request = self.request(turn)
        self._num_again += 1
        if self._num_again > 1:
            request = replace(request, id=f"{request.id}-again-{self._num_again}")
        if request.messages is None or not turn.answer.text:
            return request
        return replace(request, messages=request.messages[:-1])

    def turn_of(self, request_id: str | None) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.request_id == request_id), None)

    def clear(self) -> None:
        self.turns.clear()
        self.every_turn.clear()
        self._begin_session()

    # Settings

    def refuse_fixed(self, name: str, command: str) -> None:
        """Raise UsageError when a typed flag or a variable holds the option, and so wins over a session command."""
        source = self._fixed_by(name)
        if source is not None:
            kind, _, word = source.partition(" ")
            what = f"{word} was typed" if kind == "flag" else f"the variable {word} is set"
            raise UsageError(f"{command} changes nothing: {what}, which wins; start without it")

    def set_option(self, name: str, value: str) -> None:
        """Change one sampling option by its long name; raises UsageError and leaves the others as they were."""
        key = name.replace("-", "_")
        if key not in SAMPLING:
            raise UsageError(unknown("option", name, SAMPLING))
        self.refuse_fixed(key, f"/set {name}")
        cleared = value.strip().lower() == "none" and key in _MAY_BE_NONE
        parsed = None if cleared else parse(SAMPLING[key], value, f"/set {name} {value}")
        self.sampling = replace(self.sampling, **{key: parsed})

    def options(self) -> dict[str, Any]:
        """Every sampling option with its present value."""
        return {name: getattr(self.sampling, name) for name in SAMPLING}
