"""Reads trace files line by line, also damaged ones, as far as they go. The file is only ever opened for reading.

Nothing here grows with the file: a line is handed on and forgotten, and one that is too long is passed over unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.strict_json import loads
from sparkchat.trace.schema import FAMILY, LINE_TYPES, SCHEMA, shape_problem

MOST_LINE_BYTES = 16 * 2**20
"""A prompt or an answer of a million tokens fits; a longer line is damage."""
_CHUNK = 2**16
MOST_LISTED = 100
"""Damaged lines that are named one by one; the others are counted."""
MOST_OPEN_ANSWERS = 4096
"""Answers without an end at one place of the file; no engine decodes so many together."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A readable line. ``data`` of known types has the shapes of ``schema``."""

    number: int
    """Counted from 1."""
    data: Mapping[str, Any]

    @property
    def type(self) -> str:
        return self.data["type"]


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that cannot be used, and why."""

    number: int
    reason: str
    is_cut: bool = False
    """The file's last line was not finished: the writing process was killed."""

    def to_json(self) -> dict[str, Any]:
        return {"line": self.number, "reason": self.reason}


@dataclass
class Damage:
    """What could not be read of a file; the first lines by name, the others as a count."""

    lines: list[DamagedLine] = field(default_factory=list)
    num_lines: int = 0
    num_bytes: int = 0
    """How much of the file has been read, damaged or not; a second reading begins anew."""
    last: DamagedLine | None = None

    @property
    def is_cut(self) -> bool:
        return self.last is not None and self.last.is_cut

    def add(self, line: DamagedLine) -> None:
        self.num_lines += 1
        self.last = line
        if len(self.lines) < MOST_LISTED:
            self.lines.append(line)


def read_lines(path: str | Path, damage: Damage | None = None) -> Iterator[TraceLine]:
    """Every readable line of a trace, also of types this version does not know; the others go to ``damage``.

    Raises UsageError when the file is not there or not a trace of a known schema, DamagedFile when no line can be read.
    """
    damage = Damage() if damage is None else damage
    with opened(Path(path)) as file:
        for damage.num_bytes, found in located_lines(Path(path), file):
            if isinstance(found, TraceLine):
                yield found
            else:
                damage.add(found)


def located_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, TraceLine | DamagedLine]]:
    """(offset of the line in bytes, line) of the whole file. Raises as ``read_lines`` does."""
    offset, number, num_read = 0, 0, 0
    first_damage: DamagedLine | None = None
    try:
        for raw, length in _raw_lines(file):
            number += 1
            found = _parse(path, number, raw, is_first=not num_read)
            if not isinstance(found, str):
                num_read += 1
                yield offset, found
            elif raw is None or raw.strip():
                is_cut = raw is not None and not raw.endswith(b"\n")
                line = DamagedLine(number, "cut off: the line has no end" if is_cut else found, is_cut)
                first_damage = first_damage or line
                yield offset, line
            offset += length
    except OSError as error:
        raise SparkchatError(f"trace {path} cannot be read: {error.strerror}") from None
    if not num_read:
        what = "empty"
        if first_damage is not None:
            what = f"unreadable in every line (line {first_damage.number}: {first_damage.reason})"
        raise DamagedFile(f"trace {path} is {what}; nothing can be shown")


def line_at(path: Path, file: BinaryIO, offset: int, number: int) -> TraceLine:
    """The line that ``located_lines`` found there. Raises DamagedFile when the file has changed since."""
    file.seek(offset)
    found = _parse(path, number, file.readline(MOST_LINE_BYTES + 1), is_first=False)
    if isinstance(found, str):
        raise DamagedFile(f"trace {path} has changed while it was read (line {number}: {found}); open it again")
    return found


def opened(path: Path, *, again: bool = False) -> BinaryIO:
    """The file for ``located_lines`` and ``line_at``. Raises UsageError when it is not there.

    ``again``: lines will be read more than once, which a pipe cannot give.
    """
    try:
        file = path.open("rb")
        if again and not file.seekable():
            file.close()
            raise UsageError(f"trace {path} is a pipe, and this reads it more than once; write it to a file first")
        return file
    except FileNotFoundError:
        raise UsageError(f"trace {path} is not there; give the name of a .spark.jsonl file") from None
    except OSError as error:
        raise SparkchatError(f"trace {path} cannot be read: {error.strerror}") from None


def _raw_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """(line, its length in bytes); None for a line that is too long."""
    while raw := file.readline(MOST_LINE_BYTES + 1):
        length = len(raw)
        if length <= MOST_LINE_BYTES or raw.endswith(b"\n"):
            yield raw, length
            continue
        del raw
        while rest := file.readline(_CHUNK):
            length += len(rest)
            if rest.endswith(b"\n"):
                break
        yield None, length


def _parse(path: Path, number: int, raw: bytes | None, *, is_first: bool) -> TraceLine | str:
    """The line, or the reason it cannot be used."""
    if raw is None or len(raw) > MOST_LINE_BYTES:
        return f"longer than {MOST_LINE_BYTES >> 20} MiB"
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
        return f"schema {_short(schema)} in a file of {SCHEMA}"
    if not isinstance(data.get("type"), str):
        return "no type"
    problem = shape_problem(data) if data["type"] in LINE_TYPES else None
    return problem or TraceLine(number, data)


def _refuse_schema(path: Path, number: int, schema: Any) -> None:
    if isinstance(schema, str) and schema.startswith(FAMILY):
        shown = _short(schema)
        raise UsageError(f"trace {path} has schema {shown}; this version reads {SCHEMA}: use a newer sparkchat")
    shown = "no schema" if schema is None else f"schema {_short(schema)}"
    raise UsageError(f"{path} is not a trace: line {number} has {shown}; give a file that --trace has written")


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
