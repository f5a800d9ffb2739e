"""Every widget begins in its own column, whatever the terminal makes of the text to its left.

Terminals disagree about the cells of some characters: the vowel signs of Indian scripts take one in xterm, tmux and
GNOME's terminal, and none in others. Behind such a text the library's picture of the whole screen goes on where the
cursor happens to be, and the panel beside it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.segment import Segment
from textual._compositor import LayoutUpdate
from textual.strip import Strip


def at_columns(update: RenderableType | None) -> RenderableType | None:
    """A picture of the whole screen with the cursor moved before each part of a row; anything else as it is."""
    if isinstance(update, LayoutUpdate):
        update.strips = [list(_placed(line)) for line in update.strips]
    return update


def _placed(line: Iterable[Strip]) -> Iterator[Strip]:
    column = 1
    for strip in line:
        if column > 1:
            yield Strip([Segment(f"\x1b[{column}G")], 0)
        yield strip
        column += strip.cell_length
