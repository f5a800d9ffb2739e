"""One source line of a section as it is drawn: its shown pieces and where its rows begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from sparkchat.ui.markdown import FormattedLine, Piece, plain_pieces
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.wrap import wrap

if TYPE_CHECKING:
    from sparkchat.ui.document import Section

_FEW_PIECES = 32
"""So few are counted again when they are drawn."""


class Line:
    """Made when it is looked at; the section keeps only where its lines and rows begin."""

    __slots__ = ("_offsets", "display", "formatted", "index", "row_starts", "section", "start", "text", "version")

    def __init__(self, section: Section, index: int, text: str, formatted: FormattedLine, version: int) -> None:
        self.section = section
        self.index = index
        """Its number in the section, from 0."""
        self.start = section.start_of(index)
        """Offset of the line in the section's text."""
        self.text = text
        self.show(formatted, version)

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def show(self, formatted: FormattedLine, version: int) -> None:
        """``version`` changes whenever a row may look different."""
        self.formatted = formatted
        self.display = "".join(piece.text for piece in formatted.pieces)
        """What is shown, without margins and breaks."""
        self._offsets: list[int] | None = None
        self.wrap(version)

    def wrap(self, version: int) -> None:
        """Break the line for the section's present width."""
        self.row_starts: Sequence[int] = wrap(self.display, self._inner_width(), words=self.formatted.words)
        self.version = version

    def extend(self, text: str, version: int) -> None:
        """Add text to a line that is shown as it is; only the last row is wrapped again."""
        before = len(self.text)
        self.text += text
        pieces = self.formatted.pieces
        display = [self.display]
        style = pieces[-1].style.replace(" control", "") if pieces else ""
        for piece in plain_pieces(self.text, before, len(self.text), style, self.section.ascii_only):
            last = pieces[-1] if pieces else None
            if last and last.style == piece.style and len(last.text) == last.end - last.start and piece.text:
                pieces[-1] = Piece(last.text + piece.text, last.style, last.start, piece.end)
            else:
                pieces.append(piece)
            display.append(piece.text)
        self._offsets = None
        self.display = "".join(display)
        starts = wrap(self.display, self._inner_width(), words=self.formatted.words, start=self.row_starts[-1])
        self.row_starts = [*self.row_starts[:-1], *starts]
        self.version = version

    def _inner_width(self) -> int:
        width = self.section.width
        lead = max(sum(text_width(p.text) for p in side) for side in (self.formatted.lead, self.formatted.hang))
        return max(width - lead, min(width, 8), 2)

    def margin(self, row: int) -> Sequence[Piece]:
        return self.formatted.hang if row else self.formatted.lead

    def row_pieces(self, row: int) -> list[Piece]:
        """The pieces of one row, without its margin."""
        begin = self.row_starts[row]
        pieces = self.formatted.pieces
        offsets = self._piece_offsets(pieces)
        end = self.row_starts[row + 1] if row + 1 < len(self.row_starts) else offsets[-1]
        found: list[Piece] = []
        index = max(bisect_right(offsets, begin) - 1, 0)
        while index < len(pieces) and offsets[index] < end:
            piece, at = pieces[index], offsets[index]
            low, high = max(begin - at, 0), min(end - at, len(piece.text))
            if low < high:
                found.append(_cut(piece, low, high))
            index += 1
        return found

    def source_offset(self, row: int, column: int) -> int:
        """Offset in the section's text of the character at ``column`` (in characters, margin included) of a row."""
        column = max(0, column - sum(len(piece.text) for piece in self.margin(row)))
        pieces = self.row_pieces(row)
        for piece in pieces:
            if column < len(piece.text):
                exact = len(piece.text) == piece.end - piece.start
                return self.start + (piece.start + column if exact else piece.start)
            column -= len(piece.text)
        if row + 1 < len(self.row_starts) and pieces:
            return self.start + pieces[-1].end
        return self.end

    def row_of(self, offset: int) -> int:
        """The row that shows the character at ``offset`` of the section."""
        found = 0
        for number in range(len(self.row_starts)):
            if self.source_offset(number, 0) > offset:
                break
            found = number
        return found

    def _piece_offsets(self, pieces: Sequence[Piece]) -> list[int]:
        if self._offsets is not None:
            return self._offsets
        offsets = list(accumulate((len(p.text) for p in pieces), initial=0))
        if len(offsets) > _FEW_PIECES:
            self._offsets = offsets
        return offsets


def _cut(piece: Piece, low: int, high: int) -> Piece:
    if low == 0 and high == len(piece.text):
        return piece
    if len(piece.text) == piece.end - piece.start:
        return Piece(piece.text[low:high], piece.style, piece.start + low, piece.start + high)
    return Piece(piece.text[low:high], piece.style, piece.start, piece.end)
