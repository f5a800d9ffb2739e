"""A recorded session, played back as if an engine produced it now; for ``trace replay``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, Mode
from sparkchat.trace import Trace

Event = dict[str, Any]

MOST_PAUSE_SECONDS = 1.0
"""Longer pauses, such as the user's thinking between two questions, are shortened to this."""
REFUSAL = "this is a recorded session: it can be watched and inspected, not asked; esc or ctrl+q leaves"


class RecordedEngine:
    """The face of ``EngineClient`` over a trace. ``speed`` 2 plays twice as fast; 0 gives everything at once."""

    def __init__(self, trace: Trace, speed: float = 1.0) -> None:
        self._schedule = list(_schedule(trace, speed))
        self._next = 0
        self._started = 0.0
        self._is_open = False
        self._wake = threading.Condition()

    @property
    def is_running(self) -> bool:
        return self._is_open

    def start(self) -> None:
        self._next, self._started, self._is_open = 0, time.monotonic(), True

    def poll(self, timeout: float | None = 0.0) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wake:
            while True:
                now = time.monotonic()
                found = self._due(now - self._started)
                if found or not self._is_open or (deadline is not None and now >= deadline):
                    return found
                ends = [] if deadline is None else [deadline]
                if self._next < len(self._schedule):
                    ends.append(self._started + self._schedule[self._next][0])
                self._wake.wait(max(0.0, min(ends) - now) if ends else None)

    def _due(self, elapsed: float) -> list[Event]:
        first = self._next
        while self._next < len(self._schedule) and self._schedule[self._next][0] <= elapsed:
            self._next += 1
        return [event for _, event in self._schedule[first : self._next]]

    def generate(self, request: GenerateRequest) -> None:
        raise UsageError(REFUSAL)

    def set_mode(self, mode: Mode) -> None:
        raise UsageError(REFUSAL)

    def cancel(self, request_id: str) -> None:
        """Nothing runs that could be stopped."""

    def close(self) -> None:
        with self._wake:
            self._is_open = False
            self._wake.notify_all()


def _schedule(trace: Trace, speed: float) -> Iterator[tuple[float, Event]]:
    """(seconds after the start, event) of the whole session."""
    yield 0.0, {"event": "ready", "info": _info(trace)}
    at, last_ns = 0.0, None
    for line in trace.lines:
        data = dict(line.data)
        t_ns = data.get("t_ns")
        if t_ns is not None and last_ns is not None and speed > 0:
            at += min(max(t_ns - last_ns, 0) / 1e9 / speed, MOST_PAUSE_SECONDS)
        last_ns = t_ns if t_ns is not None else last_ns
        for event in _events(data, trace):
            yield at, event
    yield at, {"event": "recording_end"}


def _info(trace: Trace) -> dict[str, Any]:
    """The engine's INFO as the header recorded it."""
    header = dict(trace.header or {})
    damage = [f"{len(trace.damaged)} damaged lines of the trace are left out"] if trace.damaged else []
    return {**header, "notices": damage, "mode": header.get("mode", "off"), "drafter": header.get("drafter")}


def _events(data: dict[str, Any], trace: Trace) -> Iterator[Event]:
    """The engine events that one trace line was made from."""
    kind, request_id = data.pop("type"), data.get("id")
    for delta in data.pop("deltas", ()):
        yield {"event": "delta", "id": request_id, **delta}
    if kind == "turn":
        yield {**data, "event": "start", "prompt_token_ids": data.get("prompt_token_ids") or []}
    elif kind in ("step", "mode_change"):
        yield {**data, "event": kind}
    elif kind == "end":
        header = trace.header or {}
        result = {"model": header.get("model"), "drafter": header.get("drafter"), "prompt_token_ids": [], **data}
        yield {"event": "end", "id": request_id, "result": result, "thinking": data.get("thinking", "")}
    elif kind == "error":
        yield {"event": "notice", "id": request_id, "message": f"recorded error: {data.get('message', '')}"}
