"""Which part of a text came from where: runs of one origin and one step, a few bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

_KINDS = ("", "prefill", "draft", "bonus", "corrected", "plain")


class OriginRun(NamedTuple):
    """A part of a text that one step made in one way."""

    start: int
    end: int
    origin: str
    step: int | None


class Origins:
    """Runs in the order of the text, without gaps from 0 on."""

    def __init__(self) -> None:
        self._ends = array("q")
        self._kinds = array("b")
        self._steps = array("q")

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def end(self) -> int:
        """Behind the last character whose origin is known."""
        return self._ends[-1] if self._ends else 0

    def add(self, end: int, origin: str, step: int | None) -> None:
        """Everything from the last end to this one is of that origin."""
        if end <= self.end:
            return
        kind = _KINDS.index(origin) if origin in _KINDS else 0
        number = -1 if step is None else step
        if self._ends and (self._kinds[-1], self._steps[-1]) == (kind, number):
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._kinds.append(kind)
            self._steps.append(number)

    def at(self, offset: int) -> OriginRun | None:
        """The run that holds the character at ``offset``; None where nothing is known."""
        index = bisect_right(self._ends, offset)
        if offset < 0 or index == len(self._ends):
            return None
        start = self._ends[index - 1] if index else 0
        step = self._steps[index]
        return OriginRun(start, self._ends[index], _KINDS[self._kinds[index]], None if step < 0 else step)
