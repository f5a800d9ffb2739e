"""Answers of a trace that are open at a line, and what a reader keeps of each; closed ones leave their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sparkchat.errors import DamagedFile
from sparkchat.trace.reader import MOST_OPEN_ANSWERS, TraceLine

T = TypeVar("T")


class OpenAnswers(Generic[T]):
    """``make`` gives the state of a new answer. Raises DamagedFile when more are open than any engine decodes."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._open: dict[int, T] = {}
        self._closed: set[int] = set()

    def of(self, line: TraceLine) -> T | None:
        """The state of the line's answer, made when this is its first line; None when it has ended before."""
        number = line.data["turn"]
        if number in self._closed:
            return None
        if number not in self._open:
            if len(self._open) >= MOST_OPEN_ANSWERS:
                raise DamagedFile(
                    f"line {line.number} of the trace opens answer number {len(self._open) + 1} "
                    "with none ended before; no engine writes that"
                )
            self._open[number] = self._make()
        return self._open[number]

    def close(self, line: TraceLine) -> T | None:
        """Forget the state of the line's answer and return it; None when it has ended before."""
        state = self.of(line)
        self._open.pop(line.data["turn"], None)
        self._closed.add(line.data["turn"])
        return state

    @property
    def num_seen(self) -> int:
        return len(self._open) + len(self._closed)

    @property
    def left_open(self) -> Iterator[T]:
        """States of the answers that have not ended, in order of their numbers."""
        return (self._open[number] for number in sorted(self._open))
