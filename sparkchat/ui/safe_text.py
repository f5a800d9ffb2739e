"""Text from a model, a user or a file is never terminal control: what is shown, and how wide it is.

Only the *shown* text is changed here; stored, copied, piped and exported text stays as it was.

Widths are counted per code point, and characters whose width depends on the terminal (joiners, variation
selectors, skin tones, flag letters) are left out or spelt, so that every terminal agrees with the count.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from rich.cells import get_character_cell_size

TAB = "    "
_ZERO_WIDTH_JOINER = "\u200d"
# Dropped from the screen: they only ask the terminal for another look, and terminals disagree about the width.
_DROPPED = frozenset({_ZERO_WIDTH_JOINER, "\ufe0e", "\ufe0f"})
_SKIN_TONES = "\U0001f3fb-\U0001f3ff"
_FLAG_LETTERS = "\U0001f1e6-\U0001f1ff"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LINE_ENDS = "\u2028\u2029"
_SURROGATES = "\ud800-\udfff"
SPECIAL = re.compile(
    f"[\x00-\x09\x0b-\x1f\x7f-\x9f{_BIDI}{_LINE_ENDS}{_SURROGATES}\u200d\ufe0e\ufe0f{_SKIN_TONES}{_FLAG_LETTERS}]"
)
"""Characters that are not shown as themselves."""

_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}{_LINE_ENDS}{_SURROGATES}]")


def shown(character: str, before: str, ascii_only: bool = False) -> str:
    """What stands on the screen for one :data:`SPECIAL` character that follows ``before``."""
    code = ord(character)
    if character == "\t":
        return TAB
    if character in _DROPPED:
        return ""
    if 0x1F1E6 <= code <= 0x1F1FF:
        return chr(ord("A") + code - 0x1F1E6)
    if 0x1F3FB <= code <= 0x1F3FF and before and char_width(before) == 2:
        return ""
    if code < 0x20:
        return f"^{chr(code + 0x40)}" if ascii_only else chr(0x2400 + code)
    if code == 0x7F:
        return "^?" if ascii_only else "\u2421"
    if code < 0x100:
        return f"<{code:02X}>"
    return f"<U+{code:04X}>"


def visible(text: str, ascii_only: bool = False) -> str:
    """``text`` with every control character spelt out; newlines stay."""
    if not SPECIAL.search(text):
        return text
    return SPECIAL.sub(lambda m: shown(m[0], text[m.start() - 1 : m.start()], ascii_only), text)


def one_line(text: str, ascii_only: bool = False) -> str:
    """``text`` for a single-line place (status bar, badge, title): newlines become spaces."""
    return visible(" ".join(text.split("\n")), ascii_only)


@lru_cache(maxsize=8192)
def char_width(character: str) -> int:
    """Cells of one shown character: 0, 1 or 2."""
    return get_character_cell_size(character)


@lru_cache(maxsize=8192)
def most_cells(character: str) -> int:
    """Cells of one shown character on the terminal that gives it most (see ``columns.py``)."""
    return max(char_width(character), unicodedata.category(character) == "Mc")


def text_width(text: str) -> int:
    """Cells of a shown text (one that :func:`visible` has passed)."""
    if text.isascii():
        return len(text)
    return sum(map(char_width, text))


def fit(text: str, width: int, ellipsis: str = "…") -> str:
    """``text`` cut or padded to exactly ``width`` cells."""
    if width <= 0:
        return ""
    have = text_width(text)
    if have <= width:
        return text + " " * (width - have)
    room = width - len(ellipsis)
    kept, used = [], 0
    for character in text:
        cells = char_width(character)
        if used + cells > room:
            break
        kept.append(character)
        used += cells
    return "".join(kept) + ellipsis + " " * (room - used)


def in_columns(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Two columns; where they leave the right one too little room, what belongs on the right comes below."""
    left = max((text_width(first) for first, _ in rows), default=0)
    if width - left - 2 < 30:
        return "\n".join(f"{first}\n  {second}" if first else "" for first, second in rows)
    lines = []
    for first, second in rows:
        begin, *rest = textwrap.wrap(second, width - left - 2, break_on_hyphens=False) or [""]
        lines.append(f"{first}{' ' * (left - text_width(first))}  {begin}".rstrip())
        lines += [" " * (left + 2) + each for each in rest]
    return "\n".join(lines)


class TerminalFilter:
    """Makes a stream of model text safe for a terminal that scrolls: controls spelt out, CR LF kept as a line end."""

    def __init__(self, ascii_only: bool = False) -> None:
        self._ascii_only = ascii_only
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        # A lone CR at the end may be the first half of CR LF.
        self._held = "\r" if text.endswith("\r") else ""
        text = text[: len(text) - len(self._held)].replace("\r\n", "\n")
        return _CONTROL.sub(lambda m: shown(m[0], "", self._ascii_only), text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return _CONTROL.sub(lambda m: shown(m[0], "", self._ascii_only), held)
