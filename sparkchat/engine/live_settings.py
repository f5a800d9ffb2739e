"""Settings of an answer that change while it runs: they hold from the next step on.

Each step draws and verifies with the settings that stand when it begins, on both sides, so every token still has
exactly the law of the settings of its step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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


class LiveSettings:
    """Changes to running requests, and what has to be undone when they have done their work."""

    def __init__(self) -> None:
        self._ending: dict[str, tuple[RequestState, tuple[tuple[int, float], ...], Mode | None]] = {}

    def change_sampling(self, state: RequestState, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The ``setting_change`` event; None when nothing is different. Raises UsageError for what cannot change."""
        for name in values:
            if name not in LIVE:
                raise UsageError(f"{name} cannot change during an answer; it holds from the next one on")
        before = state.sampling
        bias = values.get("logit_bias")
        if bias is not None:
            values = {**values, "logit_bias": tuple((int(i), float(b)) for i, b in bias)}
        state.request = state.request.with_sampling(**values)
        changes = {
            name: {"from": getattr(before, name), "to": getattr(state.sampling, name)}
            for name in values
            if getattr(before, name) != getattr(state.sampling, name)
        }
        return _event(state, changes) if changes else None

    def end_thinking(self, state: RequestState, close_id: int | None) -> dict[str, Any]:
        """The next token closes the thinking block. Raises UsageError when there is none to close."""
        if close_id is None or state.output.channel != "thinking":
            raise UsageError("the answer is not thinking now; the think level holds from the next answer on")
        if state.id not in self._ending:
            bias = state.sampling.logit_bias
            self._ending[state.id] = (state, bias, state.mode_override)
            # A plain step: drafts behind the tag would be judged under the same bias.
            state.mode_override = "off"
            others = tuple(pair for pair in bias if pair[0] != close_id)
            state.request = state.request.with_sampling(logit_bias=(*others, (close_id, FORCE)))
        return _event(state, {"think": {"from": True, "to": False}})

    def settle(self) -> None:
        """Undo what has done its work; called after every step."""
        for request_id, (state, bias, mode) in list(self._ending.items()):
            if state.is_finished or state.output.channel != "thinking":
                state.request = state.request.with_sampling(logit_bias=bias)
                state.mode_override = mode
                del self._ending[request_id]


def _event(state: RequestState, changes: dict[str, Any]) -> dict[str, Any]:
    return {"event": "setting_change", "id": state.id, "changes": changes, "t_ns": time.monotonic_ns()}
