"""Damaged files are read as far as they go, with line numbers, and are never written to."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fixtures.trace_sessions import Answer, ready, side_by_side
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.trace import TraceWriter, read_trace, summarize, verify


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


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_whole_file(path: Path) -> None:
    trace = read_trace(path)
    assert trace.header is not None and trace.header["model"] == "tiny"
    assert [turn.id for turn in trace.turns] == ["x", "y"] and not trace.damaged and not trace.is_cut
    assert all(turn.start and turn.end and turn.steps for turn in trace.turns)
    assert [line.number for line in trace.lines] == list(range(1, len(lines_of(path)) + 1))


def test_cut_at_every_byte_of_the_last_lines(path: Path) -> None:
    data, lines = path.read_bytes(), lines_of(path)
    for end in range(len(data) - len(lines[-1]) - 40, len(data)):
        path.write_bytes(data[:end])
        trace = read_trace(path)
        is_whole = data[:end].endswith(b"\n") or data[end : end + 1] == b"\n"
        assert trace.is_cut == (not is_whole)
        assert len(trace.lines) == data[:end].count(b"\n") + (is_whole and not data[:end].endswith(b"\n"))
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
        trace = read_trace(path)
        assert [line.number for line in trace.damaged] == [position + 1] and trace.damaged[0].reason
        assert len(trace.lines) == len(lines) and not trace.is_cut
        assert path.read_bytes() == data
        summarize(trace).to_text()


def test_damaged_header_does_not_hide_the_answers(path: Path) -> None:
    path.write_bytes(b"".join([b"garbage\n", *lines_of(path)[1:]]))
    trace = read_trace(path)
    assert trace.header is None and len(trace.turns) == 2 and trace.damaged[0].number == 1
    assert "no readable header" in verify(trace).to_text()


def test_blank_lines_windows_line_ends_and_a_mark_are_no_damage(path: Path) -> None:
    lines = [line.rstrip(b"\n") + b"\r\n\r\n" for line in lines_of(path)]
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    trace = read_trace(path)
    assert not trace.damaged and verify(trace).ok


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
        read_trace(path)


def test_other_schema_in_the_middle_is_a_damaged_line(path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:3], b'{"schema": "sparkchat.trace/9", "type": "step"}\n', *lines[3:]]))
    trace = read_trace(path)
    assert [(line.number, "trace/9" in line.reason) for line in trace.damaged] == [(4, True)]


def test_unknown_line_types_are_kept_but_not_used(path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(
        b"".join([*lines[:2], b'{"schema": "sparkchat.trace/1", "type": "weather", "turn": 0}\n', *lines[2:]])
    )
    trace = read_trace(path)
    assert trace.lines[2].type == "weather" and not trace.damaged and verify(trace).ok


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 4096, b"hello\nworld\n"])
def test_nothing_readable(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        read_trace(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not there"):
        read_trace(tmp_path / "no")
    with pytest.raises(SparkchatError, match="cannot be read"):
        read_trace(tmp_path)


HOSTILE = [None, True, -1, 1.5, "x", [], {}, [None], ["x"], [-1], {"a": []}, 10**30, [[1]], [True]]


def test_wrong_types_in_any_field_give_a_damaged_line_or_an_answer_never_a_traceback(path: Path) -> None:
    lines = lines_of(path)
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
                    trace = read_trace(path)
                except SparkchatError:
                    continue
                summarize(trace).to_text()
                verify(trace).to_text()
    for name in ("speculation", "usage", "timing"):
        fields = json.loads(lines[-1])
        for inner in fields[name]:
            for value in HOSTILE:
                changed = {**fields, name: {**fields[name], inner: value}}
                path.write_bytes(b"".join([*lines[:-1], json.dumps(changed).encode() + b"\n"]))
                summarize(read_trace(path)).to_text()
                verify(path).to_text()
