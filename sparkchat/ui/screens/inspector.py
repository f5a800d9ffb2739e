"""The steps of the newest answer, one at a time, with everything that was recorded of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.inspection import inspection_rows
from sparkchat.ui.step_log import StepRecord
from sparkchat.ui.step_view import Row
from sparkchat.ui.widgets.step_panel import StepPanel

MOST_ROWS = 60
"""No picture of a step is scrolled further."""


class InspectorPanel(StepPanel):
    """Draws one recorded step."""

    def __init__(self, glyphs: Glyphs, records: Sequence[StepRecord], index: int | None, notice: str | None) -> None:
        super().__init__(glyphs, id="inspector")
        self._notice = notice
        self._records = records
        self._offset = 0
        self.index = max(len(records) - 1, 0) if index is None else index

    def move(self, by: int) -> None:
        self.index = min(max(self.index + by, 0), max(len(self._records) - 1, 0))
        self._notice = None
        self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        return inspection_rows(self._records, self.index, width, height, self._glyphs, self._offset, self._notice)

    def scroll_by(self, rows: int) -> None:
        self._offset = max(0, min(self._offset + rows, MOST_ROWS))
        self.redraw()


class InspectorScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f4", "dismiss", "close"),
        Binding("left", "move(-1)", "step before"),
        Binding("right", "move(1)", "next step"),
        Binding("up", "scroll(-1)", "up, where it does not fit"),
        Binding("down", "scroll(1)", "down"),
        Binding("pageup", "move(-10)", "ten steps back"),
        Binding("pagedown", "move(10)", "ten steps on"),
        Binding("home", "move(-1000000)", "first step"),
        Binding("end", "move(1000000)", "last step"),
    ]

    def __init__(
        self, glyphs: Glyphs, records: Sequence[StepRecord], index: int | None = None, notice: str | None = None
    ) -> None:
        """``index`` is the step to begin with, the newest when it is None; ``notice`` is said until one moves on."""
        super().__init__()
        self._panel = InspectorPanel(glyphs, records, index, notice)

    def compose(self) -> ComposeResult:
        yield self._panel

    def action_move(self, by: int) -> None:
        self._panel.move(by)

    def action_scroll(self, rows: int) -> None:
        self._panel.scroll_by(rows)
