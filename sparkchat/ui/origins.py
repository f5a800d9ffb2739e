"""Which part of a text came from where: runs of one origin and one step, a few bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

_KINDS = ("", "prefill", "draft", "bonus", "corrected", "plain")
_NUM_KINDS = 8
_MOST_STEPS = 2**32 // _NUM_KINDS - 2


class OriginRun(NamedTuple):
    """A part of a text that one step made in one way."""

    start: int
    end: int
    origin: str
    step: int | None


class Origins:
    """Runs in the order of the text, without gaps from 0 on."""

    def __init__(self) -> None:
        self._ends = array("I")
        self._makers = array("I")
        """Kind and step of each run in one number; step -1 (none) as 0."""

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
        number = -1 if step is None else min(step, _MOST_STEPS)
        maker = (number + 1) * _NUM_KINDS + kind
        if self._makers and self._makers[-1] == maker:
            self._ends[-1] = end
        else:
            self._ends.append(end)
            self._makers.append(maker)

    def at(self, offset: int) -> OriginRun | None:
        """The run that holds the character at ``offset``; None where nothing is known."""
        index = bisect_right(self._ends, offset)
        if offset < 0 or index == len(self._ends):
            return None
        start = self._ends[index - 1] if index else 0
        step, kind = divmod(self._makers[index], _NUM_KINDS)
        return OriginRun(start, self._ends[index], _KINDS[kind], step - 1 if step else None)
