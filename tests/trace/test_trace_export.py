"""Every export is valid in its own format, agrees with the trace, and is not harmed by hostile text."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import stat
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixtures.perfetto_rules import check_trace_events
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


def test_perfetto_events_are_valid_and_nest(session: Path) -> None:
    events = timeline(session)
    check_trace_events(events)
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
    check_trace_events(events)
    lanes = {event["name"]: event["tid"] for event in events if event["ph"] == "B"}
    assert lanes["answer 0"] != lanes["answer 1"] and lanes["answer 2"] in (lanes["answer 0"], lanes["answer 1"])


def test_perfetto_times_are_those_of_the_steps(tmp_path: Path) -> None:
    def spread(line: dict[str, Any]) -> None:
        if line["type"] == "step":
            line.update(t_ns=5_000_000_000 + line["i"] * 10_000_000, step_ms=8.0, draft_ms=2.0, verify_ms=5.0)

    path = write_session(tmp_path / "a", Answer("x", seed=1), change=spread)
    events = timeline(path)
    check_trace_events(events)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert all(event["dur"] == pytest.approx(8000) for event in steps)
    apart = [after["ts"] - before["ts"] for before, after in pairwise(steps)]
    assert apart == pytest.approx([10_000] * (len(steps) - 1))
    verifies = [event for event in events if event["name"] == "verify"]
    assert verifies[0]["ts"] == pytest.approx(steps[0]["ts"] + 2000) and verifies[0]["dur"] == pytest.approx(5000)


def test_perfetto_closes_answers_that_have_no_end(session: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(session.read_bytes()[: -len(session.read_bytes().splitlines()[-1]) - 40])
    check_trace_events(timeline(cut))


def test_perfetto_closes_what_a_dead_engine_left_open_in_its_own_process(session: Path, tmp_path: Path) -> None:
    lines = session.read_text().splitlines(keepends=True)
    again = [json.dumps({**json.loads(line), "turn": json.loads(line).get("turn", 0) + 7}) + "\n" for line in lines]
    twice = tmp_path / "twice"
    twice.write_text("".join([*lines[: len(lines) // 2], *again]))
    events = timeline(twice)
    check_trace_events(events)
    sessions = {event["pid"]: event["name"] for event in events if event["ph"] == "E"}
    assert sorted(sessions) == [1, 2]
    assert {event["tid"] for event in events if event["pid"] == 2 and event["ph"] == "B"} == {1, 2}


@pytest.mark.parametrize("seed", range(12))
def test_perfetto_holds_for_any_times(tmp_path: Path, seed: int) -> None:
    chooser = random.Random(seed)

    def scatter(line: dict[str, Any]) -> None:
        if chooser.random() < 0.9 and "t_ns" in line:
            line["t_ns"] = chooser.choice([None, 0, 10**9, 10**9 + 333, -5, 7 * 10**15]) or chooser.randrange(10**10)
        for name in ("step_ms", "draft_ms", "plan_ms", "verify_ms", "accept_ms"):
            if name in line:
                line[name] = chooser.choice([None, 0.0, 1e-7, 1 / 3, 2.0, 1e6, -1.0])

    answers = [Answer(str(n), modes=MODES, seed=n, num_tokens=12) for n in range(3)]
    check_trace_events(timeline(write_session(tmp_path / "a", *answers, change=scatter)))


def test_perfetto_marks_changes_of_mode_and_settings(session: Path, tmp_path: Path) -> None:
    lines = session.read_text().splitlines(keepends=True)
    at = len(lines) // 2
    t_ns = json.loads(lines[at])["t_ns"]
    changes = {"temperature": {"from": 1.0, "to": 0.2}}
    news = [
        {
            "schema": "sparkchat.trace/1",
            "type": "mode_change",
            "turn": None,
            "from": "off",
            "to": "static",
            "t_ns": t_ns,
        },
        {
            "schema": "sparkchat.trace/1",
            "type": "setting_change",
            "turn": 0,
            "id": "x",
            "changes": changes,
            "t_ns": t_ns,
        },
    ]
    marked = tmp_path / "marked"
    marked.write_text("".join([*lines[:at], *(json.dumps(each) + "\n" for each in news), *lines[at:]]))
    events = timeline(marked)
    check_trace_events(events)
    marks = {event["name"]: event["args"] for event in events if event["ph"] == "i" and event["s"] == "p"}
    assert marks["setting temperature"]["changes"] == changes and "mode off to static" in marks


def test_the_check_of_perfetto_events_finds_what_readers_drop(session: Path) -> None:
    """A check that lets everything pass would prove nothing."""
    events = timeline(session)
    steps = [n for n, event in enumerate(events) if event["name"].startswith("step ")]
    counter = next(n for n, event in enumerate(events) if event["ph"] == "C")
    end = next(n for n, event in enumerate(events) if event["ph"] == "E")
    for harm in (
        lambda all_: all_[steps[0]].update(dur=1e12),  # ends behind the answer
        lambda all_: all_[steps[-1]].update(ts=0.0, dur=0.0),  # goes back
        lambda all_: all_[steps[0]].update(ts=float("nan")),
        lambda all_: all_.pop(end),  # never ended
        lambda all_: all_.insert(end, dict(all_[end])),  # ended twice
        lambda all_: all_[counter].update(args={"other": 1}),
        lambda all_: all_[counter].update(args={"value": None}),
        lambda all_: all_.insert(9, {**all_[counter], "ph": "s", "id": 1}),  # a flow without an end
        lambda all_: all_.pop(0),  # no name of the process
        lambda all_: all_[steps[1]].update(tid=77),
    ):
        broken = [dict(event) for event in events]
        harm(broken)
        with pytest.raises(AssertionError):
            check_trace_events(broken)


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
