"""How a bench shows how far it is: one changing line on a terminal, lines elsewhere; always on stderr.

Nothing is drawn while a round is timed: what draws would take a core from what is measured. And where stderr takes
nothing any more, the measuring goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from sparkchat.bench.arms import Arm
from sparkchat.bench.measuring import Tally
from sparkchat.bench.sheet import Sheet
from sparkchat.cli.output import note, printable
from sparkchat.cli.progress import can_draw, in_words

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 5.0
_ROUNDS = "rounds"


class Shown(Protocol):
    """Where progress goes."""

    def say(self, text: str) -> None:
        """A sentence that stays."""
        ...

    def pass_by(self, stage: str, text: str) -> None:
        """How far a stage is, until the next word of it."""
        ...

    def row(self, text: str) -> None:
        """Something has been measured."""
        ...

    def close(self) -> None: ...


@contextmanager
def bench_progress(is_verbose: bool = False) -> Iterator[BenchProgress]:
    """The kind of progress that fits stderr; ``is_verbose``: a line for each round."""
    shown: Shown = _ChangingLine() if can_draw() and not is_verbose else _Lines(is_verbose)
    try:
        yield BenchProgress(shown)
    finally:
        shown.close()


class BenchProgress:
    """Puts into words what is loaded, prepared and measured."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def say(self, text: str) -> None:
        self._shown.say(text)

    def take(self, event: dict[str, Any]) -> None:
        """What the engine says of itself while it loads and prepares; other events are passed over."""
        if event["event"] == "notice" and event.get("id") is None:
            self._shown.say(event["message"])
        elif event["event"] == "loading":
            done, total = event.get("done"), event.get("total")
            has_count = isinstance(done, int) and isinstance(total, int) and total
            text = f"{event['message']}, {done} of {total}" if has_count else str(event["message"])
            self._shown.pass_by(str(event["message"]), text)

    def begin(self, what: str) -> None:
        self._shown.pass_by(what, what)

    def prepare(self, what: str, number: int, total: int) -> None:
        """The ``number``-th of ``total`` steps ahead of the measuring."""
        self._shown.pass_by(what, f"{what}, {number} of {total}")

    def measured(self, sheet: Sheet, together: int, arm: Arm, tally: Tally) -> None:
        """A round of ``arm`` has been answered: ``tally``."""
        done, total = sheet.num_rows
        if sheet.has_all(together, arm.name):
            speed = sheet.so_far(together, arm.name).tokens_per_second
            told = "nothing to time" if speed is None else f"{speed:.1f} tokens/s"
            self._shown.row(f"{together} together, {arm.name}: {told} ({done} of {total}{_left(sheet)})")
        else:
            thrown = f", {tally.thrown_away} thrown away for captures" if tally.thrown_away else ""
            number, of = sheet.num_rounds(together, arm.name), sheet.rounds[together]
            text = f"{together} together, {arm.name}: round {number} of {of}{thrown}{_left(sheet)}"
            self._shown.pass_by(_ROUNDS, text)

    def close(self) -> None:
        self._shown.close()


def _left(sheet: Sheet) -> str:
    known = sheet.seconds_left()
    if known is None or not sheet.missing():
        return ""
    seconds, is_least = known
    return f", {'at least' if is_least else 'about'} {in_words(seconds)} left"


class _Lines:
    """Plain lines: every row, the start of every stage, and how far it is now and then."""

    def __init__(self, says_all: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._says_all, self._clock = says_all, clock
        self._last, self._stage = 0.0, ""

    def say(self, text: str) -> None:
        with suppress(OSError):
            note(text)

    def pass_by(self, stage: str, text: str) -> None:
        now = self._clock()
        if self._says_all or stage != self._stage or now - self._last >= _SECONDS_BETWEEN_LINES:
            self.say(text)
            self._stage, self._last = stage, now

    def row(self, text: str) -> None:
        self.say(text)
        self._stage, self._last = _ROUNDS, self._clock()

    def close(self) -> None:
        return


class _ChangingLine:
    """One line of rich's, drawn anew when there is something to show and never by a clock."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None

    def say(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed
            if self._rich is None:
                note(text)
            else:
                self._rich.console.print(f"sparkchat: {printable(text)}", markup=False, highlight=False)

    def pass_by(self, stage: str, text: str) -> None:
        self._draw(text)

    def row(self, text: str) -> None:
        self._draw(text)

    def close(self) -> None:
        line, self._rich = self._rich, None
        with suppress(OSError):
            if line is not None:
                line.stop()

    def _draw(self, text: str) -> None:
        with suppress(OSError):
            if self._rich is None:
                self._rich = _start_line()
                self._task = self._rich.add_task("")
            self._rich.update(self._task, description=printable(text))
            self._rich.refresh()


def _start_line() -> RichProgress:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TextColumn
    from rich.table import Column

    # markup=False: a model's name is not ours to interpret. Too long a line is cut, not wrapped.
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    line = RichProgress(text, console=Console(stderr=True), transient=True, auto_refresh=False)
    line.start()
    return line
