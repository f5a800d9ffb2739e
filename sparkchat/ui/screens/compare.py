"""The last question under every mode, side by side, while it is being answered and afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from sparkchat.ui.compare import Comparison
from sparkchat.ui.compare_view import HEAD_ROWS, compare_rows, num_text_rows
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.step_view import Row
from sparkchat.ui.widgets.step_panel import StepPanel


class ComparePanel(StepPanel):
    """Draws one comparison; follows the ends of the texts until it is scrolled."""

    def __init__(self, glyphs: Glyphs, comparison: Comparison) -> None:
        super().__init__(glyphs, id="comparison")
        self.comparison = comparison
        self._first = 0
        self._scroll: int | None = None

    def scroll_by(self, rows: int) -> None:
        last = max(num_text_rows(self.comparison, self.size.width) - self.room, 0)
        at = last if self._scroll is None else self._scroll
        at = max(0, min(at + rows, last))
        is_over = self.comparison.current_run is None
        self._scroll = at if at < last or is_over else None
        self.redraw()

    @property
    def room(self) -> int:
        return max(self.size.height - HEAD_ROWS - 3, 1)

    def turn(self, by: int) -> None:
        self._first = max(0, min(self._first + by, len(self.comparison.runs) - 1))
        self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        return compare_rows(self.comparison, self._first, self._scroll, width, height, self._glyphs)


class CompareScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f5", "close", "stop, then close"),
        Binding("up", "scroll(-1)", "up"),
        Binding("down", "scroll(1)", "down"),
        Binding("pageup", "scroll(-10)", "ten rows up"),
        Binding("pagedown", "scroll(10)", "ten rows down"),
        Binding("home", "scroll(-1000000)", "start"),
        Binding("end", "scroll(1000000)", "end"),
        Binding("left", "turn(-1)", "column before"),
        Binding("right", "turn(1)", "next column"),
    ]

    def __init__(self, glyphs: Glyphs, comparison: Comparison, stop: Callable[[], object]) -> None:
        super().__init__()
        self._panel = ComparePanel(glyphs, comparison)
        self._stop = stop

    def compose(self) -> ComposeResult:
        yield self._panel

    def refresh_comparison(self) -> None:
        self._panel.redraw()

    def action_close(self) -> None:
        if self._panel.comparison.current_run is not None:
            self._stop()
            self._panel.redraw()
        else:
            self.dismiss()

    def action_scroll(self, rows: int) -> None:
        self._panel.scroll_by(rows)

    def action_turn(self, by: int) -> None:
        self._panel.turn(by)
