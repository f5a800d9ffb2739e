"""The text of one part of a turn as lines and rows: what was received, and how it lies at the present width.

``append`` costs as much as the new text, whatever the length of what is there already, and a line that is complete
leaves eight bytes behind: where it begins, and how many rows lie above its end. The rest is made when it is drawn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Literal

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.line import Line
from sparkchat.ui.long_text import LongText
from sparkchat.ui.markdown import (
    LONG_LINE,
    Fence,
    FormattedLine,
    MarkdownFormatter,
    Piece,
    closes_fence,
    opened_fence,
    plain_line,
)
from sparkchat.ui.origins import Origins
from sparkchat.ui.tables import align_table, is_delimiter, is_row

Syntax = Literal["markdown", "plain"]

_MOST_MADE = 64
"""Lines that are kept as objects after they were drawn."""
_MOST_TABLES = 4
"""Tables whose columns are kept after they were drawn."""
_NEVER = 2**32 - 1
"""The line that closes a block which is open."""
_MOST_LEAD = 24
"""No formatting of a plain line adds more cells than this."""


class Section:
    """One run of text of one kind: a question, an answer, thinking, or a line of ours."""

    def __init__(self, syntax: Syntax, style: str, width: int, glyphs: Glyphs, margin: str = "") -> None:
        self.has_gap = False
        self.is_folded = False
        self.origins = Origins()
        self.turn_id: str | None = None
        """The request that this text answers."""
        self.width = width
        self._syntax = syntax
        self._style = style
        self._glyphs = glyphs
        self._margin = margin
        self._formatter = MarkdownFormatter(glyphs, style)
        self._num_layouts = self._num_versions = 0
        self._begin()

    def _begin(self) -> None:
        self.source = LongText()
        """The text as it was received."""
        self.num_words = 0
        self.first_changed = 0
        """First line whose rows are not what the transcript last saw."""
        self.num_shown = 0
        """Lines the transcript knows."""
        self._starts = array("I")
        """Where every line begins in the text."""
        self._row_ends = array("I")
        """Of every complete line: rows up to its end."""
        self._open: Line | None = None
        """The last line, as long as text is added to it."""
        self._long: dict[int, Line] = {}
        """Complete lines that would be dear to make again."""
        self._made: dict[int, Line] = {}
        self._fence: Fence | None = None
        self._fence_opens = array("I")
        self._fence_closes = array("I")
        self._table: int | None = None
        """Where a table begins that may go on."""
        self._table_begins = array("I")
        self._table_ends = array("I")
        self._has_columns = array("b")
        """Whether each table fits the width in columns."""
        self._columns: dict[int, list[FormattedLine]] = {}
        self._is_finished = False

    # What there is

    @property
    def text(self) -> str:
        return str(self.source)

    def slice(self, start: int, end: int) -> str:
        return self.source.slice(max(start, 0), min(end, len(self.source)))

    @property
    def ascii_only(self) -> bool:
        return self._glyphs.bullet.isascii()

    @property
    def num_lines(self) -> int:
        return len(self._starts)

    @property
    def num_rows(self) -> int:
        complete = self._row_ends[-1] if self._row_ends else 0
        return complete + (len(self._open.row_starts) if self._open is not None else 0)

    def start_of(self, index: int) -> int:
        """Offset in the text at which a line begins."""
        return self._starts[index]

    def _end_of(self, index: int) -> int:
        return self._starts[index + 1] - 1 if index + 1 < len(self._starts) else len(self.source)

    def line_of(self, offset: int) -> int:
        """The line that holds the character at ``offset``; -1 when there is none."""
        return bisect_right(self._starts, offset) - 1

    def row_of_line(self, index: int) -> int:
        """Rows above a line."""
        return self._row_ends[index - 1] if index else 0

    def place(self, row: int) -> tuple[int, int]:
        """(line, number of its row) of a row of the section."""
        index = bisect_right(self._row_ends, row)
        return index, row - self.row_of_line(index)

    def version_of(self, index: int) -> int:
        """Another number when the line may look different from before."""
        line = self._at_hand(index)
        return line.version if line is not None else self._made_version

    def line(self, index: int) -> Line:
        """A line as it is drawn."""
        found = self._at_hand(index)
        if found is None:
            text = self.source.slice(self._starts[index], self._end_of(index))
            found = Line(self, index, text, self._formatted(index, text), self._made_version)
            self._keep(found)
        return found

    def _at_hand(self, index: int) -> Line | None:
        if self._open is not None and index == self._open.index:
            return self._open
        return self._made.get(index) or self._long.get(index)

    def _keep(self, line: Line) -> None:
        if len(self._made) >= _MOST_MADE:
            self._made.pop(next(iter(self._made)))
        self._made[line.index] = line

    @property
    def _made_version(self) -> int:
        # Negative, so that it is never one of a line that was still growing.
        return -1 - self._num_layouts

    def _new_version(self) -> int:
        self._num_versions += 1
        return self._num_versions

    # What the transcript has seen

    @property
    def is_changed(self) -> bool:
        return self.first_changed < max(self.num_lines, 1) or self.num_shown != self.num_lines

    def mark_shown(self) -> None:
        self.first_changed = self.num_shown = self.num_lines

    def _changed(self, index: int) -> None:
        self.first_changed = min(self.first_changed, index)

    # Text that comes

    def append(self, text: str) -> None:
        if not text:
            return
        last = self.source.last
        self.num_words += len(text.split()) - (bool(last) and not last.isspace() and not text[0].isspace())
        first, *rest = text.split("\n")
        self._extend_last(first)
        for part in rest:
            self._complete_last()
            self.source.append("\n")
            self._add_line(part)

    def mark_origin(self, origin: str, step: int | None = None) -> None:
        """Everything since the last call came from ``origin`` (see ``token_text``), in that step of the answer."""
        self.origins.add(len(self.source), origin, step)

    def origin_at(self, offset: int) -> tuple[str, int]:
        """The origin of the character at ``offset``, and where the run of that origin ends."""
        run = self.origins.at(offset)
        return ("", len(self.source) + 1) if run is None else (run.origin, run.end)

    def finish(self) -> None:
        """No more text comes: lay out a table that ends the text."""
        if self._starts and not self._is_finished:
            self._is_finished = True
            self._complete_last()
            self._close_table(self.num_lines)

    def replace(self, text: str) -> None:
        """Show another text instead (for lines of ours that change, such as a count)."""
        self._begin()
        self._num_layouts += 1
        self.append(text)

    def _extend_last(self, text: str) -> None:
        line = self._open
        if line is None:
            self._add_line(text)
            return
        if not text:
            return
        self.source.append(text)
        self._changed(line.index)
        if len(line.text) > LONG_LINE:
            line.extend(text, self._new_version())
        else:
            line.text += text
            line.show(self._format(line.text, line.index), self._new_version())

    def _add_line(self, text: str) -> None:
        index = self.num_lines
        self._starts.append(len(self.source))
        self.source.append(text)
        self._changed(index)
        self._open = Line(self, index, text, self._format(text, index), self._new_version())

    def _complete_last(self) -> None:
        """The last line is whole: only where its rows end is kept. Take over its fence, and follow tables."""
        line, self._open = self._open, None
        assert line is not None
        self._row_ends.append(self.row_of_line(line.index) + len(line.row_starts))
        if len(line.text) > LONG_LINE:
            self._long[line.index] = line
        else:
            self._keep(line)
        if self._syntax == "markdown":
            self._follow_blocks(line.index, line.text)

    def _follow_blocks(self, index: int, text: str) -> None:
        was_fenced = self._fence is not None
        if self._fence is None:
            self._fence = opened_fence(text)
            if self._fence is not None:
                self._fence_opens.append(index)
                self._fence_closes.append(_NEVER)
        elif closes_fence(text, self._fence):
            self._fence = None
            self._fence_closes[-1] = index
        if was_fenced or self._fence is not None:
            self._close_table(index)
        elif self._table is not None:
            if not is_row(text):
                self._close_table(index)
        elif index and is_delimiter(text) and is_row(self._text_of(index - 1)):
            self._table = index - 1

    def _text_of(self, index: int) -> str:
        return self.source.slice(self._starts[index], self._end_of(index))

    # Looks

    def rewrap(self, width: int) -> None:
        """Lie at another width."""
        self.width = width
        self._num_layouts += 1
        self._made.clear()
        self._columns.clear()
        for number in range(len(self._table_begins)):
            self._has_columns[number] = self._columns_of(number) is not None
        for line in self._long.values():
            line.wrap(self._new_version())
        rows = 0
        for index in range(len(self._row_ends)):
            rows += self._count_rows(index)
            self._row_ends[index] = rows
        if self._open is not None:
            self._open.wrap(self._new_version())
        self.first_changed = 0

    def _count_rows(self, index: int) -> int:
        if (line := self._long.get(index)) is not None:
            return len(line.row_starts)
        if self._table_in_columns(index) is not None:
            return 1
        text = self._text_of(index)
        if len(text) + _MOST_LEAD <= self.width and text.isascii() and text.isprintable():
            return 1
        return len(Line(self, index, text, self._formatted(index, text), self._made_version).row_starts)

    def _formatted(self, index: int, text: str) -> FormattedLine:
        """What a complete line looks like."""
        table = self._table_in_columns(index)
        columns = self._columns_of(table) if table is not None else None
        if table is None or columns is None:
            return self._format(text, index)
        return columns[index - self._table_begins[table]]

    def _format(self, text: str, index: int) -> FormattedLine:
        if self._syntax == "markdown":
            self._formatter.num_fences = bisect_left(self._fence_opens, index)
            return self._formatter.format(text, self._fence_at(index))[0]
        formatted = plain_line(text, self._style, self.ascii_only)
        if not self._margin:
            return formatted
        blank = [Piece(" " * len(self._margin), "", 0, 0)]
        lead = blank if index else [Piece(self._margin, f"{self._style} mark".strip(), 0, 0)]
        return FormattedLine(formatted.pieces, lead, blank)

    # Code blocks and tables

    def _fence_at(self, index: int) -> Fence | None:
        """The code block that is open where a line begins; its closing line begins inside it."""
        number = bisect_left(self._fence_opens, index) - 1
        if number < 0 or self._fence_closes[number] < index:
            return None
        if number == len(self._fence_opens) - 1 and self._fence is not None:
            return self._fence
        return opened_fence(self._text_of(self._fence_opens[number]))

    def code_at(self, edge: Line) -> str | None:
        """The contents of the code block that a fence line opens or closes; None for any other line."""
        if edge.section is not self or edge.formatted.kind != "fence":
            return None
        if self._fence_at(edge.index) is not None:
            begin = self._fence_opens[bisect_left(self._fence_opens, edge.index) - 1] + 1
            end = edge.index
        else:
            begin = edge.index + 1
            number = bisect_left(self._fence_opens, edge.index)
            is_known = number < len(self._fence_opens) and self._fence_opens[number] == edge.index
            end = min(self._fence_closes[number], self.num_lines) if is_known else begin
        return self.source.slice(self._starts[begin], self._end_of(end - 1)) if begin < end else ""

    def _table_in_columns(self, index: int) -> int | None:
        """The number of the table that a line belongs to, when it is shown in columns."""
        table = bisect_right(self._table_begins, index) - 1
        return table if table >= 0 and index < self._table_ends[table] and self._has_columns[table] else None

    def _close_table(self, end: int) -> None:
        begin, self._table = self._table, None
        if begin is None or end - begin < 2:
            return
        number = len(self._table_begins)
        self._table_begins.append(begin)
        self._table_ends.append(end)
        self._has_columns.append(False)
        self._has_columns[number] = self._columns_of(number) is not None
        if not self._has_columns[number]:
            return
        # A line in columns is one row.
        spared = self._row_ends[end - 1] - self.row_of_line(begin) - (end - begin)
        for index in range(begin, end):
            self._row_ends[index] = self.row_of_line(index) + 1
        for index in range(end, len(self._row_ends)):
            self._row_ends[index] -= spared
        for index in range(begin, end):
            self._made.pop(index, None)
            self._long.pop(index, None)
        self._num_layouts += 1
        self._changed(begin)

    def _columns_of(self, number: int) -> list[FormattedLine] | None:
        """The lines of a table in columns; None when they do not fit."""
        found = self._columns.get(number)
        if found is None:
            lines = [self._text_of(index) for index in range(self._table_begins[number], self._table_ends[number])]
            found = align_table(lines, self.width, self._formatter, self._glyphs)
            if found is not None:
                if len(self._columns) >= _MOST_TABLES:
                    self._columns.pop(next(iter(self._columns)))
                self._columns[number] = found
        return found
