"""The text of one part of a turn as lines and rows: what was received, and how it lies at the present width.

``append`` costs as much as the new text, whatever the length of what is there already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.markdown import (
    LONG_LINE,
    Fence,
    FormattedLine,
    MarkdownFormatter,
    Piece,
    closes_fence,
    opened_fence,
    plain_line,
    plain_pieces,
)
from sparkchat.ui.origins import Origins
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.tables import align_table, is_delimiter, is_row
from sparkchat.ui.wrap import wrap

Syntax = Literal["markdown", "plain"]


_FEW_PIECES = 32
"""So few are counted again when they are drawn; keeping the counts of every line ever drawn would cost more."""


_ONE_ROW = (0,)
_MOST_MADE = 64
"""Lines whose looks are kept beyond their drawing."""


class Line:
    """One source line: its shown pieces and where its rows start.

    A line that is complete can forget its text and its pieces: the section makes them again when the line is drawn.
    """

    __slots__ = (
        *("_display", "_end", "_formatted", "_offsets", "_text", "fence", "first_row", "num_fences"),
        *("row_starts", "section", "start", "version"),
    )

    def __init__(self, section: Section, start: int, text: str, formatted: FormattedLine, width: int) -> None:
        self.section = section
        self.start = start
        """Offset of the line in the section's text."""
        self._text: str | None = text
        self._end = start
        self.fence: Fence | None = None
        """The code block that is open where the line begins."""
        self.num_fences = 0
        """Code blocks that have begun before the line."""
        self.first_row = 0
        """Index of its first row in the transcript."""
        self.version = 0
        """Changes whenever a row may look different."""
        self.show(formatted, width)

    @property
    def text(self) -> str:
        return self._text if self._text is not None else self.section.text[self.start : self._end]

    @property
    def end(self) -> int:
        return self._end if self._text is None else self.start + len(self._text)

    @property
    def formatted(self) -> FormattedLine:
        return self._formatted if self._formatted is not None else self.section.formatted(self)

    @property
    def display(self) -> str:
        """What is shown, without margins and breaks."""
        return self._display if self._display is not None else "".join(piece.text for piece in self.formatted.pieces)

    def show(self, formatted: FormattedLine, width: int) -> None:
        self._formatted: FormattedLine | None = formatted
        self._display: str | None = "".join(piece.text for piece in formatted.pieces)
        self._offsets: list[int] | None = None
        self.wrap(width)

    def grow(self, text: str) -> None:
        """More text; :meth:`show` follows."""
        assert self._text is not None
        self._text += text

    def forget(self) -> None:
        """Nothing is added any more: keep only where the rows begin. A long line would be dear to make again."""
        if self._text is not None and len(self._text) <= LONG_LINE:
            self._end = self.start + len(self._text)
            self._text = self._formatted = self._display = self._offsets = None

    def wrap(self, width: int) -> None:
        starts = wrap(self.display, self._inner_width(width), words=self.formatted.words)
        self.row_starts: Sequence[int] = starts if len(starts) > 1 else _ONE_ROW
        self.version += 1

    def extend(self, text: str, width: int, ascii_only: bool) -> None:
        """Add text to a line that is shown as it is; only the last row is wrapped again."""
        before = len(self.text)
        self.grow(text)
        pieces = self.formatted.pieces
        display = [self.display]
        style = pieces[-1].style.replace(" control", "") if pieces else ""
        for piece in plain_pieces(self.text, before, len(self.text), style, ascii_only):
            last = pieces[-1] if pieces else None
            if last and last.style == piece.style and len(last.text) == last.end - last.start and piece.text:
                pieces[-1] = Piece(last.text + piece.text, last.style, last.start, piece.end)
            else:
                pieces.append(piece)
            display.append(piece.text)
        self._offsets = None
        self._display = "".join(display)
        starts = wrap(self._display, self._inner_width(width), words=self.formatted.words, start=self.row_starts[-1])
        self.row_starts = [*self.row_starts[:-1], *starts]
        self.version += 1

    def _inner_width(self, width: int) -> int:
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


