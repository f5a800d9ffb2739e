"""A finished Markdown table, laid out in columns when it fits the width; shown as written when it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.markdown import FormattedLine, MarkdownFormatter, Piece
from sparkchat.ui.safe_text import text_width

MAX_COLUMNS = 20
MAX_ROWS = 500
_DELIMITER = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")
_PIPE = re.compile(r"(?<!\\)\|")


def is_delimiter(line: str) -> bool:
    """Whether ``line`` is the row under a table's head, such as ``|---|:-:|``."""
    return "|" in line and len(line) <= 1000 and _DELIMITER.match(line) is not None


def is_row(line: str) -> bool:
    return "|" in line


def align_table(
    lines: Sequence[str], width: int, formatter: MarkdownFormatter, glyphs: Glyphs
) -> list[FormattedLine] | None:
    """The rows of a table (head, delimiter, body) in columns, one shown row each; None when it does not fit.

    Where it is tight, the columns stand without blanks between them.
    """
    if len(lines) > MAX_ROWS:
        return None
    spans = [_cells(line) for line in lines]
    if not 1 <= len(spans[0]) <= MAX_COLUMNS or any(len(row) > len(spans[0]) for row in spans):
        return None
    cells = [
        [formatter.inline(line, start, end, "bold" if number == 0 else "") for start, end in row]
        for number, (line, row) in enumerate(zip(lines, spans, strict=True))
    ]
    widths = [max(_width(row[column]) for row in _body(cells) if column < len(row)) for column in range(len(spans[0]))]
    blank = next((b for b in (" ", "") if sum(widths) + (1 + 2 * len(b)) * (len(widths) - 1) <= width), None)
    if blank is None:
        return None
    aligned = [_row(row, widths, blank, glyphs) for row in cells]
    aligned[1] = _ruler(widths, blank, glyphs, len(lines[1]))
    return aligned


def _body(cells: list[list[list[Piece]]]) -> list[list[list[Piece]]]:
    return cells[:1] + cells[2:]


def _cells(line: str) -> list[tuple[int, int]]:
    """Source spans of the cells of one row, without the blanks around them."""
    cuts = [m.start() for m in _PIPE.finditer(line)]
    edges = [-1, *cuts, len(line)]
    spans = [(a + 1, b) for a, b in pairwise(edges)]
    if spans and not line[slice(*spans[0])].strip():
        spans = spans[1:]
    if len(spans) > 1 and not line[slice(*spans[-1])].strip():
        spans = spans[:-1]
    return [_trimmed(line, start, end) for start, end in spans]


def _trimmed(line: str, start: int, end: int) -> tuple[int, int]:
    while start < end and line[start].isspace():
        start += 1
    while end > start and line[end - 1].isspace():
        end -= 1
    return start, end


def _width(pieces: list[Piece]) -> int:
    return sum(text_width(piece.text) for piece in pieces)


def _row(cells: list[list[Piece]], widths: list[int], blank: str, glyphs: Glyphs) -> FormattedLine:
    pieces: list[Piece] = []
    at = 0
    for column, width in enumerate(widths):
        content = cells[column] if column < len(cells) else []
        if column:
            pieces.append(Piece(f"{blank}{glyphs.vertical}{blank}", "frame", at, at))
        pieces += content
        at = content[-1].end if content else at
        pieces.append(Piece(" " * (width - _width(content)), "", at, at))
    return FormattedLine(pieces, words=False, kind="table")


def _ruler(widths: list[int], blank: str, glyphs: Glyphs, source_len: int) -> FormattedLine:
    side = glyphs.horizontal * len(blank)
    joint = f"{side}{'+' if glyphs.vertical.isascii() else '┼'}{side}"
    text = joint.join(glyphs.horizontal * width for width in widths)
    return FormattedLine([Piece(text, "frame", 0, source_len)], words=False, kind="table")
