"""The one-row places: title, badge and status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit, one_line, text_width
from sparkchat.ui.step_view import Row
from sparkchat.ui.widgets.rows import RowsWidget

Part = tuple[int, str, str]
"""(importance, text, style); the least important parts go first when the row is short. 0 always stays."""


def fitting_parts(parts: Sequence[Part], width: int, gap: int = 2) -> list[Part]:
    """The parts that fit into ``width``, in their order."""
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and sum(text_width(text) + gap for _, text, _ in kept) - gap > width:
        least = max(kept, key=lambda part: part[0])
        if least[0] == 0:
            break
        kept.remove(least)
    return kept


class PartsBar(RowsWidget):
    """Parts from left to right, as many as fit."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--strong", "rows--dim", "rows--warning"}

    def __init__(self, glyphs: Glyphs, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._glyphs = glyphs
        self._parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """What is shown when there is room enough."""
        return "  ".join(text for _, text, _ in self._parts)

    def show(self, parts: Sequence[Part]) -> None:
        safe = tuple(
            (rank, one_line(text, self._glyphs.bullet.isascii()), style) for rank, text, style in parts if text
        )
        if safe != self._parts:
            self._parts = safe
            self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        row: Row = []
        for _, text, style in fitting_parts(self._parts, width - 1):
            row.append((" " if not row else "  ", "text"))
            row.append((text, style))
        used = sum(text_width(text) for text, _ in row)
        if used > width and row:
            text, style = row[-1]
            row[-1] = (fit(text, max(width - used + text_width(text), 0), self._glyphs.ellipsis), style)
        return [row]


class Badge(PartsBar):
    """One warning that stays as long as its reason does; takes no room without one."""

    def show_reason(self, reason: str | None) -> None:
        if self.display != bool(reason):
            self.display = bool(reason)
        self.show([(0, f"{self._glyphs.warning} {reason}", "warning")] if reason else [])
