"""The trace file survives kills and full disks, and never replaces what it was not told to replace."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fixtures.trace_sessions import Answer, ready, side_by_side
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.trace import SCHEMA, TraceWriter, read_lines, verify
from sparkchat.trace.writer import prompt_sha256


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the file")

    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def write(path: Path, *answers: Answer, force: bool = False, **options: Any) -> list[dict[str, Any]]:
    with TraceWriter(path, force, **options) as writer:
        writer.event(ready())
        for event in side_by_side(*answers):
            assert writer.event(event) is None
    return strict_lines(path)


def test_every_event_becomes_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    with TraceWriter(path, argv=["run", "tiny"]) as writer:
        writer.event({"event": "loading", "stage": "weights", "message": "x", "done": 1, "total": 2})
        writer.event(ready())
        for n, event in enumerate(Answer(num_tokens=6).events()):
            writer.event(event)
            if n == 2:
                writer.event({"event": "mode_change", "id": None, "from": "static", "to": "compact", "t_ns": 5})
        writer.event({"event": "notice", "id": None, "message": "x"})
    lines = strict_lines(path)
    assert {line["schema"] for line in lines} == {SCHEMA}
    kinds = [line["type"] for line in lines]
    assert kinds[:2] == ["header", "turn"] and kinds[-1] == "end" and kinds.count("mode_change") == 1
    header, turn, end = lines[0], lines[1], lines[-1]
    assert header["model"] == "tiny" and header["argv"] == ["run", "tiny"] and header["redaction"] == "none"
    assert turn["prompt_token_ids"] == [1, 2, 3] and turn["seed"] == 0 and turn["turn"] == 0 and turn["id"] == "a"
    assert len(end["token_ids"]) == 6 and end["finish_reason"] == "length" and "prompt_token_ids" not in end
    step = next(line for line in lines if line["type"] == "step")
    assert step["committed_ids"] and "event" not in step and step["deltas"][0]["origins"] == ["prefill"]


def test_mode_is_0600_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        for force in (False, True):
            write(tmp_path / "a.spark.jsonl", Answer(), force=force)
            assert stat.S_IMODE((tmp_path / "a.spark.jsonl").stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_lines_reach_the_file_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    writer = TraceWriter(path)
    writer.event(ready())
    assert len(strict_lines(path)) == 1
    for event in Answer().events():
        size = path.stat().st_size
        writer.event(event)
        assert (path.stat().st_size > size) == (event["event"] != "delta")
        strict_lines(path)
    writer.close()


def test_existing_file_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    path.write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        TraceWriter(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError):
        TraceWriter(link)
    assert not (tmp_path / "nowhere").exists()


def test_force_keeps_the_old_file_until_the_new_header_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    path.write_text("old")
    writer = TraceWriter(path, force=True)
    assert path.read_text() == "old"
    writer.event(ready())
    assert strict_lines(path)[0]["type"] == "header"
    for event in Answer().events():
        writer.event(event)
    writer.close()
    assert verify(path).ok
    assert list(tmp_path.glob(".*")) == []


def test_force_without_a_header_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    path.write_text("old")
    with TraceWriter(path, force=True):
        pass
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a.spark.jsonl"]


def test_force_follows_a_link_to_its_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write(link, Answer(), force=True)
    assert link.is_symlink() and verify(real).ok


@pytest.mark.parametrize("target", ["/dev/null", "."])
def test_force_replaces_only_ordinary_files(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="ordinary"):
        TraceWriter(target, force=True)
    assert Path(target).exists() and not Path(target).is_file()


def test_missing_folder_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(SparkchatError, match="cannot be written"):
        TraceWriter(tmp_path / "no" / "a.spark.jsonl")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("partial", [0, 7])
def test_full_disk_ends_the_trace_with_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, partial: int
) -> None:
    path = tmp_path / "a.spark.jsonl"
    writer = TraceWriter(path)
    real, room = os.write, [3000]

    def limited(file: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(code, os.strerror(code))
        if len(data) > room[0]:
            room[0] = 0
            if not partial:
                raise OSError(code, os.strerror(code))
            return real(file, data[:partial])
        room[0] -= len(data)
        return real(file, data)

    monkeypatch.setattr(os, "write", limited)
    writer.event(ready())
    notices = [writer.event(event) for event in Answer(num_tokens=60).events()]
    said = [notice for notice in notices if notice]
    assert len(said) == 1 and os.strerror(code) in said[0] and "chat goes on" in said[0]
    assert not writer.is_open and writer.close() is None
    assert len(strict_lines(path)) >= 2
    assert verify(path).ok


def test_full_tmpfs(tmp_path: Path) -> None:
    """A real full device: /dev/full accepts the open and refuses every write."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    writer = TraceWriter(tmp_path / "a.spark.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file)
    os.close(full)
    assert "No space left" in (writer.event(ready()) or "")
    assert not writer.is_open


