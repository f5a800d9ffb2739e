"""A text that only grows: adding to it costs what is added, whatever is there already.

A string would be copied at every addition, and a single wide character would double all of it.
"""

from __future__ import annotations

from bisect import bisect_right

CHUNK = 448
"""Characters of a part before the next one begins. Python keeps strings of up to 463 in pools of its own; longer ones
that grow in a list leave holes in the heap, as much as the text itself."""


class LongText:
    """Text in parts; slices, length and the last character are cheap, the whole is made when it is asked for."""

    __slots__ = ("_chunks", "_length", "_starts")

    def __init__(self, text: str = "") -> None:
        self._chunks: list[str] = []
        self._starts: list[int] = []
        self._length = 0
        self.append(text)

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        return "".join(self._chunks)

    @property
    def last(self) -> str:
        """The last character; empty when there is none."""
        return self._chunks[-1][-1] if self._chunks else ""

    def append(self, text: str) -> None:
        if not text:
            return
        if self._chunks and len(self._chunks[-1]) + len(text) <= CHUNK:
            self._chunks[-1] += text
        else:
            self._starts.append(self._length)
            self._chunks.append(text)
        self._length += len(text)

    def slice(self, start: int, end: int) -> str:
        """The characters from ``start`` to before ``end``; both within the text."""
        if start >= end:
            return ""
        first = bisect_right(self._starts, start) - 1
        at = self._starts[first]
        chunk = self._chunks[first]
        if end <= at + len(chunk):
            return chunk[start - at : end - at]
        last = bisect_right(self._starts, end - 1) - 1
        parts = [chunk[start - at :], *self._chunks[first + 1 : last], self._chunks[last][: end - self._starts[last]]]
        return "".join(parts)
