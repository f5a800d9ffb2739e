"""How a fetch shows itself: a moving bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkchat.cli.output import note, printable
from sparkchat.store import Progress, human

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 5.0
_RATE_SECONDS = 10.0
"""The rate is that of so many last seconds."""

STALL_SECONDS = 5.0
"""Silence that is worth a word."""


@contextmanager
def fetch_progress() -> Iterator[Progress]:
    """The kind of progress that fits stderr."""
    progress: LineProgress | BarProgress = BarProgress() if can_draw() else LineProgress()
    watch = _StallWatch(progress)
    try:
        yield watch
    finally:
        watch.close()
        progress.close()


def can_draw() -> bool:
    """Whether stderr can show a line that changes."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Meter:
    """Bytes and times of one transfer: how fast it is, and how long it will take."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, done: int) -> None:
        if self._seen and done < self._seen[-1][1]:
            # A file was begun afresh.
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _RATE_SECONDS:
            self._seen.popleft()

    def rate(self) -> float | None:
        """Bytes a second; None before anything is known."""
        if not self._seen:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def seconds_left(self, total: int | None) -> float | None:
        rate = self.rate()
        return None if rate is None or total is None else max(0, total - self._seen[-1][1]) / rate


def describe_transfer(what: str, done: int, total: int | None, meter: Meter) -> str:
    """e.g. ``fetching hf:org/model: 1.2 GB of 16.4 GB, 48.0 MB/s, 5 min left``"""
    text = f"fetching {what}: {human(done)}" + (f" of {human(total)}" if total else "")
    rate, left = meter.rate(), meter.seconds_left(total)
    if rate is not None:
        text += f", {human(int(rate))}/s"
    return text if left is None or total == done else f"{text}, {in_words(left)} left"


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class _StallWatch:
    """Hands everything on, and says so when a transfer brings nothing for a while."""

    def __init__(self, inner: LineProgress | BarProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._clock = inner, clock
        self._last: float | None = None
        self._what, self._is_told = "", False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, message: str) -> None:
        self._inner.say(message)

    def update(self, what: str, done: int, total: int | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._what, self._is_told = what, False
        # Behind the last byte there is nothing to wait for.
        self._last = None if total is not None and done >= total else self._clock()
        self._inner.update(what, done, total)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Say once that nothing has come for a while."""
        last = self._last
        if last is None or self._is_told or self._clock() - last < STALL_SECONDS:
            return
        self._is_told = True
        self._inner.say(
            f"nothing has come of {self._what} for {STALL_SECONDS:.0f} s; still waiting, "
            "and what has come is kept should you stop here"
        )

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            self.look()


class LineProgress:
    """Plain lines: one at the start of a file, then one every few seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._last = 0.0
        self._meter = Meter()

    def say(self, message: str) -> None:
        note(message)

    def update(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what != self._what:
            self._meter = Meter()
        self._meter.add(now, done)
        if what == self._what and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        note(describe_transfer(what, done, total, self._meter))
        self._what, self._last = what, now

    def close(self) -> None:
        return


class BarProgress:
    """A rich progress bar that is imported and drawn only once there is something to show."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, message: str) -> None:
        if self._rich is None:
            note(message)
        else:
            self._rich.console.print(printable(message), markup=False, highlight=False)

    def update(self, what: str, done: int, total: int | None) -> None:
        if self._rich is None:
            self._rich = _start_bar()
        if what not in self._tasks:
            self._tasks[what] = self._rich.add_task(what, total=total)
        self._rich.update(self._tasks[what], completed=done, total=total)

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()


def _start_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    # markup=False: a repository's name is not ours to interpret.
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar
