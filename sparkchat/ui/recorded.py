"""A recorded session, played back as if an engine produced it now; for ``trace replay``.

A recording is an index of the file, a few bytes a line; lines are read again when they are played.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkchat.errors import UsageError
from sparkchat.params import MODES, GenerateRequest, Mode
from sparkchat.trace.reader import Damage, DamagedLine, TraceLine, line_at, located_lines, opened
from sparkchat.trace.schema import LINE_TYPES

Event = dict[str, Any]

MOST_PAUSE_SECONDS = 1.0
"""A longer pause between two answers, such as the user's thinking, is shortened to this."""
MOST_WAIT_SECONDS = 60.0
"""No wait for the next step is longer, whatever the file says."""
MOST_REDRAWN_STEPS = 3000
"""Going back draws this much of the session again at the least, and of longer ones not all."""
_MOST_LINES_AT_ONCE = 500
REFUSAL = "this is a recorded session: it can be watched and inspected, not asked; esc or ctrl+q leaves"


class Recording:
    """Where every line of a trace lies and when it was written. Raises as ``read_lines`` does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header: Mapping[str, Any] = {}
        self.damage = Damage()
        self._offsets, self._numbers, self._seconds = array("Q"), array("Q"), array("d")
        self._steps, self._turns = array("Q"), array("Q")
        """Indices of the step lines and of the turn lines."""
        with opened(self.path, again=True) as file:
            self._index(located_lines(self.path, file))

    def _index(self, lines: Iterator[tuple[int, TraceLine | DamagedLine]]) -> None:
        at, last_ns = 0.0, None
        for offset, line in lines:
            if isinstance(line, DamagedLine):
                self.damage.add(line)
                continue
            if line.type not in LINE_TYPES:
                continue
            if line.type == "header":
                self.header = self.header or line.data
                continue
            t_ns = line.data.get("t_ns")
            if t_ns is not None:
                most = MOST_PAUSE_SECONDS if line.type == "turn" else MOST_WAIT_SECONDS
                at += 0.0 if last_ns is None else min(max(t_ns - last_ns, 0) / 1e9, most)
                last_ns = t_ns
            if line.type in ("step", "turn"):
                (self._steps if line.type == "step" else self._turns).append(len(self._offsets))
            self._offsets.append(offset)
            self._numbers.append(line.number)
            self._seconds.append(at)

    def __len__(self) -> int:
        """Lines that are played."""
        return len(self._offsets)

    @property
    def mode(self) -> Mode:
        """The verify mode that the session began with; off when the file does not say."""
        return next((mode for mode in MODES if mode == self.header.get("mode")), "off")

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def seconds(self) -> float:
        """From the first line to the last, with the pauses shortened."""
        return self._seconds[-1] if self._seconds else 0.0

    def at(self, index: int) -> float:
        """When line ``index`` is played, in seconds from the first."""
        return self._seconds[index]

    def steps_before(self, index: int) -> int:
        """How many of the lines before ``index`` are steps."""
        return bisect_left(self._steps, index)

    def after_step(self, number: int) -> int:
        """The index behind step ``number`` (from 1); behind the whole session when it has fewer."""
        if number <= 0:
            return 0
        return self._steps[number - 1] + 1 if number <= self.num_steps else len(self)

    def first_redrawn(self, index: int) -> int:
        """The line to begin with so that the session up to ``index`` is drawn again in a bounded time."""
        steps = self.steps_before(index) - MOST_REDRAWN_STEPS
        if steps <= 0:
            return 0
        turn = bisect_right(self._turns, self._steps[steps]) - 1
        return self._turns[turn] if turn >= 0 else 0

    def events(self, first: int, end: int) -> Iterator[Event]:
        """The engine events that the lines from ``first`` to before ``end`` were made from."""
        with opened(self.path) as file:
            for index in range(first, end):
                yield from _events(line_at(self.path, file, self._offsets[index], self._numbers[index]), self.header)

    def ready(self) -> Event:
        """The event of an engine that is ready, as the header recorded it."""
        number = self.damage.num_lines
        notices = [f"{number} damaged lines of the trace are left out"] if number else []
        return {"event": "ready", "info": {"drafter": None, **self.header, "mode": self.mode, "notices": notices}}


class RecordedEngine:
    """The face of ``EngineClient`` over a recording.

    ``speed`` 2 plays twice as fast; 0 gives everything at once. Lines before ``position`` are given at once. The
    methods that steer it may be called from another thread than ``poll``.
    """

    def __init__(self, recording: Recording, speed: float = 1.0, *, position: int = 0, is_paused: bool = False) -> None:
        self.recording = recording
        self._speed = speed
        self._is_paused = is_paused
        self._first = recording.first_redrawn(position)
        self._next = self._first
        self._asked = position
        """Lines before this one are given without waiting for their time."""
        self._played = 0.0
        """Seconds of the recording that had been played when the clock was last set."""
        self._set_at = 0.0
        self._has_begun = self._has_ended = self._is_open = False
        self._wake = threading.Condition()

    @property
    def is_running(self) -> bool:
        return self._is_open

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def speed(self) -> float:
        return self._speed

    @property
    def steps_given(self) -> int:
        return self.recording.steps_before(max(self._next, self._asked))

    def start(self) -> None:
        self._is_open = True
        self._set_clock(self._time_before(self._asked))

    def poll(self, timeout: float | None = 0.0) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wake:
            while True:
                found = self._due()
                now = time.monotonic()
                if found or not self._is_open or (deadline is not None and now >= deadline):
                    return found
                ends = [each for each in (deadline, self._next_time()) if each is not None]
                self._wake.wait(max(0.0, min(ends) - now) if ends else None)

    # Steering

    def pause(self) -> None:
        with self._wake:
            self._set_clock(self._elapsed())
            self._is_paused = True

    def play(self) -> None:
        with self._wake:
            if self._is_paused:
                self._is_paused = False
                self._set_clock(self._played)
                self._wake.notify_all()

    def set_speed(self, speed: float) -> None:
        with self._wake:
            self._set_clock(self._elapsed())
            self._speed = speed
            self._wake.notify_all()

    def step(self) -> None:
        """Give the next step now, then wait."""
        with self._wake:
            self._is_paused = True
            given = max(self._next, self._asked)
            self._asked = self.recording.after_step(self.recording.steps_before(given) + 1)
            self._set_clock(self._time_before(self._asked))
            self._wake.notify_all()

    # EngineClient's face

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

    # The clock, in seconds of the recording

    def _set_clock(self, seconds: float) -> None:
        self._played, self._set_at = seconds, time.monotonic()

    def _elapsed(self) -> float:
        return self._played if self._is_paused else self._played + (time.monotonic() - self._set_at) * self._speed

    def _time_before(self, index: int) -> float:
        return self.recording.at(index - 1) if index else 0.0

    def _next_time(self) -> float | None:
        """When the next line is due, on the machine's clock."""
        if self._is_paused or self._speed <= 0 or self._next >= len(self.recording):
            return None
        return self._set_at + (self.recording.at(self._next) - self._played) / self._speed

    def _due(self) -> list[Event]:
        found: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            found.append(self.recording.ready())
            if self._first:
                steps = self.recording.steps_before(self._first)
                found.append(_notice(f"the first {steps} steps are not drawn again; home plays from the start"))
        end = self._end_of_due()
        found += self.recording.events(self._next, end)
        self._next = end
        if end >= len(self.recording) and not self._has_ended:
            self._has_ended = True
            found.append({"event": "recording_end"})
        return found

    def _end_of_due(self) -> int:
        """The index before which every line is to be given now."""
        recording, end = self.recording, self._next
        most = min(len(recording), end + _MOST_LINES_AT_ONCE)
        if not self._is_paused and self._speed <= 0:
            return most
        elapsed = self._elapsed()
        while end < most and (end < self._asked or (not self._is_paused and recording.at(end) <= elapsed)):
            end += 1
        return end


def _notice(message: str) -> Event:
    return {"event": "notice", "id": None, "message": message}


def _events(line: TraceLine, header: Mapping[str, Any]) -> Iterator[Event]:
    data = dict(line.data)
    kind, number = data.pop("type"), data.get("turn")
    # The recorded id may be used twice, or be no text; the number of the answer is neither.
    data["id"] = request_id = None if number is None else f"turn {number}"
    for delta in data.pop("deltas", None) or ():
        yield {"event": "delta", **delta, "id": request_id}
    if kind == "turn":
        yield {**data, "event": "start", "prompt_token_ids": data.get("prompt_token_ids") or []}
    elif kind in ("step", "mode_change"):
        yield {**data, "event": kind}
    elif kind == "end":
        result = {"model": header.get("model"), "drafter": header.get("drafter"), "prompt_token_ids": [], **data}
        yield {"event": "end", "id": request_id, "result": result, "thinking": data.get("thinking") or ""}
    elif kind == "error":
        yield {**_notice(f"recorded error: {data['message']}"), "id": request_id}
