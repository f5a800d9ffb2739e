"""The live panel: the newest step position by position, the last steps as a strip, and the running means."""

from __future__ import annotations

from typing import ClassVar

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.stats import Snapshot
from sparkchat.ui.step_view import Row, panel_rows
from sparkchat.ui.widgets.rows import RowsWidget


class StepPanel(RowsWidget):
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "rows--title",
        "rows--dim",
        "rows--bar",
        "rows--tick",
        "rows--cut",
        "rows--accepted",
        "rows--rejected",
        "rows--rejected-text",
        "rows--bonus",
        "rows--trimmed",
        "rows--unverified",
    }

    def __init__(self, glyphs: Glyphs, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._glyphs = glyphs
        self.snapshot = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self.display:
            self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        return [[(" ", "text"), *row] for row in panel_rows(self.snapshot, width - 2, height, self._glyphs)]
