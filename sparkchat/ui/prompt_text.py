"""The text of the prompt inside its widget: characters that a text area would swallow stand in for themselves.

The widget measures and wraps text itself, so a control character must be one cell wide in it. Such characters are kept
as private-use characters while they are edited, drawn as visible signs, and turned back when the text is sent.
"""

from __future__ import annotations

import re

from rich.cells import get_character_cell_size, split_graphemes
from textual.events import Key

_BASE = 0x100000
"""Start of a private-use plane; a character keeps its own number above it."""
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_STAND_IN = re.compile("[\U00100000-\U00102069]")
_CLUSTER = re.compile("[\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U0001f1e6-\U0001f1ff]")
FILLER = "\u034f"
"""Zero cells wide; keeps the character positions of the drawn line those of the stored one, until it is drawn."""


def typed_character(key: Key) -> str | None:
    """What a key writes; None when it does something else.

    Python calls joiners and all spaces but one unprintable, yet input methods type them: the ideographic space of
    Japanese, the non-joiner of Persian, the joiner within an emoji.
    """
    character = key.character
    if character is None or key.key.startswith("alt+"):
        return None
    return character if character.isprintable() or character >= "\u00a0" else None


def encoded(text: str) -> str:
    """``text`` as the widget keeps it: same length, every character visible."""
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return _HIDDEN.sub(lambda m: chr(_BASE + ord(m[0])), text)


def decoded(text: str) -> str:
    """The text that was typed or pasted."""
    return _STAND_IN.sub(lambda m: chr(ord(m[0]) - _BASE), text)


def shown_line(line: str) -> str:
    """The line as it is drawn: as many characters and cells as the widget counts, nothing left to the terminal."""
    line = _STAND_IN.sub(_sign, line)
    if not _CLUSTER.search(line):
        return line
    shown: list[str] = []
    for start, end, cells in split_graphemes(line)[0]:
        shown.append(_plain_cluster(line[start:end], cells))
    return "".join(shown)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0]) - _BASE
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\u2426"


def _plain_cluster(cluster: str, cells: int) -> str:
    """The first character of a joined emoji, with fillers for the rest: every terminal draws that the same."""
    if len(cluster) == 1:
        code = ord(cluster)
        if 0x1F1E6 <= code <= 0x1F1FF:
            return chr(ord("A") + code - 0x1F1E6)
        return FILLER if _CLUSTER.match(cluster) and cells == 0 else cluster
    base = cluster[0]
    if not _CLUSTER.search(cluster[1:]):
        return cluster
    missing = cells - get_character_cell_size(base)
    rest = [" "] * missing + [FILLER] * (len(cluster) - 1 - missing)
    return base + "".join(rest)
