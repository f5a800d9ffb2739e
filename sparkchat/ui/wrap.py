"""Where a shown line breaks into rows; a break depends only on what is before it, so a growing line is wrapped on."""

from __future__ import annotations

from sparkchat.ui.safe_text import char_width, most_cells


def wrap(text: str, width: int, *, words: bool, start: int = 0) -> list[int]:
    """Offsets at which the rows of ``text[start:]`` begin, ``start`` first.

    A row holds at most ``width`` cells, plus trailing spaces that hang over the edge. With ``words`` it breaks after
    a space or beside a wide character when there is one, else anywhere. A character is never parted from the
    zero-width ones that follow it, nor from a vowel sign that has a cell on some terminals.
    """
    width = max(width, 2)
    starts = [start]
    # Both give the same breaks for ASCII; the first is the quick one.
    step = _ascii_row if text.isascii() else _wide_row
    while (following := step(text, starts[-1], width, words)) is not None:
        starts.append(following)
    return starts


def _ascii_row(text: str, start: int, width: int, words: bool) -> int | None:
    edge = start + width
    if len(text) <= edge:
        return None
    if words and (after_space := text.rfind(" ", start, edge + 1) + 1) > start:
        return after_space if after_space < len(text) else None
    return edge


def _wide_row(text: str, start: int, width: int, words: bool) -> int | None:
    used, candidate, base, previous_wide = 0, 0, start, False
    for index in range(start, len(text)):
        character = text[index]
        cells = 1 if character.isascii() else most_cells(character)
        if cells and (character.isascii() or char_width(character)):
            base = index
            if words and (cells == 2 or previous_wide):
                candidate = index
        if used + cells > width:
            if character == " " and words:
                return index + 1 if index + 1 < len(text) else None
            return candidate if words and candidate > start else base if base > start else max(index, start + 1)
        if character == " ":
            candidate = index + 1
        if base == index:
            previous_wide = cells == 2
        used += cells
    return None
