"""Where one visible character ends and the next begins, for moving a cursor through typed text."""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"


def next_boundary(text: str, index: int) -> int:
    """End of the visible character that begins at ``index``."""
    flags = _is_flag_letter(text[index])
    index += 1
    if flags and index < len(text) and _is_flag_letter(text[index]):
        index += 1
    while index < len(text):
        if text[index - 1] == _JOINER or _extends(text[index]):
            index += 1
        else:
            break
    return index


def previous_boundary(text: str, index: int) -> int:
    """Start of the visible character that ends at ``index``."""
    start = max(0, index - 64)
    # Flags pair up from the left, so the walk begins at a character that cannot be inside one.
    while start > 0 and (_is_flag_letter(text[start]) or _extends(text[start]) or text[start - 1] == _JOINER):
        start -= 1
    boundary = start
    while (following := next_boundary(text, boundary)) < index:
        boundary = following
    return boundary


def _extends(character: str) -> bool:
    if character == _JOINER or "\ufe00" <= character <= "\ufe0f" or "\U0001f3fb" <= character <= "\U0001f3ff":
        return True
    return unicodedata.category(character) in ("Mn", "Me", "Mc")


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