class Section:
    """One run of text of one kind: a question, an answer, thinking, or a line of ours."""

    def __init__(self, syntax: Syntax, style: str, width: int, glyphs: Glyphs, margin: str = "") -> None:
        self.text = ""
        self.num_words = 0
        self.lines: list[Line] = []
        self.first_changed = 0
        """First line whose rows are not what the transcript last saw."""
        self.num_shown = 0
        """Lines the transcript knows."""
        self.has_gap = False
        self.is_folded = False
        self._syntax = syntax
        self._style = style
        self.width = width
        self._glyphs = glyphs
        self._margin = margin
        self._formatter = MarkdownFormatter(glyphs, style)
        self._fence: Fence | None = None
        self._table: int | None = None
        self._tables: list[tuple[int, int]] = []
        self._is_finished = False
        self.origins = Origins()
        self._made: dict[Line, FormattedLine] = {}
        self.turn_id: str | None = None
        """The request that this text answers."""

    @property
    def ascii_only(self) -> bool:
        return self._glyphs.bullet.isascii()

    @property
    def is_changed(self) -> bool:
        return self.first_changed < max(len(self.lines), 1) or self.num_shown != len(self.lines)

    def mark_shown(self) -> None:
        self.first_changed = self.num_shown = len(self.lines)

    def append(self, text: str) -> None:
        if not text:
            return
        self.num_words += len(text.split()) - (
            bool(self.text) and not self.text[-1].isspace() and not text[0].isspace()
        )
        self.text += text
        first, *rest = text.split("\n")
        self._extend_last(first)
        for part in rest:
            self._complete_last()
            self._add_line(part)

    def mark_origin(self, origin: str, step: int | None = None) -> None:
        """Everything since the last call came from ``origin`` (see ``token_text``), in that step of the answer."""
        self.origins.add(len(self.text), origin, step)

    def origin_at(self, offset: int) -> tuple[str, int]:
        """The origin of the character at ``offset``, and where the run of that origin ends."""
        run = self.origins.at(offset)
        return ("", len(self.text) + 1) if run is None else (run.origin, run.end)

    def code_at(self, edge: Line) -> str | None:
        """The contents of the code block that a fence line opens or closes; None for any other line."""
        index = bisect_right(self.lines, edge.start, key=lambda line: line.start) - 1
        if index < 0 or self.lines[index] is not edge or edge.formatted.kind != "fence":
            return None
        if edge.fence is not None:
            begin, end = index, index
            while begin and self.lines[begin - 1].fence is edge.fence:
                begin -= 1
        else:
            begin = end = index + 1
            fence = self.lines[begin].fence if begin < len(self.lines) else None
            while end < len(self.lines) and self.lines[end].fence is fence is not None:
                end += 1
            # The closing line begins inside the block too.
            end -= end > begin and self.lines[end - 1].formatted.kind == "fence"
        return "\n".join(line.text for line in self.lines[begin:end])

    def finish(self) -> None:
        """No more text comes: lay out a table that ends the text."""
        if self.lines and not self._is_finished:
            self._is_finished = True
            self._complete_last()
            self._close_table(len(self.lines))

    def replace(self, text: str) -> None:
        """Show another text instead (for lines of ours that change, such as a count)."""
        self.text, self.lines, self.num_words = "", [], 0
        self.first_changed = 0
        self.append(text)

    def rewrap(self, width: int) -> None:
        self.width = width
        for line in self.lines:
            line.wrap(width)
        for begin, end in self._tables:
            self._align(begin, end)
        self.first_changed = 0

    def _extend_last(self, text: str) -> None:
        if not self.lines:
            self._add_line(text)
            return
        if not text:
            return
        line = self.lines[-1]
        self._changed(len(self.lines) - 1)
        if len(line.text) > LONG_LINE:
            line.extend(text, self.width, self.ascii_only)
        else:
            line.grow(text)
            line.show(self._format(line.text, len(self.lines) - 1)[0], self.width)

    def _add_line(self, text: str) -> None:
        start = self.lines[-1].end + 1 if self.lines else 0
        self._changed(len(self.lines))
        line = Line(self, start, text, self._format(text, len(self.lines))[0], self.width)
        line.fence, line.num_fences = self._fence, self._formatter.num_fences
        self.lines.append(line)

    def _complete_last(self) -> None:
        """The last line is whole: take over its fence, and follow tables."""
        if self._syntax == "plain":
            return
        index = len(self.lines) - 1
        text = self.lines[index].text
        was_fenced = self._fence is not None
        if self._fence is None:
            self._fence = opened_fence(text)
            self._formatter.num_fences += self._fence is not None
        elif closes_fence(text, self._fence):
            self._fence = None
        if was_fenced or self._fence is not None:
            self._close_table(index)
        elif self._table is not None:
            if not is_row(text):
                self._close_table(index)
        elif index and is_delimiter(text) and is_row(self.lines[index - 1].text):
            self._table = index - 1
        self.lines[index].forget()

    def _close_table(self, end: int) -> None:
        begin, self._table = self._table, None
        if begin is not None and end - begin >= 2:
            self._tables.append((begin, end))
            self._align(begin, end)

    def _align(self, begin: int, end: int) -> None:
        lines = self.lines[begin:end]
        aligned = align_table([line.text for line in lines], self.width, self._formatter, self._glyphs)
        for number, line in enumerate(lines):
            line.show(aligned[number] if aligned else self._formatter.format(line.text, None)[0], self.width)
        self._changed(begin)

    def formatted(self, line: Line) -> FormattedLine:
        """What a line that has forgotten it looks like."""
        found = self._made.get(line)
        if found is None:
            now = self._formatter.num_fences
            self._formatter.num_fences = line.num_fences
            found = self._formatter.format(line.text, line.fence)[0]
            self._formatter.num_fences = now
            if len(self._made) >= _MOST_MADE:
                self._made.pop(next(iter(self._made)))
            self._made[line] = found
        return found

    def _changed(self, index: int) -> None:
        self.first_changed = min(self.first_changed, index)

    def _format(self, text: str, index: int) -> tuple[FormattedLine, Fence | None]:
        if self._syntax == "markdown":
            return self._formatter.format(text, self._fence)
        formatted = plain_line(text, self._style, self.ascii_only)
        if not self._margin:
            return formatted, None
        blank = [Piece(" " * len(self._margin), "", 0, 0)]
        lead = blank if index else [Piece(self._margin, f"{self._style} mark".strip(), 0, 0)]
        return FormattedLine(formatted.pieces, lead, blank), None
