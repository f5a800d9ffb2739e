"""Pictures of the screen as text: the characters, and for every row the runs of styles, with a key of the styles.

A picture that differs from the kept one fails; ``UPDATE_PICTURES=1 pytest tests/ui/test_pictures.py`` keeps new ones.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from rich.segment import Segment
from rich.style import Style

from sparkchat.ui.safe_text import text_width

FOLDER = Path(__file__).with_name("snapshots")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ATTRIBUTES = ("bold", "dim", "italic", "underline", "strike", "reverse")


def picture(app: Any) -> str:
    keys: dict[str, str] = {}
    rows: list[str] = []
    styles: list[str] = []
    for strip in app.screen._compositor.render_strips():
        rows.append(strip.text.rstrip())
        styles.append(_runs(list(strip), keys))
    key = [f"{letter} = {name}" for name, letter in keys.items()]
    return "\n".join([*rows, "", "styles", *styles, "", *key]) + "\n"


def _runs(segments: list[Segment], keys: dict[str, str]) -> str:
    """``a12 b3``: twelve cells of style a, then three of style b."""
    runs: list[tuple[str, int]] = []
    for text, style, _ in segments:
        name = _name(style)
        letter = keys.setdefault(name, _LETTERS[len(keys)])
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + text_width(text))
        elif text:
            runs.append((letter, text_width(text)))
    return " ".join(f"{letter}{count}" for letter, count in runs)


def _name(style: Style | None) -> str:
    if style is None:
        return "default"
    colors = [each.name if each is not None else "default" for each in (style.color, style.bgcolor)]
    return " ".join([f"{colors[0]} on {colors[1]}", *(name for name in _ATTRIBUTES if getattr(style, name))])


def check(app: Any, name: str) -> None:
    """Compare the screen with the kept picture of that name."""
    path, shown = FOLDER / f"{name}.txt", picture(app)
    if os.environ.get("UPDATE_PICTURES"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if shown != kept:
        lines = difflib.unified_diff(kept.splitlines(), shown.splitlines(), "kept", "shown", lineterm="", n=1)
        raise AssertionError(f"{name} looks different:\n" + "\n".join(lines))
