"""Between the engine pipe and the screen: a thread that drains the pipe and hands on a few small updates a second.

The engine must never wait for the terminal, and the screen must never wait for the pipe. The thread parses events,
records them, keeps the running numbers, and folds everything that came within one interval into one ``Batch``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkchat.errors import EngineCrash
from sparkchat.params import GenerateRequest, Mode
from sparkchat.ui.stats import AnswerStats, Snapshot
from sparkchat.ui.token_text import TextRun, TokenText
from sparkchat.ui.trace_sink import TraceSink

Event = dict[str, Any]

UPDATE_SECONDS = 1 / 12
_IDLE_SECONDS = 0.1


class Engine(Protocol):
    """What a front end needs of :class:`sparkchat.client.EngineClient`; the scripted engine has the same face."""

    @property
    def is_running(self) -> bool: ...
    def start(self) -> None: ...
    def poll(self, timeout: float | None = 0.0) -> list[Event]: ...
    def generate(self, request: GenerateRequest) -> None: ...
    def set_mode(self, mode: Mode) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TextUpdate:
    """New text of one answer; neighbouring runs of one channel are joined."""

    id: str
    channel: str
    runs: tuple[TextRun, ...]


@dataclass
class Batch:
    """Everything that happened since the last one, in order; steps are folded into the numbers."""

    items: list[TextUpdate | Event] = field(default_factory=list)
    stats: dict[str, Snapshot] = field(default_factory=dict)
    """Request id -> its numbers, for requests that made progress."""
    steps: list[tuple[Event, str | None]] = field(default_factory=list)
    """Every step, with the text of the token that the target added."""

    def __bool__(self) -> bool:
        return bool(self.items or self.stats)


class Bridge:
    """Owns the engine. ``deliver`` is called from the thread, at most once every ``interval`` seconds."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        deliver: Callable[[Batch], None],
        trace: TraceSink,
        interval: float = UPDATE_SECONDS,
    ) -> None:
        self._make_engine = make_engine
        self._deliver = deliver
        self._trace = trace
        self._interval = interval
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._folder = _Folder()
        self._end_came = threading.Condition()
        self._ended: set[str] = set()

    def start(self) -> None:
        """Start the engine and the thread; loading progress arrives as events."""
        self._stopping.clear()
        self._folder = _Folder()
        self._engine = self._make_engine()
        self._engine.start()
        self._thread = threading.Thread(target=self._drain, name="engine-events", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        self.close()
        self.start()

    def generate(self, request: GenerateRequest) -> None:
        self._require().generate(request)

    def set_mode(self, mode: Mode) -> None:
        self._require().set_mode(mode)

    def change(self, request_id: str, sampling: dict[str, Any] | None = None, think: bool | None = None) -> bool:
        """Other settings for a running answer; False when this engine settles them at its start."""
        change = getattr(self._require(), "change", None)
        if change is None:
            return False
        change(request_id, sampling, think)
        return True

    def cancel(self, request_id: str) -> None:
        self._require().cancel(request_id)

    def stop_answer(self, request_id: str, seconds: float) -> None:
        """Cancel an answer and wait until its end has been recorded, or for ``seconds``."""
        with self._end_came:
            try:
                self._require().cancel(request_id)
            except EngineCrash:
                return
            self._end_came.wait_for(lambda: request_id in self._ended, seconds)

    def close(self) -> None:
        """Stop the thread, then the engine."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _require(self) -> Engine:
        if self._engine is None:
            raise EngineCrash("the engine is not running; send the message again to start it")
        return self._engine

    def _drain(self) -> None:
        engine, folder = self._require(), self._folder
        last = 0.0
        while not self._stopping.is_set():
            wait = max(0.0, last + self._interval - time.monotonic()) if folder.has_news else _IDLE_SECONDS
            try:
                events = engine.poll(wait)
            except (OSError, ValueError) as error:
                # A pipe that cannot be read any more is the end of this engine, like its death.
                self._take({"event": "crashed", "message": f"the engine's pipe broke: {error}"})
                break
            for event in events:
                self._take(event)
            if folder.has_news and time.monotonic() >= last + self._interval:
                last = time.monotonic()
                self._hand_on(folder.take())
            if not events and not engine.is_running:
                break
        self._hand_on(folder.take(everything=True))

    def _hand_on(self, batch: Batch) -> None:
        if batch:
            self._deliver(batch)

    def _take(self, event: Event) -> None:
        problem = self._trace.event(event)
        self._folder.add(event)
        if problem:
            self._folder.add({"event": "notice", "id": None, "message": problem})
        if event.get("event") == "end":
            with self._end_came:
                self._ended.add(event["id"])
                self._end_came.notify_all()


class _Folder:
    """Folds events into a batch."""

    def __init__(self) -> None:
        self._items: list[TextUpdate | Event] = []
        self._stats: dict[str, AnswerStats] = {}
        self._moved: set[str] = set()
        self._texts: dict[str, TokenText] = {}
        self._steps: list[tuple[Event, str | None]] = []

    @property
    def has_news(self) -> bool:
        return bool(self._items or self._moved or any(text.is_waiting for text in self._texts.values()))

    def add(self, event: Event) -> None:
        kind, request_id = event.get("event"), event.get("id")
        if kind == "start":
            self._stats[request_id] = AnswerStats()
            self._texts[request_id] = TokenText()
        if kind == "delta" and request_id in self._texts:
            self._stats[request_id].add_tokens(len(event.get("token_ids") or ()))
            self._moved.add(request_id)
            self._add_runs(request_id, self._texts[request_id].add_delta(event))
        elif kind == "step" and request_id in self._texts:
            self._stats[request_id].add_step(event)
            self._moved.add(request_id)
            self._add_runs(request_id, self._texts[request_id].add_step(event))
            self._steps.append((event, self._texts[request_id].bonus_text))
        elif kind == "figures" and request_id in self._stats:
            self._stats[request_id].add_figures(event)
            self._moved.add(request_id)
        elif kind not in ("delta", "step", "figures"):
            if kind == "end" and request_id in self._texts:
                self._add_runs(request_id, self._texts[request_id].flush())
            self._items.append(event)

    def take(self, everything: bool = False) -> Batch:
        """What has come so far. Text that still waits for its step waits for one interval at most."""
        for request_id, text in self._texts.items():
            if everything or text.has_waited():
                self._add_runs(request_id, text.flush())
        batch = Batch(self._items, {key: self._snapshot(key) for key in self._moved}, self._steps)
        self._items, self._moved, self._steps = [], set(), []
        for item in batch.items:
            if isinstance(item, dict) and item.get("event") == "end":
                self._stats.pop(item.get("id"), None)
                self._texts.pop(item.get("id"), None)
        return batch

    def _snapshot(self, request_id: str) -> Snapshot:
        return self._stats[request_id].snapshot(self._texts[request_id].bonus_text)

    def _add_runs(self, request_id: str, found: Sequence[tuple[str, TextRun]]) -> None:
        for channel, run in found:
            last = self._items[-1] if self._items else None
            if isinstance(last, TextUpdate) and (last.id, last.channel) == (request_id, channel):
                self._items[-1] = TextUpdate(request_id, channel, _joined(last.runs, run))
            else:
                self._items.append(TextUpdate(request_id, channel, (run,)))


def _joined(runs: tuple[TextRun, ...], run: TextRun) -> tuple[TextRun, ...]:
    if runs and runs[-1][1:] == run[1:]:
        return (*runs[:-1], runs[-1]._replace(text=runs[-1].text + run.text))
    return (*runs, run)
