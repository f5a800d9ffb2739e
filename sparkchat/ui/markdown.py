"""One source line of Markdown -> what is shown, with every shown character tied to its place in the source.

Line by line on purpose: a line is formatted once when it is complete, so the cost of a stream does not depend on the
length of the answer, and a streamed text ends up exactly as if it had been drawn at once. Only Markdown marks are
hidden. HTML, entities, links, escapes and console markup are text like any other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import SPECIAL, shown

LONG_LINE = 4000
"""A source line with more characters is shown as it is: no list, no emphasis."""
_MAX_QUOTE_DEPTH = 8
_MAX_OPEN_MARKS = 32


class Piece(NamedTuple):
    """A run of shown text of one style."""

    text: str
    style: str
    """Space-separated style names; ``""`` is plain."""
    start: int
    """Where the run begins in the source line; shown characters map one to one when the lengths agree."""
    end: int


@dataclass(frozen=True)
class Fence:
    """An open code fence."""

    mark: str
    language: str


@dataclass(frozen=True, slots=True)
class FormattedLine:
    """What one source line looks like."""

    pieces: list[Piece]
    lead: Sequence[Piece] = ()
    """Before the first row."""
    hang: Sequence[Piece] = ()
    """Before each further row."""
    words: bool = True
    """Break rows between words."""
    kind: str = "text"
    """text | code | fence | heading | rule"""


_QUOTE = re.compile(r" {0,3}> ?")
_LIST = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])( {1,4})(?=\S)")
_HEADING = re.compile(r" {0,3}#{1,6} +")
_RULE = re.compile(r" {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)$")
_MARK = re.compile(r"`+|\*+|_+|~~")
_EMPHASIS = {
    "*": "italic",
    "_": "italic",
    "**": "bold",
    "__": "bold",
    "***": "bold italic",
    "___": "bold italic",
    "~~": "strike",
}


def plain_pieces(line: str, start: int, end: int, style: str, ascii_only: bool = False) -> list[Piece]:
    """``line[start:end]`` in one style, with characters that may not reach the terminal spelt out."""
    pieces: list[Piece] = []
    for match in SPECIAL.finditer(line, start, end):
        at = match.start()
        if at > start:
            pieces.append(Piece(line[start:at], style, start, at))
        text = shown(match[0], line[at - 1] if at else "", ascii_only)
        pieces.append(Piece(text, style if text.isspace() or not text else f"{style} control".strip(), at, at + 1))
        start = at + 1
    if start < end:
        pieces.append(Piece(line[start:end], style, start, end))
    return pieces


def plain_line(line: str, style: str, ascii_only: bool = False) -> FormattedLine:
    return FormattedLine(plain_pieces(line, 0, len(line), style, ascii_only))


def opened_fence(line: str) -> Fence | None:
    """The code block that begins with this line outside any other."""
    match = _FENCE.match(line) if len(line) <= LONG_LINE else None
    return Fence(match[2], match[3].strip()) if match else None


def closes_fence(line: str, fence: Fence) -> bool:
    mark = line.strip()
    return len(mark) >= len(fence.mark) and not mark.strip(fence.mark[0]) and mark[:1] == fence.mark[0]


class MarkdownFormatter:
    """Formats lines in the style of one place (the answer, or the thinking)."""

    def __init__(self, glyphs: Glyphs, base: str = "") -> None:
        self._glyphs = glyphs
        self._base = base
        self._edge = (Piece(glyphs.vertical + " ", self._style("frame"), 0, 0),)
        self.num_fences = 0
        """Code blocks above, which number the next one; whoever completes lines counts them."""
        self._ascii_only = glyphs.bullet.isascii()

    def format(self, line: str, fence: Fence | None) -> tuple[FormattedLine, Fence | None]:
        """The line as shown, and the fence that is open after it."""
        if fence is not None:
            if closes_fence(line, fence):
                return self._fence_line(line, self._glyphs.fence_close + self._glyphs.horizontal, ""), None
            return self._code_line(line), fence
        if len(line) > LONG_LINE:
            return plain_line(line, self._base, self._ascii_only), None
        if opened := opened_fence(line):
            corner = f"{self._glyphs.fence_open}{self._glyphs.horizontal} code {self.num_fences + 1}"
            return self._fence_line(line, corner, opened.language), opened
        return self._text_line(line), None

    def _fence_line(self, line: str, corner: str, language: str) -> FormattedLine:
        label = f"{corner} "
        pieces = [Piece(label, self._style("frame"), 0, 0)]
        if language:
            at = line.rindex(language)
            pieces += plain_pieces(line, at, at + len(language), self._style("frame"), self._ascii_only)
        return FormattedLine(pieces, words=False, kind="fence")

    def _code_line(self, line: str) -> FormattedLine:
        edge = self._edge
        pieces = plain_pieces(line, 0, len(line), self._style("code"), self._ascii_only)
        return FormattedLine(pieces, edge, edge, words=False, kind="code")

    def _text_line(self, line: str) -> FormattedLine:
        at = 0
        lead: list[Piece] = []
        while len(lead) < _MAX_QUOTE_DEPTH and (match := _QUOTE.match(line, at)):
            lead.append(Piece(self._glyphs.vertical + " ", self._style("quote"), at, match.end()))
            at = match.end()
        hang = list(lead)
        style = self._style("quote") if lead else self._base
        if _RULE.match(line, at):
            return FormattedLine([Piece(self._glyphs.horizontal * 3, self._style("frame"), at, len(line))], lead, hang)
        if match := _HEADING.match(line, at):
            pieces = self.inline(line, match.end(), len(line), self._style("heading"))
            return FormattedLine(pieces, lead, hang, kind="heading")
        if match := _LIST.match(line, at):
            bullet = match[2] if match[2][0].isdigit() else self._glyphs.bullet
            indent = match[1].replace("\t", "    ")
            lead.append(Piece(f"{indent}{bullet}{match[3]}", self._style("bullet"), at, match.end()))
            at = match.end()
        else:
            spaces = len(line) - len(line[at:].lstrip(" ")) - at
            if 0 < spaces <= 24:
                lead.append(Piece(" " * spaces, style, at, at + spaces))
                at += spaces
        if len(lead) > len(hang):
            hang.append(Piece(" " * len(lead[-1].text), style, at, at))
        return FormattedLine(self.inline(line, at, len(line), style), lead, hang)

    def _style(self, name: str) -> str:
        return f"{self._base} {name}".strip()

    def inline(self, line: str, start: int, end: int, style: str) -> list[Piece]:
        """``line[start:end]`` with emphasis and code spans shown by style and their marks hidden."""
        edges = _inline_edges(line, start, end)
        if not edges:
            return plain_pieces(line, start, end, style, self._ascii_only)
        pieces: list[Piece] = []
        active: list[str] = []
        at = start
        for mark_start, mark_end, name, opens in edges:
            joined = " ".join([style, *active]).strip()
            pieces += plain_pieces(line, at, mark_start, joined, self._ascii_only)
            if opens:
                active.append(name)
            else:
                active.remove(name)
            at = mark_end
        pieces += plain_pieces(line, at, end, style, self._ascii_only)
        return pieces


def _inline_edges(line: str, start: int, end: int) -> list[tuple[int, int, str, bool]]:
    """Matched marks in order: (mark start, mark end, style, opens). Linear in the length of the line."""
    marks = [m.span() for m in _MARK.finditer(line, start, end) if m.start() == start or line[m.start() - 1] != "\\"]
    ticks: dict[int, list[int]] = {}
    for mark_start, mark_end in marks:
        if line[mark_start] == "`":
            ticks.setdefault(mark_end - mark_start, []).append(mark_start)
    edges: list[tuple[int, int, str, bool]] = []
    open_marks: list[tuple[int, int]] = []
    skip_until = start
    for mark_start, mark_end in marks:
        if mark_start < skip_until:
            continue
        size = mark_end - mark_start
        if line[mark_start] == "`":
            same = ticks[size]
            following = bisect_right(same, mark_start)
            if following < len(same):
                close = same[following]
                edges += [(mark_start, mark_end, "code", True), (close, close + size, "code", False)]
                skip_until = close + size
        elif line[mark_start:mark_end] in _EMPHASIS:
            _match_emphasis(line, mark_start, mark_end, start, end, open_marks, edges)
    return sorted(edges)


def _match_emphasis(
    line: str,
    mark_start: int,
    mark_end: int,
    start: int,
    end: int,
    open_marks: list[tuple[int, int]],
    edges: list[tuple[int, int, str, bool]],
) -> None:
    """Close the nearest open mark of the same spelling, or open a new one."""
    mark = line[mark_start:mark_end]
    before = line[mark_start - 1] if mark_start > start else " "
    after = line[mark_end] if mark_end < end else " "
    if not before.isspace() and not _is_word(after):
        for index in range(len(open_marks) - 1, -1, -1):
            open_start, open_end = open_marks[index]
            if line[open_start:open_end] == mark and open_end < mark_start:
                del open_marks[index:]
                name = _EMPHASIS[mark]
                edges += [(open_start, open_end, name, True), (mark_start, mark_end, name, False)]
                return
    if not after.isspace() and not _is_word(before) and len(open_marks) < _MAX_OPEN_MARKS:
        open_marks.append((mark_start, mark_end))


def _is_word(character: str) -> bool:
    # Only ASCII: in Chinese or Japanese prose emphasis stands between letters without spaces.
    return character.isascii() and character.isalnum()
