"""The conversation: one line-API widget, so that an update costs what is new and what is on the screen, no more."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.cache import LRUCache
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from sparkchat.ui.document import Section, Syntax
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.highlight import highlight
from sparkchat.ui.line import Line
from sparkchat.ui.markdown import Piece
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.widgets.rows import WholeScrollBar, finished_strips, row_strip

Row = tuple[Line, int] | None
"""A line and the number of one of its rows; None is an empty row."""

_ATTRIBUTES = {
    "bold": Style(bold=True),
    "italic": Style(italic=True),
    "strike": Style(strike=True),
}
_ORIGIN_STYLES = {
    "draft": "token-draft",
    "bonus": "token-bonus",
    "corrected": "token-corrected",
    "plain": "token-plain",
    "prefill": "token-plain",
}


class Transcript(ScrollView, can_focus=False):
    """Questions and answers as rows; follows the end of the text only while the end is in view."""

    ALLOW_SELECT = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"transcript--{name}"
        for name in (
            *("code", "heading", "quote", "frame", "bullet", "control", "user", "mark", "thinking", "notice", "error"),
            *("footer", "comment", "string", "number", "keyword"),
            *("token-draft", "token-bonus", "token-corrected", "token-plain", "token-chosen"),
        )
    }

    class Clicked(Message):
        """The character at ``offset`` of a section was clicked; ``code`` is the block whose edge it is, if any."""

        def __init__(self, section: Section, offset: int, code: str | None) -> None:
            self.section = section
            self.offset = offset
            self.code = code
            super().__init__()

    def __init__(self, glyphs: Glyphs, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.glyphs = glyphs
        self._token: tuple[Section, int, int] | None = None
        self.sections: list[Section] = []
        self.num_rows = 0
        self.is_following = True
        self.show_origins = False
        self._first_rows: list[int] = []
        self._styles_by_key: dict[str, Style] = {}
        self._base: Style | None = None
        self._wrap_width = 78
        # Only what is in view: strips are heavy, and one kept for every row ever shown makes long chats slow.
        self._drawn: LRUCache[tuple[Section, int, int, int, int], Strip] = LRUCache(128)

    # Content

    def add_section(self, syntax: Syntax, style: str = "", *, margin: str = "", gap: bool = True) -> Section:
        """Start a new part below everything else; ``gap`` leaves an empty row above it."""
        section = Section(syntax, style, self._wrap_width, self.glyphs, margin)
        section.has_gap = gap and bool(self.sections)
        self.sections.append(section)
        return section

    def put_back(self, sections: list[Section]) -> None:
        """Show sections again that were made here before, below everything else."""
        for section in sections:
            if section.width != self._wrap_width:
                section.rewrap(self._wrap_width)
            section.num_shown = section.first_changed = 0
            self.sections.append(section)

    def clear(self) -> None:
        self.sections.clear()
        self._first_rows.clear()
        self._drawn.clear()
        self.is_following = True
        self.update_rows()

    def update_rows(self, *, all_rows: bool = False) -> None:
        """Take over what has changed in the sections and redraw what is in view."""
        keep = 0 if all_rows else self._first_changed_section()
        changed_row = self._first_changed_row(keep)
        row = self._end_row(keep - 1) if keep else 0
        del self._first_rows[keep:]
        for section in self.sections[keep:]:
            self._first_rows.append(row)
            row += _height(section)
            section.mark_shown()
        self.num_rows = row
        self._set_height(row)
        if self.is_following:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True, immediate=True)
            self.refresh()
        elif changed_row < self.scroll_offset.y + self.size.height:
            self.refresh()

    def _set_height(self, num_rows: int) -> None:
        # Assigning ``virtual_size`` would lay out the whole screen again at every update; only the scroll bar changes.
        size = Size(self.size.width, num_rows)
        if size != self.virtual_size:
            self.set_reactive(Widget.virtual_size, size)
            self._scroll_update(size)

    def _first_changed_section(self) -> int:
        index = len(self.sections)
        while index and self.sections[index - 1].is_changed:
            index -= 1
        return index

    def _first_changed_row(self, keep: int) -> int:
        if keep >= len(self._first_rows):
            return self.num_rows
        section = self.sections[keep]
        if section.is_folded or not section.num_shown:
            return self._first_rows[keep]
        return self._text_row(keep) + section.row_of_line(min(section.first_changed, section.num_shown))

    def _text_row(self, number: int) -> int:
        """The first row of a section's text."""
        return self._first_rows[number] + self.sections[number].has_gap

    def _end_row(self, number: int) -> int:
        return self._first_rows[number] + _height(self.sections[number])

    def row_at(self, y: int) -> Row:
        """What lies in a row of the whole conversation."""
        number = bisect_right(self._first_rows, y) - 1
        if number < 0 or y >= self.num_rows:
            return None
        section, row = self.sections[number], y - self._text_row(number)
        if row < 0 or section.is_folded:
            return None
        index, row = section.place(row)
        return section.line(index), row

    # Scrolling

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.is_following = True
        self.scroll_to(y=self.max_scroll_y, animate=False, force=True, immediate=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.is_following = round(new_value) >= self.max_scroll_y

    def on_resize(self, event: events.Resize) -> None:
        width = max(self.size.width - 1, 4)
        self._drawn.grow(max(128, 2 * self.size.height))
        if width == self._wrap_width and self.num_rows:
            if self.is_following:
                self.follow()
            return
        anchor = self._text_at(self.scroll_offset.y)
        following = self.is_following
        self._wrap_width = width
        for section in self.sections:
            section.rewrap(width)
        self.update_rows(all_rows=True)
        if following:
            self.follow()
        elif anchor is not None and (y := self._row_of(*anchor)) is not None:
            self.scroll_to(y=y, animate=False, force=True, immediate=True)

    def _text_at(self, y: int) -> tuple[Section, int] | None:
        """(section, offset) of the first text at or shortly below a row."""
        for index in range(max(y, 0), min(y + 3, self.num_rows)):
            if (row := self.row_at(index)) is not None:
                line, number = row
                return line.section, line.source_offset(number, 0)
        return None

    def mark_token(self, token: tuple[Section, int, int] | None) -> None:
        """Mark the characters start to end of a section, and bring them into view; None marks nothing."""
        self._token = token
        self._drawn.clear()
        if token is not None:
            y = self._row_of(token[0], token[1])
            if y is not None and not self.scroll_offset.y <= y < self.scroll_offset.y + self.size.height:
                self.scroll_to(y=y - self.size.height // 2, animate=False, immediate=True)
        self.refresh()

    def _row_of(self, section: Section, offset: int) -> int | None:
        """The row that shows the character at ``offset``; None when none does."""
        index = section.line_of(offset)
        if index < 0 or section.is_folded or section not in self.sections:
            return None
        first = self._text_row(self.sections.index(section)) + section.row_of_line(index)
        return first + section.line(index).row_of(offset)

    # Mouse

    def on_click(self, event: events.Click) -> None:
        row = self.row_at(event.y + self.scroll_offset.y)
        if row is None or self.text_selection is not None:
            return
        line, number = row
        offset = line.source_offset(number, self._column(line, number, event.x))
        code = line.section.code_at(line)
        self.post_message(self.Clicked(line.section, offset, code))

    def text_offset_at(self, x: int, y: int, *, is_end: bool = False) -> Offset | None:
        """(character of the row, row of the conversation) at a cell of the screen, for a selection; None without text.

        A cell without text stands for the text below it, or above it where ``is_end`` says that a selection ends there.
        The library's way is to write this into the style of every piece of every row, so that each is a style of its
        own, of which its caches keep sixteen thousand.
        """
        region = self.region
        inside = min(max(y, region.y), region.bottom - 1) - region.y
        place = inside + self.scroll_offset.y
        at = min(place, self.num_rows - 1)
        step = -1 if is_end or place > at else 1
        while (row := self.row_at(at)) is None:
            at += step
            if not 0 <= at < self.num_rows:
                return None
        cell = min(max(x, region.x), region.right - 1) - region.x
        if at != place:
            cell = 0 if at > place else self.size.width
        return Offset(self._column(*row, cell), at)

    @staticmethod
    def _column(line: Line, number: int, cell: int) -> int:
        """The character of a row that lies at a cell."""
        text = "".join(piece.text for piece in (*line.margin(number), *line.row_pieces(number)))
        used = 0
        for column, character in enumerate(text):
            used += text_width(character)
            if used > cell:
                return column
        return len(text)

    # Drawing

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        if self._vertical_scrollbar is None:
            bar = WholeScrollBar(vertical=True, name="vertical", thickness=self.scrollbar_size_vertical)
            self._vertical_scrollbar = bar
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self.forget_drawn()

    def forget_drawn(self) -> None:
        """Draw every row afresh (other colours, other token marks)."""
        self._styles_by_key.clear()
        self._base = None
        self._drawn.clear()
        self.refresh()

    def render_lines(self, crop: Region) -> list[Strip]:
        return finished_strips(self, [self.render_line(y) for y in crop.line_range], crop)

    def render_line(self, y: int) -> Strip:
        width = self.region.width
        row = y + self.scroll_offset.y
        number = bisect_right(self._first_rows, row) - 1
        inside = row - self._text_row(number) if number >= 0 and row < self.num_rows else -1
        if inside < 0 or self.sections[number].is_folded:
            return row_strip([], width, self.base_style)
        section = self.sections[number]
        index, inside = section.place(inside)
        selected = self.text_selection.get_span(row) if self.text_selection is not None else None
        if selected is not None:
            return self._draw(section.line(index), inside, width, selected)
        key = (section, index, inside, section.version_of(index), width)
        strip = self._drawn.get(key)
        if strip is None:
            line = section.line(index)
            strip = self._draw(line, inside, width, None)
            self._drawn[(section, index, inside, line.version, width)] = strip
        return strip

    def _draw(self, line: Line, number: int, width: int, selected: tuple[int, int] | None) -> Strip:
        segments = [Segment(text, self._style(key)) for text, key in self._runs(line, number) if text]
        if selected is not None:
            segments = self._with_selection(segments, *selected)
        return row_strip(segments, width, self.base_style)

    def _runs(self, line: Line, number: int) -> Iterator[tuple[str, str]]:
        for piece in line.margin(number):
            yield piece.text, piece.style
        for piece in line.row_pieces(number):
            if self.show_origins and line.section.origins:
                yield from self._by_origin(line, piece)
            elif line.formatted.kind == "code":
                yield from _by_syntax(piece)
            else:
                yield piece.text, piece.style

    def _by_origin(self, line: Line, piece: Piece) -> Iterator[tuple[str, str]]:
        for text, style, start in self._origin_runs(line, piece):
            yield from self._with_token(line, text, style, start)

    def _with_token(self, line: Line, text: str, style: str, start: int) -> Iterator[tuple[str, str]]:
        """The part of a run that belongs to the chosen token, marked."""
        token = self._token
        if token is None or token[0] is not line.section:
            yield text, style
            return
        low = min(max(token[1] - start, 0), len(text))
        high = min(max(token[2] - start, low), len(text))
        yield text[:low], style
        yield text[low:high], f"{style} token-chosen"
        yield text[high:], style

    def _origin_runs(self, line: Line, piece: Piece) -> Iterator[tuple[str, str, int]]:
        """(text, style, offset in the section) of the parts of a piece that one origin made."""
        if len(piece.text) != piece.end - piece.start:
            origin, _ = line.section.origin_at(line.start + piece.start)
            yield piece.text, f"{piece.style} {_ORIGIN_STYLES.get(origin, '')}".strip(), line.start + piece.start
            return
        at = piece.start
        while at < piece.end:
            origin, end = line.section.origin_at(line.start + at)
            stop = max(at + 1, min(end - line.start, piece.end))
            text = piece.text[at - piece.start : stop - piece.start]
            yield text, f"{piece.style} {_ORIGIN_STYLES.get(origin, '')}".strip(), line.start + at
            at = stop

    @property
    def base_style(self) -> Style:
        if self._base is None:
            self._base = self.rich_style
        return self._base

    def _style(self, key: str) -> Style:
        style = self._styles_by_key.get(key)
        if style is None:
            style = self.base_style
            for name in key.split():
                style += _ATTRIBUTES.get(name) or self.get_component_rich_style(f"transcript--{name}", partial=True)
            self._styles_by_key[key] = style
        return style

    def _with_selection(self, whole: list[Segment], start: int, end: int) -> list[Segment]:
        style = self.screen.get_component_rich_style("screen--selection")
        segments: list[Segment] = []
        at = 0
        for text, own, _ in whole:
            low = min(max(start - at, 0), len(text))
            high = len(text) if end == -1 else min(max(end - at, low), len(text))
            for part, is_selected in ((text[:low], False), (text[low:high], True), (text[high:], False)):
                if part:
                    segments.append(Segment(part, (own or Style()) + style if is_selected else own))
            at += len(text)
        return segments

    # Selection

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The source text under the selection: marks included, no line breaks of ours, no margins."""
        first = max(selection.start.y if selection.start else 0, 0)
        last = min(selection.end.y if selection.end else self.num_rows - 1, self.num_rows - 1)
        parts: list[str] = []
        for number, section in enumerate(self.sections):
            low, high = max(first, self._text_row(number)), min(last, self._end_row(number) - 1)
            if low <= high and not section.is_folded:
                begin = self._selected_offset(selection, low, 0)
                parts.append(section.slice(begin, self._selected_offset(selection, high, 1)))
        return "\n".join(parts), "\n"

    def _selected_offset(self, selection: Selection, y: int, side: int) -> int:
        """Where the selected part of a row begins (side 0) or ends (side 1) in its section's text."""
        row = self.row_at(y)
        assert row is not None
        column = (selection.get_span(y) or (0, -1))[side]
        return row[0].source_offset(row[1], column if column >= 0 else 1 << 30)


def _height(section: Section) -> int:
    return section.has_gap + (0 if section.is_folded else section.num_rows)


def _by_syntax(piece: Piece) -> Iterator[tuple[str, str]]:
    at = 0
    for start, end, name in highlight(piece.text):
        yield piece.text[at:start], piece.style
        yield piece.text[start:end], f"{piece.style} {name}"
        at = end
    yield piece.text[at:], piece.style
