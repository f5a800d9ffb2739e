"""What commands print: data on stdout, everything else on stderr, and no control character from outside in either."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sparkchat import strict_json


def data(text: str) -> None:
    """One line (or block) of data on stdout, flushed."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def as_json(value: Any) -> None:
    json_text(strict_json.dumps(value, indent=2))


def json_text(text: str) -> None:
    """JSON is UTF-8 whatever the terminal's encoding: a question mark in it would be another text."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8") + b"\n")
    sys.stdout.buffer.flush()


def note(text: str) -> None:
    """One line for the user, on stderr."""
    sys.stderr.write(f"sparkchat: {printable(text)}\n")
    sys.stderr.flush()


def block(text: str) -> None:
    """Several lines of data, laid out by the caller."""
    data("\n".join(_escaped(line) for line in text.split("\n")))


def printable(text: str) -> str:
    """The text on one line, its control characters and lone surrogates written out."""
    return _escaped(" ".join(text.split()))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns padded to their widest cell, as other model programs print their lists."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        data("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
