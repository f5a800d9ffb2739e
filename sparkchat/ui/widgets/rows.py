"""A widget whose picture is a list of styled rows, made once per change and drawn line by line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.color import Color as TerminalColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.geometry import Region
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip
from textual.widget import Widget

from sparkchat.ui.safe_text import text_width
from sparkchat.ui.step_view import Row


class WholeStrip(Strip):
    """A strip that does not remember itself.

    The library's own keeps what it was divided into, and undivided that is itself: a cycle of thirty objects a row,
    which only Python's collector frees, and the collector stops the screen for twenty milliseconds to do so.
    """

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        cuts = list(cuts)
        return [self] if cuts == [self.cell_length] else super().divide(cuts)

    def apply_filter(self, filter: LineFilter, background: Color) -> Strip:
        key = (filter, background)
        found = self._filter_cache.get(key)
        if found is None:
            found = WholeStrip(filter.apply(self._segments, background), self._cell_length)
            self._filter_cache[key] = found
        return found


_BAR_BACK, _BAR = TerminalColor.parse("#555555"), TerminalColor.parse("bright_magenta")


class WholeScrollBar(ScrollBar):
    """Asked for anew at every update of a text that grows, and then mostly the same: it is made when it changes."""

    _cells: list[Segment] | None = None
    _strips: Sequence[Strip] = ()

    def render_lines(self, crop: Region) -> list[Strip]:
        bar = self.render()
        if not isinstance(bar, ScrollBarRender) or not self.vertical:
            return super().render_lines(crop)
        assert isinstance(bar.style, Style)
        cells = self.renderer.render_bar(
            size=self.size.height,
            virtual_size=bar.virtual_size,
            window_size=bar.window_size,
            position=bar.position,
            thickness=self.size.width,
            back_color=bar.style.bgcolor or _BAR_BACK,
            bar_color=bar.style.color or _BAR,
        ).segments
        if cells != self._cells:
            base = self.rich_style
            styled = [Segment(text, base + style if style else base) for text, style, _ in cells]
            self._cells, self._strips = cells, [WholeStrip([cell], self.size.width) for cell in styled]
        return finished_strips(self, [self._strips[y] for y in crop.line_range], crop)


def finished_strips(widget: Widget, strips: list[Strip], crop: Region) -> list[Strip]:
    """Strips of the whole width of ``widget`` as the compositor wants them: colours filtered, cut to ``crop``."""
    background = widget.background_colors[1]
    for line_filter in widget.get_line_filters():
        strips = [strip.apply_filter(line_filter, background) for strip in strips]
    return [_cropped(strip, crop) for strip in strips]


def _cropped(strip: Strip, crop: Region) -> Strip:
    # A strip remembers what was cut from it; the whole of it would be itself, a cycle that only the collector frees.
    return strip if crop.x == 0 and crop.right == strip.cell_length else strip.crop_extend(crop.x, crop.right, None)


def row_strip(segments: list[Segment], width: int, style: Style) -> Strip:
    """One row of exactly ``width`` cells, filled up in ``style``."""
    used = sum(text_width(segment.text) for segment in segments)
    if used < width:
        segments.append(Segment(" " * (width - used), style))
    strip = WholeStrip(segments, max(used, width))
    return strip if used <= width else strip.crop(0, width)


class RowsWidget(Widget):
    """Subclasses give :meth:`build`; style names are looked up as component classes ``rows--NAME``."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: list[Row] | None = None
        self._styles_by_name: dict[str, Style] = {}

    def build(self, width: int, height: int) -> list[Row]:
        raise NotImplementedError

    def redraw(self) -> None:
        """Make the rows again; the size of the widget stays."""
        self._rows = None
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles_by_name.clear()

    def on_resize(self) -> None:
        self.redraw()

    def render_lines(self, crop: Region) -> list[Strip]:
        # No border and no padding, so the library's own line cache would only be a second one to fill.
        return finished_strips(self, [self.render_line(y) for y in crop.line_range], crop)

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        if self._rows is None:
            self._rows = self.build(width, height)
        row = self._rows[y] if y < len(self._rows) else []
        segments = [Segment(text, self._style(name)) for text, name in row if text]
        return row_strip(segments, width, self._style("text"))

    def _style(self, name: str) -> Style:
        style = self._styles_by_name.get(name)
        if style is None:
            style = self.rich_style
            if f"rows--{name}" in self.COMPONENT_CLASSES:
                style += self.get_component_rich_style(f"rows--{name}", partial=True)
            self._styles_by_name[name] = style
        return style
