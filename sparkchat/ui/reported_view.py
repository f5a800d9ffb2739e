"""What another engine reports about an answer, as lines. It sends no step records: there are no positions to draw."""

from __future__ import annotations

from typing import Any

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit
from sparkchat.ui.stats import number
from sparkchat.ui.step_view import Row

Figures = dict[str, Any]


def count(value: int | None) -> str:
    """A reported count, or a dash when nothing was reported."""
    return "-" if value is None else str(value)


def reported_rows(figures: Figures, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The panel of an answer that another engine makes; ``figures`` is the newest ``figures`` event."""
    source = figures.get("source")
    lines = [
        (f"from {source}" if source else "no speculation figures reported", "title"),
        (f"{number(figures.get('tokens_per_second'))} tok/s", "text"),
        (f"acceptance length {number(figures.get('mean_acceptance_length'), 2)}", "text"),
        (f"accepted {count(figures.get('num_accepted'))} of {_drafts(figures)}", "text"),
        (f"steps {count(figures.get('num_steps'))}  tokens {count(figures.get('num_tokens'))}", "text"),
        ("confidence, survival and verify lengths: -", "dim"),
    ]
    return [[(fit(line, width, glyphs.ellipsis), style)] for line, style in lines][:height]


def _drafts(figures: Figures) -> str:
    """Engines differ in which drafts they count."""
    if figures.get("num_verified") is None and figures.get("num_proposed") is not None:
        return f"{figures['num_proposed']} proposed"
    return f"{count(figures.get('num_verified'))} verified"


def reported_parts(figures: Figures) -> list[tuple[int, str, str]]:
    """The same for the status bar: (priority, text, style)."""
    return [
        (2, f"{number(figures.get('tokens_per_second'))} tok/s", "text"),
        (3, f"acceptance {number(figures.get('mean_acceptance_length'), 2)}", "text"),
        (4, f"accepted {count(figures.get('num_accepted'))} of {_drafts(figures)}", "dim"),
    ]
