"""Every export is valid in its own format, agrees with the trace, and is not harmed by hostile text."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixtures.trace_files import HOSTILE, make_hostile, write_session
from fixtures.trace_sessions import Answer
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.trace import Damage, read_lines, summarize
from sparkchat.trace.export import FORMATS, figures, format_of
from sparkchat.trace.export.new_file import new_file

MODES = ("static", "compact", "cap-accept", "off")


def exported(path: Path, name: str) -> str:
    parts: list[str] = []
    format_of(name, None).write(path, parts.append, Damage())
    return "".join(parts)


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [dict(line.data) for line in read_lines(path) if line.type == "step"]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    answers = (Answer("x", modes=MODES, seed=1), Answer("y", modes=("compact",), seed=2, num_thinking=3))
    return write_session(tmp_path / "s.spark.jsonl", *answers)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return write_session(tmp_path / "h.spark.jsonl", Answer("x", modes=MODES, seed=1), change=make_hostile)


# CSV


def test_csv_has_a_row_for_every_step(session: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(exported(session, "csv"))))
    steps = steps_of(session)
    assert len(rows) == len(steps)
    for row, step in zip(rows, steps, strict=True):
        assert int(row["i"]) == step["i"] and json.loads(row["mode"]) == step["mode"]
        assert int(row["verify_len"]) == step["verify_len"] and int(row["num_drafts"]) == len(step["draft_ids"])
        assert [int(value) for value in row["committed_ids"].split()] == step["committed_ids"]
        assert [float(value) for value in row["survival"].split()] == step["survival"]
        assert json.loads(row["draft_text"]) == step["draft_text"]
        # What was not measured is empty, and never 0.
        assert row["predicted_step_ms"] == "" and (row["cap_trim"] == "") == (step["mode"] == "compact")


def test_csv_cells_of_hostile_text_are_no_formulas_and_lose_nothing(hostile: Path) -> None:
    text = exported(hostile, "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(steps_of(hostile)) == text.count("\n") - 1
    assert all(not str(cell).startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for cell in row.values())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", text)
    assert json.loads(rows[0]["text"]).replace("\ufffd", "\ud800").startswith(HOSTILE[:20])


# Perfetto


def timeline(path: Path) -> list[dict[str, Any]]:
    whole = json.loads(exported(path, "perfetto"))
    assert whole["displayTimeUnit"] in ("ms", "ns") and isinstance(whole["otherData"], dict)
    return whole["traceEvents"]


def assert_trace_events(events: list[dict[str, Any]]) -> None:
    """The fields that each phase must have, by the Trace Event Format; slices of a thread nest."""
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float)) and math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] in ("B", "E")
    slices = [event for event in events if event["ph"] in ("B", "X", "E")]
    for event in sorted(slices, key=lambda event: event["ts"]):
        stack = stacks[event["pid"], event["tid"]]
        while stack and stack[-1] <= event["ts"] + 1e-3 and event["ph"] != "E":
            stack.pop()
        if event["ph"] == "X":
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 2e-3, event
            stack.append(event["ts"] + event["dur"])
    begun = [event["name"] for event in slices if event["ph"] == "B"]
    assert sorted(begun) == sorted(event["name"] for event in slices if event["ph"] == "E")


def test_perfetto_events_are_valid_and_nest(session: Path) -> None:
    events = timeline(session)
    assert_trace_events(events)
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert len(steps) == len(steps_of(session))
    rejects = [event for event in events if event["ph"] == "i" and event["name"].startswith("rejected")]
    assert len(rejects) == sum(step["reject"] is not None for step in steps_of(session))


def test_perfetto_answers_side_by_side_lie_in_different_lanes_and_later_ones_use_them_again(tmp_path: Path) -> None:
    path = write_session(tmp_path / "a", Answer("x", seed=1), Answer("y", seed=2))
    with path.open("a") as file:
        for line in path.read_text().splitlines()[1:]:
            data = json.loads(line)
            if data["id"] == "x":
                file.write(json.dumps({**data, "turn": 2}) + "\n")
    events = timeline(path)
    assert_trace_events(events)
    lanes = {event["name"]: event["tid"] for event in events if event["ph"] == "B"}
    assert lanes["answer 0"] != lanes["answer 1"] and lanes["answer 2"] in (lanes["answer 0"], lanes["answer 1"])


def test_perfetto_times_are_those_of_the_steps(tmp_path: Path) -> None:
    def spread(line: dict[str, Any]) -> None:
        if line["type"] == "step":
            line.update(t_ns=5_000_000_000 + line["i"] * 10_000_000, step_ms=8.0, draft_ms=2.0, verify_ms=5.0)

    path = write_session(tmp_path / "a", Answer("x", seed=1), change=spread)
    events = timeline(path)
    assert_trace_events(events)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert all(event["dur"] == pytest.approx(8000) for event in steps)
    apart = [after["ts"] - before["ts"] for before, after in pairwise(steps)]
    assert apart == pytest.approx([10_000] * (len(steps) - 1))
    verifies = [event for event in events if event["name"] == "verify"]
    assert verifies[0]["ts"] == pytest.approx(steps[0]["ts"] + 2000) and verifies[0]["dur"] == pytest.approx(5000)


def test_perfetto_closes_answers_that_have_no_end(session: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(session.read_bytes()[: -len(session.read_bytes().splitlines()[-1]) - 40])
    assert_trace_events(timeline(cut))


# HTML and SVG


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_loads_nothing_and_runs_nothing(session: Path, hostile: Path) -> None:
    for path in (session, hostile):
        page = Page(exported(path, "html"))
        assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "a", "base"}
        assert not page.links and not [name for name in page.attributes if name.startswith("on")]
        assert "url(" not in page.text and "@import" not in page.text
        for plot in re.findall("<svg.*?</svg>", exported(path, "html"), re.DOTALL):
            ElementTree.fromstring(plot)


def test_the_report_has_the_numbers_and_the_text(session: Path) -> None:
    page = Page(exported(session, "html"))
    found = summarize(session).to_json()
    assert f"{found['mean_acceptance_length']:.2f}" in page.text and str(found["num_steps"]) in page.text
    for line in read_lines(session):
        if line.type == "end":
            assert line.data["text"] in page.text and line.data["thinking"] in page.text
    for mode in MODES:
        assert mode in page.text


@pytest.mark.parametrize("name", ["html", "svg"])
def test_hostile_text_is_spelt_out_not_run(hostile: Path, name: str) -> None:
    text = exported(hostile, name)
    assert "<script" not in text and "onerror=alert(2)>" not in text and "\x1b" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\ud800-\udfff]", text)
    if name == "html":
        assert "&lt;script&gt;alert(1)" in text and "&lt;U+202E&gt;" in text


def test_the_drawing_is_valid_xml_and_shows_what_was_measured(session: Path, hostile: Path, tmp_path: Path) -> None:
    empty = write_session(tmp_path / "empty", Answer(num_tokens=0))
    for path in (session, hostile, empty):
        drawing = ElementTree.fromstring(exported(path, "svg"))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        numbers = re.findall(r' (?:x|y|cx|cy|r|width|height)="([^"]*)"', exported(path, "svg"))
        assert all(math.isfinite(float(number)) for number in numbers)
    assert exported(empty, "svg").count("not measured") >= 4


def test_a_long_session_is_drawn_with_a_bounded_number_of_points(
    session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_BINS", 4)
    drawn = figures.Figures()
    for line in read_lines(session):
        drawn.add(line)
    curve = drawn._curve("committed", "committed", "steps")
    steps = steps_of(session)
    assert len(curve.points) <= 4
    total = sum(each.committed for each in drawn._bins)
    assert total == sum(len(step["committed_ids"]) for step in steps)
    assert curve.points[0][1] == pytest.approx(drawn._bins[0].committed / drawn._bins[0].steps)


# Markdown and confidence records


def test_the_question_is_shown_where_the_trace_has_it(tmp_path: Path) -> None:
    asked = write_session(tmp_path / "q", Answer(question="Is <this> *it*?"))
    assert "## User\n\nIs <this> *it*?\n\n## Assistant" in exported(asked, "markdown")
    assert "Is &lt;this&gt; *it*?</div>" in exported(asked, "html")
    silent = write_session(tmp_path / "s", Answer())
    for name in ("markdown", "html"):
        assert "a question of 3 tokens, whose text is not in the trace" in exported(silent, name)


def test_markdown_has_every_answer_as_it_was_received(session: Path) -> None:
    text = exported(session, "markdown")
    for line in read_lines(session):
        if line.type == "end":
            assert f"\n\n{line.data['text']}\n\n*20 tokens" in text
    assert text.count("## Assistant") == 2 and "<details><summary>thinking</summary>" in text


def test_confidence_records_have_a_label_for_every_logit(session: Path) -> None:
    records = [json.loads(line) for line in exported(session, "confidence").splitlines()]
    assert records
    for record in records:
        assert set(record) == {"logits", "labels"} and len(record["logits"]) == len(record["labels"]) > 0
        assert set(record["labels"]) <= {0, 1}
        # Once the accepted prefix has ended, no later draft is reached.
        assert record["labels"] == sorted(record["labels"], reverse=True)


def test_confidence_labels_by_hand(tmp_path: Path) -> None:
    steps = [
        {"mode": "static", "verify_len": 3, "correct_drafts": 1, "cap_trim": 0, "committed_ids": [1, 9]},
        {"mode": "cap-accept", "verify_len": 3, "correct_drafts": 1, "cap_trim": 1, "committed_ids": [1, 2]},
        {"mode": "compact", "verify_len": 2, "correct_drafts": 2, "cap_trim": None, "committed_ids": [1, 2, 9]},
        {"mode": "compact", "verify_len": 0, "correct_drafts": 0, "cap_trim": None, "committed_ids": [9]},
        {"mode": "static", "verify_len": 3, "correct_drafts": 1, "cap_trim": 0, "committed_ids": [1]},
    ]
    lines: list[dict[str, Any]] = [{"schema": "sparkchat.trace/1", "type": "header"}]
    for i, step in enumerate(steps):
        common = {"type": "step", "turn": 0, "i": i, "prefix_len": 0, "draft_ids": [1, 2, 3], "rows": 1}
        lines.append({**common, "confidence_logit": [0.5, -0.25, None if i == 0 else 2.0], **step})
    path = tmp_path / "a"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [json.loads(line) for line in exported(path, "confidence").splitlines()]
    assert records == [
        {"logits": [0.5, -0.25], "labels": [1, 0]},
        {"logits": [0.5, -0.25, 2.0], "labels": [1, 1, 0]},
        {"logits": [0.5, -0.25], "labels": [1, 1]},
    ]


def test_confidence_needs_confidences(tmp_path: Path) -> None:
    path = write_session(tmp_path / "a", Answer(has_confidence=False))
    with pytest.raises(UsageError, match="no step with confidences"):
        exported(path, "confidence")


# Files


def test_formats_by_ending_and_by_name() -> None:
    for each in FORMATS:
        assert format_of(None, Path(f"a{each.ending}")) is each and format_of(each.name, Path("b.xyz")) is each
    for name, target in (("pdf", None), (None, Path("a.pdf")), (None, None)):
        with pytest.raises(UsageError, match="perfetto"):
            format_of(name, target)


def test_a_new_file_is_private_and_whole_or_not_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target.csv"
    source.write_text("s")
    with new_file(target, source, force=False) as write:
        write("ä\ud800\r\n")
        assert not target.exists()
    assert target.read_bytes() == "ä?\r\n".encode() and stat.S_IMODE(target.stat().st_mode) == 0o600
    with pytest.raises(RuntimeError), new_file(tmp_path / "b.csv", source, force=False) as write:
        write("half")
        raise RuntimeError
    with pytest.raises(UsageError, match="exists"), new_file(target, source, force=False):
        raise AssertionError("not reached")
    assert sorted(os.listdir(tmp_path)) == ["source", "target.csv", "user"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target.csv"
    with pytest.raises(UsageError, match="exists"), new_file(target, tmp_path / "source", force=False) as write:
        write("mine")
        target.write_text("theirs")
    assert target.read_text() == "theirs" and sorted(os.listdir(tmp_path)) == ["target.csv", "user"]


def test_force_replaces_ordinary_files_and_the_file_behind_a_link_but_never_the_trace(tmp_path: Path) -> None:
    source, target, link = tmp_path / "source", tmp_path / "target.csv", tmp_path / "link.csv"
    source.write_text("s")
    target.write_text("old")
    link.symlink_to(target)
    with new_file(link, source, force=True) as write:
        write("new")
    assert target.read_text() == "new" and link.is_symlink()
    other = tmp_path / "other.csv"
    other.symlink_to(source)
    for path, said in ((source, "never replaced"), (other, "never replaced"), (tmp_path, "no ordinary file")):
        with pytest.raises(UsageError, match=said), new_file(path, source, force=True):
            raise AssertionError("not reached")
    with pytest.raises(SparkchatError, match="cannot be written"), new_file(tmp_path / "no" / "a", source, force=False):
        raise AssertionError("not reached")


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SparkchatError) as caught, new_file(tmp_path / "a.csv", tmp_path / "s", force=False) as write:
        write("x")
    assert caught.value.exit_code == 5 and os.listdir(tmp_path) == ["user"]
