"""Damaged files are read as far as they go, with line numbers, and are never written to."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fixtures.trace_sessions import Answer, ready, side_by_side
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.trace import Damage, DamagedLine, TraceLine, TraceWriter, read_lines, summarize, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.spark.jsonl"
    with TraceWriter(path) as writer:
        for event in [
            ready(),
            *side_by_side(
                Answer("x", num_tokens=9, seed=1), Answer("y", num_tokens=9, modes=("compact", "off"), seed=2)
            ),
        ]:
            writer.event(event)
    return path


def read(path: Path) -> tuple[list[TraceLine], Damage]:
    damage = Damage()
    return list(read_lines(path, damage)), damage


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_whole_file(path: Path) -> None:
    lines, damage = read(path)
    assert lines[0].type == "header" and lines[0].data["model"] == "tiny"
    assert not damage.num_lines and not damage.is_cut
    assert [line.data["id"] for line in lines if line.type == "end"] == ["x", "y"]
    assert [line.number for line in lines] == list(range(1, len(lines_of(path)) + 1))


def test_cut_at_every_byte_of_the_last_lines(path: Path) -> None:
    data, lines = path.read_bytes(), lines_of(path)
    for end in range(len(data) - len(lines[-1]) - 40, len(data)):
        path.write_bytes(data[:end])
        lines_read, damage = read(path)
        is_whole = data[:end].endswith(b"\n") or data[end : end + 1] == b"\n"
        assert damage.is_cut == (not is_whole)
        assert len(lines_read) == data[:end].count(b"\n") + (is_whole and not data[:end].endswith(b"\n"))
        assert path.read_bytes() == data[:end]


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\n",
        b"\x00" * 500 + b"\n",
        b"\xff\xfe\n",
        b'{"a": NaN}\n',
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b'"x"\n',
        b"{}\n",
    ],
)
def test_garbage_anywhere_loses_only_itself(path: Path, garbage: bytes) -> None:
    lines = lines_of(path)
    for position in range(1, len(lines), 3):
        data = b"".join([*lines[:position], garbage, *lines[position:]])
        path.write_bytes(data)
        lines_read, damage = read(path)
        assert [line.number for line in damage.lines] == [position + 1] and damage.lines[0].reason
        assert len(lines_read) == len(lines) and not damage.is_cut
        assert path.read_bytes() == data
        summarize(path).to_text()


def test_damaged_header_does_not_hide_the_answers(path: Path) -> None:
    path.write_bytes(b"".join([b"garbage\n", *lines_of(path)[1:]]))
    report = verify(path)
    assert report.num_turns == 2 and [failure.line for failure in report.failures] == [None, 1]
    assert "no readable header" in report.to_text()


def test_blank_lines_windows_line_ends_and_a_mark_are_no_damage(path: Path) -> None:
    lines = [line.rstrip(b"\n") + b"\r\n\r\n" for line in lines_of(path)]
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    assert not read(path)[1].num_lines and verify(path).ok


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"schema": "sparkchat.trace/2", "type": "header"}\n', "sparkchat.trace/2"),
        (b'{"schema": "sparkchat.result/1"}\n', "not a trace"),
        (b'{"type": "header"}\n', "not a trace"),
    ],
)
def test_unknown_schema_is_refused(path: Path, line: bytes, said: str) -> None:
    path.write_bytes(b"".join([line, *lines_of(path)]))
    with pytest.raises(UsageError, match=said):
        read(path)


def test_other_schema_in_the_middle_is_a_damaged_line(path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:3], b'{"schema": "sparkchat.trace/9", "type": "step"}\n', *lines[3:]]))
    assert [(line.number, "trace/9" in line.reason) for line in read(path)[1].lines] == [(4, True)]


def test_unknown_line_types_are_kept_but_not_used(path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(
        b"".join([*lines[:2], b'{"schema": "sparkchat.trace/1", "type": "weather", "turn": 0}\n', *lines[2:]])
    )
    read_back, damage = read(path)
    assert read_back[2].type == "weather" and not damage.num_lines and verify(path).ok


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 4096, b"hello\nworld\n"])
def test_nothing_readable(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        read(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not there"):
        read(tmp_path / "no")
    with pytest.raises(SparkchatError, match="cannot be read"):
        read(tmp_path)


HOSTILE = [None, True, -1, 1.5, "x", [], {}, [None], ["x"], [-1], {"a": []}, 10**30, [[1]], [True]]


def test_wrong_types_in_any_field_give_a_damaged_line_or_an_answer_never_a_traceback(path: Path) -> None:
    lines = lines_of(path)
    # The header, the last answer's first line, and its last two lines have every type and every field.
    lines = [lines[0], *(line for line in lines if b'"id":"y"' in line)]
    lines = [*lines[:2], *lines[-2:]]
    rng = random.Random(0)
    last_of_type = {json.loads(line)["type"]: position for position, line in enumerate(lines)}
    for position in last_of_type.values():
        fields = json.loads(lines[position])
        for name in fields:
            for value in [*rng.sample(HOSTILE, 6), "gone"]:
                changed = {**fields, name: value}
                if value == "gone":
                    del changed[name]
                content = b"".join([*lines[:position], json.dumps(changed).encode() + b"\n", *lines[position + 1 :]])
                path.write_bytes(content)
                try:
                    json.dumps(summarize(path).to_json(), allow_nan=False)
                    summarize(path).to_text()
                    verify(path).to_text()
                except SparkchatError:
                    continue
    for name in ("speculation", "usage", "timing"):
        fields = json.loads(lines[-1])
        for inner in fields[name]:
            for value in HOSTILE:
                changed = {**fields, name: {**fields[name], inner: value}}
                path.write_bytes(b"".join([*lines[:-1], json.dumps(changed).encode() + b"\n"]))
                summarize(path).to_text()
                verify(path).to_text()


def test_a_line_too_long_is_passed_over_unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(path)
    monkeypatch.setattr("sparkchat.trace.reader.MOST_LINE_BYTES", max(map(len, lines)))
    path.write_bytes(b"".join([*lines[:2], b'{"a": "' + b"x" * 100_000 + b'"}\n', *lines[2:], b"y" * 70_000]))
    read_back, damage = read(path)
    assert [line.number for line in read_back] == [1, 2, *range(4, len(lines) + 2)]
    assert [line.number for line in damage.lines] == [3, len(lines) + 2] and "longer than" in damage.lines[0].reason


def test_thousands_of_damaged_lines_are_counted_not_listed(path: Path) -> None:
    path.write_bytes(b"".join([*lines_of(path), b"?\n" * 5000]))
    damage = read(path)[1]
    assert damage.num_lines == 5000 and len(damage.lines) == 100 and isinstance(damage.last, DamagedLine)
    assert summarize(path).to_json()["num_damaged_lines"] == 5000
    assert "4900 damaged lines more" in verify(path).to_text()


def test_more_open_answers_than_any_engine_has_are_refused(path: Path) -> None:
    turns = [{"schema": "sparkchat.trace/1", "type": "turn", "turn": n} for n in range(5000)]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    for check in (summarize, verify):
        with pytest.raises(DamagedFile, match="line 4097"):
            check(path)
