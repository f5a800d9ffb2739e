"""The state of a chat: messages, settings, and the request that each new turn becomes. No terminal, no engine."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.options import SAMPLING, parse, unknown
from sparkchat.params import GenerateRequest, Mode, SamplingParams

_MAY_BE_NONE = ("max_tokens", "seed")


@dataclass
class Answer:
    """One answer as it was received."""

    text: str = ""
    thinking: str = ""
    result: dict[str, Any] | None = None
    """The ``sparkchat.result/1`` object once the answer has ended."""
    was_stopped: bool = False

    @property
    def has_failed(self) -> bool:
        """Refused or broken off before a word of it came: such a turn is not part of what was said."""
        return self.result is not None and self.result.get("finish_reason") == "error" and not self.text


@dataclass
class Turn:
    """A question and its answer."""

    prompt: str
    request_id: str
    answer: Answer = field(default_factory=Answer)
    seed: int | None = None
    """What the answer was drawn with."""


class Conversation:
    """Turns of one session. Every request carries all messages, so the engine reuses the common prefix."""

    def __init__(self, config: RunConfig) -> None:
        self._raw = config.raw
        self.sampling: SamplingParams = config.sampling
        self.system = config.system
        self.think = config.think
        self.mode: Mode = config.spec.mode
        self.turns: list[Turn] = []
        self._begin_session()

    def _begin_session(self) -> None:
        self.session = uuid.uuid4().hex[:12]
        self._num_requests = 0

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
        self._num_requests += 1
        turn = Turn(prompt, f"{self.session}-{self._num_requests}")
        self.turns.append(turn)
        return turn

    def adopt(self, prompt: str, request_id: str) -> Turn:
        """A turn that was begun elsewhere."""
        turn = Turn(prompt, request_id)
        self.turns.append(turn)
        return turn

    def request(self, turn: Turn) -> GenerateRequest:
        """The request for the newest turn, with the settings of this moment."""
        content: dict[str, Any] = {"messages": self.messages, "system": self.system, "think": self.think}
        if self._raw:
            content = {"prompt": turn.prompt, "raw": True}
        return GenerateRequest(id=turn.request_id, sampling=self.sampling, session=self.session, **content)

    def request_again(self, turn: Turn) -> GenerateRequest:
        """The request of the newest turn as it was, its answer left out."""
        request = self.request(turn)
        if request.messages is None or not turn.answer.text:
            return request
        return replace(request, messages=request.messages[:-1])

    def turn_of(self, request_id: str | None) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.request_id == request_id), None)

    def drop_last(self) -> str | None:
        """Take the last turn away (to ask it again, or to edit it); returns its prompt."""
        return self.turns.pop().prompt if self.turns else None

    def clear(self) -> None:
        self.turns.clear()
        self._begin_session()

    def set_option(self, name: str, value: str) -> None:
        """Change one sampling option by its long name; raises UsageError and leaves the others as they were."""
        key = name.replace("-", "_")
        if key not in SAMPLING:
            raise UsageError(unknown("option", name, SAMPLING))
        cleared = value.strip().lower() == "none" and key in _MAY_BE_NONE
        parsed = None if cleared else parse(SAMPLING[key], value, f"/set {name} {value}")
        self.sampling = replace(self.sampling, **{key: parsed})

    def options(self) -> dict[str, Any]:
        """Every sampling option with its present value."""
        return {name: getattr(self.sampling, name) for name in SAMPLING}