def test_removed_folder_does_not_stop_the_chat(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = TraceWriter(folder / "a.spark.jsonl")
    writer.event(ready())
    (folder / "a.spark.jsonl").unlink()
    folder.rmdir()
    for event in Answer().events():
        writer.event(event)
    writer.close()


def test_nan_becomes_null_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    events = list(Answer(num_tokens=8).events())
    for event in events:
        if event["event"] == "step":
            event["draft_prob"] = [float("nan"), float("-inf"), float("inf"), 1e30]
            event["predicted_theta"] = float("nan")
        if event["event"] == "end":
            event["result"]["timing"]["tokens_per_second"] = float("inf")
            event["result"]["text"] += "\u2028\x85\udc80"
    with TraceWriter(path) as writer:
        for event in [ready(), *events]:
            writer.event(event)
    lines = strict_lines(path)
    steps = [line for line in lines if line["type"] == "step"]
    assert steps[0]["draft_prob"] == [None, None, None, 1e30] and steps[0]["predicted_theta"] is None
    assert lines[-1]["timing"]["tokens_per_second"] is None and lines[-1]["text"].endswith("\u2028\x85\ufffd")
    assert len(path.read_text("utf-8").splitlines()) == len(lines)


def test_session_with_nothing_in_it(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.spark.jsonl", Answer(num_tokens=0, finish_reason="stop"))
    assert lines[-1]["calibration"] is None and lines[-1]["speculation"]["mean_acceptance_length"] is None
    assert verify(tmp_path / "a.spark.jsonl").ok


def test_answers_side_by_side_and_ids_used_again(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    with TraceWriter(path) as writer:
        for event in [ready(), *side_by_side(Answer("x", seed=1), Answer("y", seed=2)), *Answer("x", seed=3).events()]:
            writer.event(event)
    report = verify(path)
    assert [(turn.turn, turn.id) for turn in report.turns] == [(0, "x"), (1, "y"), (2, "x")] and report.ok


def test_redacted_prompt_leaves_no_prompt_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    prompt = (31337, 31338, 31339)
    asked = Answer(prompt=prompt, question="my secret question")
    lines = write(path, asked, redaction="prompt", argv=["run", "my secret prompt"])
    assert "31337" not in path.read_text() and "secret" not in path.read_text()
    assert lines[1]["prompt_token_ids"] is None and lines[1]["prompt_sha256"] == prompt_sha256(prompt)
    assert lines[0]["redaction"] == "prompt" and lines[1]["num_prompt_tokens"] == 3
    assert verify(path).ok


def test_refused_request_and_load_failure_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    with TraceWriter(path) as writer:
        writer.event({"event": "error", "error": "NotEnoughMemory", "message": "no room"})
        refused = {"finish_reason": "error", "error": "too long", "token_ids": []}
        writer.event({"event": "end", "id": "q", "result": refused, "thinking": "", "error": "UsageError"})
    lines = strict_lines(path)
    assert [line["type"] for line in lines] == ["header", "error", "error"]
    assert lines[1]["error"] == "NotEnoughMemory" and lines[2]["id"] == "q" and lines[2]["message"] == "too long"


def test_trace_opened_in_mid_answer_starts_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    running = list(Answer("old").events())
    with TraceWriter(path) as writer:
        for event in [ready(), *running[5:], *Answer("new").events()]:
            writer.event(event)
    report = verify(path)
    assert [turn.id for turn in report.turns] == ["new"] and report.ok


def test_engine_crash_is_recorded_and_a_new_engine_starts_clean(tmp_path: Path) -> None:
    path = tmp_path / "a.spark.jsonl"
    cut = list(Answer("a").events())[:-1]
    with TraceWriter(path) as writer:
        for event in [ready(), *cut, {"event": "crashed", "message": "killed"}, ready(), *Answer("b").events()]:
            writer.event(event)
    lines, report = list(read_lines(path)), verify(path)
    assert next(line.data["error"] for line in lines if line.type == "error") == "EngineCrash"
    assert report.ok and [turn.is_complete for turn in report.turns] == [False, True]
    assert [line.type for line in lines].count("header") == 2


_ENDLESS = """
import sys
sys.path.insert(0, sys.argv[2])
from sparkchat.trace import TraceWriter
from fixtures.trace_sessions import Answer, ready
writer = TraceWriter(sys.argv[1])
writer.event(ready())
n = 0
while True:
    for event in Answer(str(n), num_tokens=40, seed=n).events():
        writer.event(event)
    n += 1
    print(n, flush=True)
"""


def test_kill_at_any_moment_loses_at_most_the_last_line(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    for round_number in range(6):
        path = tmp_path / f"{round_number}.spark.jsonl"
        command = [sys.executable, "-c", _ENDLESS, str(path), str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root.parent, text=True) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            time.sleep(0.01 * round_number)
            process.send_signal(signal.SIGKILL)
            said += process.stdout.read()
        complete = int(said.split()[-1])
        report = verify(path)
        assert report.ok, report.to_text()
        assert sum(turn.is_complete for turn in report.turns) >= complete
