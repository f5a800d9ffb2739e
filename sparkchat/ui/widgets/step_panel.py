"""The live panel: the newest step position by position, the last steps as a strip, and the running means."""

from __future__ import annotations

from typing import Any, ClassVar

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.panel_view import panel_rows
from sparkchat.ui.stats import Snapshot
from sparkchat.ui.step_view import Row
from sparkchat.ui.widgets.rows import RowsWidget


class StepPanel(RowsWidget):
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "rows--title",
        "rows--strong",
        "rows--warning",
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
        self._info: dict[str, Any] = {}

    def show(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        """``info`` is the engine's INFO: the speed-up comes from its cost table."""
        self.snapshot, self._info = snapshot, info
        if self.display:
            self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        return [[(" ", "text"), *row] for row in panel_rows(self.snapshot, self._info, width - 2, height, self._glyphs)]
