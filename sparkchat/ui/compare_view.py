"""The answers of a comparison beside each other, as rows of styled text: numbers on top, the texts below."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from sparkchat.ui.compare import Comparison, Run
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit, one_line, text_width, visible
from sparkchat.ui.stats import number
from sparkchat.ui.step_view import Row
from sparkchat.ui.wrap import wrap

COLUMN_WIDTH = 26
"""Narrower columns are not put side by side."""
KEYS = "up/down: scroll  left/right: column  esc: stop, then close"
HEAD_ROWS = 4


def columns_shown(num_runs: int, width: int) -> int:
    return max(1, min(num_runs, (width + 1) // (COLUMN_WIDTH + 1)))


def compare_rows(
    comparison: Comparison, first: int, scroll: int | None, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """``first`` is the leftmost column, ``scroll`` the first text row, or None to stand at the end of each text."""
    count = columns_shown(len(comparison.runs), width)
    first = max(0, min(first, len(comparison.runs) - count))
    shown = comparison.runs[first : first + count]
    column = (width - (count - 1)) // count
    room = max(height - HEAD_ROWS - 3, 1)
    cells = [[*_head(comparison, run, column, glyphs), *_text(comparison, run, scroll, column, room)] for run in shown]
    rows: list[Row] = [[(fit(_title(comparison, count), width, glyphs.ellipsis), "title")]]
    for line in range(HEAD_ROWS + room):
        row: Row = []
        for index, cell in enumerate(cells):
            if index:
                row.append((glyphs.vertical, "dim"))
            row += cell[line] if line < len(cell) else [(" " * column, "text")]
        rows.append(row)
    closing = comparison.verdict() if comparison.current_run is None else comparison.progress
    rows.append([(fit(one_line(closing), width, glyphs.ellipsis), "strong")])
    rows.append([(fit(KEYS, width, glyphs.ellipsis), "dim")])
    return rows[:height]


def _title(comparison: Comparison, count: int) -> str:
    seed = comparison.runs[0].request.sampling.seed
    rest = "" if count == len(comparison.runs) else f"; {count} of {len(comparison.runs)} columns"
    return f"one question, {'seed ' + str(seed) if seed is not None else 'no fixed seed'}, every mode{rest}"


def _head(comparison: Comparison, run: Run, width: int, glyphs: Glyphs) -> list[Row]:
    speed_up = comparison.speed_up(run)
    note = comparison.text_note(run)
    is_running = comparison.current_run is run
    lines = [
        (f"{run.mode}{' ' + glyphs.ellipsis if is_running else ''}", "strong"),
        (f"{number(run.rate)} tok/s  {'-' if speed_up is None else f'{speed_up:.2f}x'}", "text"),
        (f"acceptance {number(run.acceptance_length, 2)}  {run.num_tokens} tok", "text"),
        (f"text {note}", "rejected" if note == "differs" else "accepted" if note == "the same" else "dim"),
    ]
    return [[(fit(one_line(text), width, glyphs.ellipsis), style)] for text, style in lines]


def _text(comparison: Comparison, run: Run, scroll: int | None, width: int, room: int) -> list[Row]:
    cut = comparison.difference(run)
    before = visible(run.text[:cut])
    text = before + ("" if cut is None else visible(run.text[cut:]))
    rows = _wrapped(text, width)
    begin = max(len(rows) - room, 0) if scroll is None else max(0, min(scroll, len(rows) - 1))
    edge = len(text) if cut is None else len(before)
    return [_row(text, start, end, edge, width) for start, end in rows[begin : begin + room]]


def _row(text: str, start: int, end: int, edge: int, width: int) -> Row:
    """Characters from ``edge`` on differ from the reference."""
    middle = min(max(edge, start), end)
    row = [(text[start:middle], "text"), (text[middle:end], "bonus")]
    used = sum(text_width(part) for part, _ in row)
    return [*row, (" " * max(width - used, 0), "text")]


@lru_cache(maxsize=16)
def _wrapped(text: str, width: int) -> list[tuple[int, int]]:
    """Where each row of the text begins and ends; a row never holds its line break."""
    rows: list[tuple[int, int]] = []
    at = 0
    for line in text.split("\n"):
        starts = [*wrap(line, width, words=True), len(line)]
        for start, end in pairwise(starts):
            rows.append((at + start, at + _fitting(line, start, end, width)))
        at += len(line) + 1
    return rows


def _fitting(line: str, start: int, end: int, width: int) -> int:
    """Spaces that hang over the edge are left out."""
    while end > start and line[end - 1] == " " and text_width(line[start:end]) > width:
        end -= 1
    return end


def num_text_rows(comparison: Comparison, width: int) -> int:
    """Rows of the longest text at this width."""
    column = (width - columns_shown(len(comparison.runs), width) + 1) // columns_shown(len(comparison.runs), width)
    return max(len(_wrapped(visible(run.text), column)) for run in comparison.runs)
