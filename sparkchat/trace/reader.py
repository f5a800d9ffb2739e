"""Reads trace files, also damaged ones, as far as they go. The file is only ever opened for reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.strict_json import loads
from sparkchat.trace.schema import FAMILY, LINE_TYPES, SCHEMA, shape_problem


@dataclass(frozen=True)
class TraceLine:
    """A readable line. ``data`` of known types has the shapes of ``schema``."""

    number: int
    """Counted from 1."""
    data: Mapping[str, Any]

    @property
    def type(self) -> str:
        return self.data["type"]


@dataclass(frozen=True)
class DamagedLine:
    """A line that cannot be used, and why."""

    number: int
    reason: str


@dataclass
class Turn:
    """One answer. ``start`` or ``end`` is None where its line is missing or damaged."""

    number: int
    header: TraceLine | None
    """The header in force when the turn began."""
    start: TraceLine | None = None
    steps: list[TraceLine] = field(default_factory=list)
    mode_changes: list[TraceLine] = field(default_factory=list)
    errors: list[TraceLine] = field(default_factory=list)
    end: TraceLine | None = None
    repeated: list[TraceLine] = field(default_factory=list)
    """Second turn or end lines of the same number."""

    @property
    def id(self) -> Any:
        first = next((line for line in (self.start, *self.steps, self.end) if line is not None), None)
        return first.data.get("id") if first is not None else None

    @property
    def block_size(self) -> int | None:
        """Drafts a block of this turn."""
        for line in (self.start, self.header):
            if line is not None and line.data.get("block_size") is not None:
                return line.data["block_size"]
        return None


@dataclass(frozen=True)
class Trace:
    """A whole file."""

    path: Path
    lines: tuple[TraceLine, ...]
    """Every readable line in file order, also of types this version does not know."""
    turns: tuple[Turn, ...]
    damaged: tuple[DamagedLine, ...]
    is_cut: bool
    """The last line was not finished: the writing process was killed."""

    @property
    def header(self) -> Mapping[str, Any] | None:
        """The first header, or None when its line is damaged."""
        return next((line.data for line in self.lines if line.type == "header"), None)

    @property
    def errors(self) -> tuple[TraceLine, ...]:
        return tuple(line for line in self.lines if line.type == "error")


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Damaged lines are listed with their numbers and the rest is kept.

    Raises UsageError when the file is not there or not a trace of a known schema, DamagedFile when no line can be read.
    """
    path = Path(path)
    lines: list[TraceLine] = []
    damaged: list[DamagedLine] = []
    is_cut = False
    for number, raw in _raw_lines(path):
        found = _parse(path, number, raw, is_first=not lines)
        if isinstance(found, TraceLine):
            lines.append(found)
        elif raw.strip():
            is_cut = not raw.endswith(b"\n")
            damaged.append(DamagedLine(number, "cut off: the line has no end" if is_cut else found))
    if not lines:
        what = "empty" if not damaged else f"unreadable in every line (line {damaged[0].number}: {damaged[0].reason})"
        raise DamagedFile(f"trace {path} is {what}; nothing can be shown")
    return Trace(path, tuple(lines), tuple(_turns(lines)), tuple(damaged), is_cut)


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        raise UsageError(f"trace {path} is not there; give the name of a .spark.jsonl file") from None
    except OSError as error:
        raise SparkchatError(f"trace {path} cannot be read: {error.strerror}") from None


def _parse(path: Path, number: int, raw: bytes, *, is_first: bool) -> TraceLine | str:
    """The line, or the reason it cannot be used."""
    try:
        data = loads(raw.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError as error:
        return f"not valid JSON: {error}"
    if not isinstance(data, dict):
        return "not a JSON object"
    schema = data.get("schema", None if is_first else SCHEMA)
    if schema != SCHEMA:
        if is_first:
            _refuse_schema(path, number, schema)
        return f"schema {schema!r} in a file of {SCHEMA}"
    if not isinstance(data.get("type"), str):
        return "no type"
    problem = shape_problem(data) if data["type"] in LINE_TYPES else None
    return problem or TraceLine(number, data)


def _refuse_schema(path: Path, number: int, schema: Any) -> None:
    if isinstance(schema, str) and schema.startswith(FAMILY):
        raise UsageError(f"trace {path} has schema {schema}; this version reads {SCHEMA}: use a newer sparkchat")
    shown = "no schema" if schema is None else f"schema {schema!r}"
    raise UsageError(f"{path} is not a trace: line {number} has {shown}; give a file that --trace has written")


def _turns(lines: list[TraceLine]) -> list[Turn]:
    """Lines of each turn together, turns in order of their numbers; answers decoded side by side may interleave."""
    turns: dict[int, Turn] = {}
    header: TraceLine | None = None
    for line in lines:
        if line.type == "header":
            header = line
            continue
        number = line.data.get("turn")
        if line.type not in LINE_TYPES or number is None:
            continue
        _put(turns.setdefault(number, Turn(number, header)), line)
    return [turns[number] for number in sorted(turns)]


def _put(turn: Turn, line: TraceLine) -> None:
    if line.type == "step":
        turn.steps.append(line)
    elif line.type == "mode_change":
        turn.mode_changes.append(line)
    elif line.type == "error":
        turn.errors.append(line)
    elif getattr(turn, _SINGLE[line.type]) is None:
        setattr(turn, _SINGLE[line.type], line)
    else:
        turn.repeated.append(line)


_SINGLE = {"turn": "start", "end": "end"}
