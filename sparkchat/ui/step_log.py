"""The newest steps of the session, kept small: a step is five kilobytes as objects, one as text, a quarter packed."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

BLOCK = 64
"""Steps that are packed together: alone, they would share no field names with their neighbours."""
MOST_STEPS = 128 * BLOCK
"""Steps that can be looked at; the trace has them all."""


class StepRecord(NamedTuple):
    """A step event, and the text of the token that the target added in it."""

    step: dict[str, Any]
    bonus_text: str | None


class StepLog:
    """Holds the last :data:`MOST_STEPS` steps and up to a block more, of whichever answers they were."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        self._packed: deque[bytes] = deque()
        self._newest: list[str] = []
        self._first = 0
        """The oldest step at hand; steps are numbered through the whole session."""
        self._spans: list[tuple[str, int]] = []
        """(request, number of its first step) wherever the request is another than before."""

    def add(self, step: dict[str, Any], bonus_text: str | None) -> None:
        if not self._spans or self._spans[-1][0] != step["id"]:
            self._spans.append((step["id"], self._end))
        self._newest.append(json.dumps((step, bonus_text), separators=(",", ":")))
        if len(self._newest) == BLOCK:
            self._packed.append(zlib.compress("\n".join(self._newest).encode()))
            self._newest = []
        if self._end - self._first >= self._most + BLOCK:
            self._packed.popleft()
            self._first += BLOCK
            while len(self._spans) > 1 and self._spans[1][1] <= self._first:
                del self._spans[0]

    @property
    def _end(self) -> int:
        return self._first + len(self._packed) * BLOCK + len(self._newest)

    def of(self, request_id: str | None) -> Steps:
        """The steps of one answer that are still at hand, in order."""
        ends = [*(begin for _, begin in self._spans[1:]), self._end]
        spans = [
            range(max(begin, self._first), end)
            for (name, begin), end in zip(self._spans, ends, strict=False)
            if name == request_id
        ]
        return Steps((*self._packed, tuple(self._newest)), self._first, spans)


class Steps(Sequence[StepRecord]):
    """Steps that become objects when they are looked at."""

    def __init__(self, blocks: Sequence[bytes | tuple[str, ...]], first: int, spans: Sequence[range]) -> None:
        self._blocks = blocks
        self._first = first
        self._spans = spans
        self._begins = [sum(map(len, spans[:number])) for number in range(len(spans))]
        self._open: tuple[int, Sequence[str]] = (-1, ())
        """The block that was looked at last, unpacked."""

    def __len__(self) -> int:
        return sum(map(len, self._spans))

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        places = range(len(self))[index]
        return self._record(places) if isinstance(places, int) else [self._record(place) for place in places]

    def _record(self, place: int) -> StepRecord:
        span = bisect_right(self._begins, place) - 1
        block, line = divmod(self._spans[span][place - self._begins[span]] - self._first, BLOCK)
        if self._open[0] != block:
            self._open = block, _lines(self._blocks[block])
        return StepRecord(*json.loads(self._open[1][line]))


def first_number(records: Sequence[StepRecord]) -> int:
    """The number within its answer of the first of these steps, from 0: so many before it are not at hand any more."""
    number = records[0].step.get("i") if records else None
    return number if isinstance(number, int) else 0


def _lines(block: bytes | tuple[str, ...]) -> Sequence[str]:
    return block if isinstance(block, tuple) else zlib.decompress(block).decode().split("\n")
