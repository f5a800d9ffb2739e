"""Settings of an answer that change while it runs: they hold from the next step on.

Each step draws and verifies with the settings that stand when it begins, on both sides, so every token still has
exactly the law of the settings of its step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkchat.engine.request import RequestState
from sparkchat.errors import UsageError
from sparkchat.params import Mode

LIVE = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
)
"""The options that shape the law; the others (seed, limits, stops) are settled when an answer begins."""
FORCE = 1e4
"""Added to a logit, this leaves no chance to any other token."""


Bias = tuple[tuple[int, float], ...]


@dataclass
class _Ending:
    """A request whose thinking the next token ends, and what holds again behind that."""

    state: RequestState
    close_id: int
    bias: Bias
    mode: Mode | None

    def force(self) -> None:
        others = tuple(pair for pair in self.bias if pair[0] != self.close_id)
        self.state.request = self.state.request.with_sampling(logit_bias=(*others, (self.close_id, FORCE)))

    def undo(self) -> None:
        self.state.request = self.state.request.with_sampling(logit_bias=self.bias)


class LiveSettings:
    """Changes to running requests, and what has to be undone when they have done their work."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ending: dict[str, _Ending] = {}

    def change_sampling(self, state: RequestState, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The ``setting_change`` event; None when nothing is different. Raises UsageError for what cannot change."""
        for name in values:
            if name not in LIVE:
                raise UsageError(f"{name} cannot change during an answer; it holds from the next one on")
        if "logit_bias" in values:
            values = {**values, "logit_bias": self._bias_of(values["logit_bias"])}
        changed = state.request.with_sampling(**values)  # or a setting is refused, and nothing has changed
        ending = self._ending.get(state.id)
        if ending is not None:
            ending.undo()
        before = state.sampling
        state.request = changed if ending is None else state.request.with_sampling(**values)
        changes = {
            name: {"from": getattr(before, name), "to": getattr(state.sampling, name)}
            for name in values
            if getattr(before, name) != getattr(state.sampling, name)
        }
        if ending is not None:
            ending.bias = state.sampling.logit_bias
            ending.force()
        return _event(state, changes) if changes else None

    def _bias_of(self, given: Any) -> Bias:
        """Checked as when an answer begins: a token that there is none of would end the running one."""
        try:
            bias = tuple((int(token_id), float(value)) for token_id, value in given)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"logit_bias {given!r} is not possible; give pairs of a token id and a number") from None
        outside = next((token_id for token_id, _ in bias if token_id >= self._vocab_size), None)
        if outside is not None:
            raise UsageError(
                f"logit_bias id {outside} is not a token of this model; give ids from 0 to {self._vocab_size - 1}"
            )
        return bias

    def end_thinking(self, state: RequestState, close_id: int | None) -> dict[str, Any]:
        """The next token closes the thinking block. Raises UsageError when there is none to close."""
        if close_id is None or state.output.channel != "thinking":
            raise UsageError("the answer is not thinking now; the think level holds from the next answer on")
        if state.id not in self._ending:
            ending = _Ending(state, close_id, state.sampling.logit_bias, state.mode_override)
            self._ending[state.id] = ending
            # A plain step: drafts behind the tag would be judged under the same bias.
            state.mode_override = "off"
            ending.force()
        return _event(state, {"think": {"from": True, "to": False}})

    def settle(self) -> None:
        """Undo what has done its work; called after every step."""
        for request_id, ending in list(self._ending.items()):
            if ending.state.is_finished or ending.state.output.channel != "thinking":
                ending.undo()
                ending.state.mode_override = ending.mode
                del self._ending[request_id]


def _event(state: RequestState, changes: dict[str, Any]) -> dict[str, Any]:
    return {"event": "setting_change", "id": state.id, "changes": changes, "t_ns": time.monotonic_ns()}
