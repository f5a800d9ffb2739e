"""How a fetch shows itself: a moving bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkchat.cli.output import note
from sparkchat.store import Progress, human

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def fetch_progress() -> Iterator[Progress]:
    """The kind of progress that fits stderr."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield LineProgress()
        return
    bar = BarProgress()
    try:
        yield bar
    finally:
        bar.close()


class LineProgress:
    """Plain lines: one at the start of a file, then one every few seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._last = 0.0

    def say(self, message: str) -> None:
        note(message)

    def update(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what == self._what and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        of = f" of {human(total)}" if total else ""
        note(f"fetching {what}: {human(done)}{of}")
        self._what, self._last = what, now


class BarProgress:
    """A rich progress bar that is imported and drawn only once there is something to show."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, message: str) -> None:
        if self._rich is None:
            note(message)
        else:
            self._rich.console.print(message, markup=False, highlight=False)

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
