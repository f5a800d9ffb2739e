"""Lines out of a stream of bytes, as they come."""

from __future__ import annotations


class Lines:
    """Joins the pieces of each line once, however many they are; what is left of a line that is too long is dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_dropping = False

    def take(self, chunk: bytes) -> list[bytes | None]:
        """The lines that ``chunk`` ends, without their newlines; None for one of more than ``most_bytes``, at once."""
        first, *others = chunk.split(b"\n")
        found = self._add(first)
        for piece in others:
            found += self.end() + self._add(piece)
        return found

    def end(self) -> list[bytes | None]:
        """The line that is open, if there is one."""
        line, is_open = b"".join(self._pieces), not self._is_dropping
        self._pieces, self._num_bytes, self._is_dropping = [], 0, False
        return [line] if is_open else []

    def _add(self, piece: bytes) -> list[bytes | None]:
        if self._is_dropping:
            return []
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes <= self._most_bytes:
            return []
        self._pieces, self._is_dropping = [], True
        return [None]
