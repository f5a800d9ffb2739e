"""Loading the engine and getting one answer out of it, for the front ends that have no screen."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from sparkchat.errors import EngineCrash, Interrupted, Terminated, error_from_name
from sparkchat.params import GenerateRequest
from sparkchat.ui.bridge import Engine, Event
from sparkchat.ui.partial import PartialAnswer
from sparkchat.ui.terminal import EXIT_CODES
from sparkchat.ui.trace_sink import TraceSink

_POLL_SECONDS = 0.1
_CANCEL_SECONDS = 2.0
"""How long a stopped answer may take to say that it has ended."""
_NAMES = {code: number.name for number, code in EXIT_CODES.items()}


class Signals:
    """Context: while an answer runs, signals are only noted; in between they interrupt what is going on.

    ``exit_code`` is that of the newest signal, or None. With ``patience``, a noted one is raised all the same after so
    many seconds, or when another comes: an output that nobody reads would hold the program for ever. What the caller
    had ignored (nohup) stays ignored.
    """

    def __init__(self, patience: float | None = None) -> None:
        self.exit_code: int | None = None
        self.count = 0
        self.is_noting = False
        self._patience = patience
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in EXIT_CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        if self._patience is not None:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: self.raise_noted())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_timer()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop_timer(self) -> None:
        if self._patience is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def forget(self) -> None:
        self.exit_code, self.count = None, 0

    def raise_noted(self) -> None:
        """What the newest signal, if any came, would have done at once."""
        self._stop_timer()
        if self.exit_code == Interrupted.exit_code:
            raise KeyboardInterrupt
        if self.exit_code is not None:
            raise _terminated(f"ended by {_NAMES[self.exit_code]}", self.exit_code)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        self.count += 1
        if not self.is_noting or (self._patience is not None and self.count > 1):
            self.raise_noted()
        elif self._patience is not None:
            signal.setitimer(signal.ITIMER_REAL, self._patience)


def _terminated(message: str, exit_code: int) -> Terminated:
    """With the code of the very signal: 143 for SIGTERM, 129 for SIGHUP."""
    error = Terminated(message)
    error.exit_code = exit_code
    return error


class Answerer:
    """One engine, its trace, and the signals that stop what it does."""

    def __init__(self, engine: Engine, trace: TraceSink, signals: Signals, notice: Callable[[str], None]) -> None:
        self._engine = engine
        self._trace = trace
        self._signals = signals
        self._notice = notice
        self.info: dict[str, Any] = {}

    def load(self, progress: Callable[[Event], None]) -> dict[str, Any]:
        """Start the engine; returns its INFO. Raises the engine's own error, EngineCrash, or on a signal."""
        self._signals.is_noting = True
        self._signals.forget()
        try:
            self._engine.start()
            for event in self._events():
                if event is None:
                    self._signals.raise_noted()
                elif event["event"] == "ready":
                    self.info = event["info"]
                    return self.info
                elif event["event"] == "loading":
                    progress(event)
        finally:
            self._signals.is_noting = False
        raise EngineCrash("the engine ended while loading; run it again with --debug")

    def answer(self, request: GenerateRequest, take: Callable[[Event], None]) -> Event:
        """Play one answer through ``take``; returns its ``end`` event, made here when the engine gave none.

        A signal stops the answer; what came of it is kept and ``signals.exit_code`` says which it was. A crash
        raises EngineCrash with the partial result as its ``result``.
        """
        signals, partial = self._signals, PartialAnswer(self.info)
        signals.is_noting = True
        signals.forget()
        deadline: float | None = None
        try:
            self._engine.generate(request)
            for event in self._events():
                if event is not None and event.get("id") == request.id:
                    partial.add(event)
                    take(event)
                    if event["event"] == "end":
                        return event
                if signals.count and deadline is None:
                    deadline = time.monotonic() + _CANCEL_SECONDS
                    self._engine.cancel(request.id)
                if deadline is not None and (time.monotonic() > deadline or signals.count > 1):
                    return self._ended_here(request, partial, take)
        except EngineCrash as crash:
            crash.result = partial.result("error", str(crash))  # type: ignore[attr-defined]
            raise
        finally:
            signals.is_noting = False
        raise EngineCrash("the engine ended in the middle of the answer")

    def _ended_here(self, request: GenerateRequest, partial: PartialAnswer, take: Callable[[Event], None]) -> Event:
        end = {"event": "end", "id": request.id, "result": partial.result("cancelled"), "thinking": partial.thinking}
        self._record(end)
        take(end)
        return end

    def _events(self) -> Iterator[Event | None]:
        """Events as they come, None now and then in between. Raises what ends the engine."""
        while True:
            events = self._engine.poll(_POLL_SECONDS)
            for event in events:
                self._record(event)
                kind = event["event"]
                if kind == "crashed":
                    raise EngineCrash(event.get("message") or "the engine process ended")
                if kind == "error":
                    raise error_from_name(event.get("error", ""), event.get("message", ""))
                if kind == "info":
                    self.info = event["info"]
                if kind == "notice":
                    self._notice(event.get("message", ""))
                yield event
            if not events and not self._engine.is_running:
                return
            yield None

    def _record(self, event: Event) -> None:
        problem = self._trace.event(event)
        if problem:
            self._notice(problem)
