"""``sparkchat trace`` as a script sees it: data on stdout, one line on stderr, exit codes, files kept."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

from cli.conftest import Cli, child_environment, command
from fixtures.trace_files import HOSTILE, make_hostile, write_session
from fixtures.trace_sessions import Answer
from sparkchat.trace.export import FORMATS
from ui.pty_program import PtyProgram


@pytest.fixture
def session(tmp_path: Path) -> Path:
    return write_session(tmp_path / "s.spark.jsonl", Answer("x", seed=1), Answer("y", modes=("compact",), seed=2))


def test_summary_and_verify_of_one_and_of_several(main: Cli, session: Path) -> None:
    assert main("trace", "summary", session, "--json").json["num_turns"] == 2
    assert [found["num_turns"] for found in main("trace", "summary", session, session, "--json").json] == [2, 2]
    done = main("trace", "verify", session)
    assert done.code == 0 and "all checks hold" in done.out and not done.err


def test_verify_exits_with_6_and_names_the_file(main: Cli, session: Path) -> None:
    lines = session.read_text().splitlines(keepends=True)
    session.write_text("".join([*lines[:4], "garbage\n", *lines[4:]]))
    done = main("trace", "verify", session, "--json")
    assert done.code == 6 and str(session) in done.error and done.json["failures"][0]["line"] == 5
    assert main("trace", "summary", session).code == 0


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_convert_by_name_to_stdout_and_by_ending_to_a_file(main: Cli, session: Path, tmp_path: Path, name: str) -> None:
    ending = next(each.ending for each in FORMATS if each.name == name)
    target = tmp_path / f"out{ending}"
    done = main("trace", "convert", session, target)
    assert done.code == 0 and not done.out and str(target) in done.err
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    for args in ((), ("-",), ("-o", "-")):
        piped = main("trace", "convert", session, *args, "--to", name)
        assert piped.code == 0 and piped.out == target.read_text("utf-8")


@pytest.mark.parametrize(
    ("command", "code"), [("summary", 0), ("convert --to csv", 0), ("convert --to html", 2), ("replay --plain", 2)]
)
def test_a_pipe_is_read_once_or_refused_before_anything_is_printed(
    main: Cli, session: Path, command: str, code: int
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(session.read_bytes())
    word, *options = command.split()
    done = main("trace", word, f"/dev/fd/{reading}", *options)
    os.close(reading)
    assert done.code == code
    assert done.out if not code else not done.out and "is a pipe, and this reads it more than once" in done.error


def test_convert_keeps_existing_files_unless_forced(main: Cli, session: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")
    done = main("trace", "convert", session, target)
    assert done.code == 2 and "--force" in done.error and target.read_text() == "old"
    assert main("trace", "convert", session, "--output", target, "--force").code == 0
    assert target.read_text().startswith("line,turn,")
    before = session.read_bytes()
    done = main("trace", "convert", session, session, "--to", "csv", "--force")
    assert done.code == 2 and "the trace itself" in done.error and session.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("convert", "{}", "x.pdf"), 2, "--to"),
        (("convert", "{}"), 2, "no format"),
        (("convert", "{}", "--to", "pdf"), 2, "perfetto"),
        (("convert", "{}", "a.csv", "-o", "b.csv"), 2, "two files"),
        (("convert", "no", "--to", "csv"), 2, "not there"),
        (("convert", "{}", "/no/such/folder/x.csv"), 1, "cannot be written"),
        (("diff", "{}"), 2, "B"),
        (("diff", "{}", "no"), 2, "not there"),
        (("replay", "no", "--plain"), 2, "not there"),
        (("replay", "{}", "--plain", "--speed", "-1"), 2, "--speed"),
        (("replay", "{}", "--plain", "--speed", "nan"), 2, "--speed"),
        (("replay", "{}", "--plain", "--color", "red"), 2, "--color"),
        (("replay", "{}", "--plain", "--step"), 2, "full screen"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said_in_one_line(
    main: Cli, session: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    done = main("trace", *(arg.format(session) for arg in args))
    assert done.code == code and said in done.error and not done.out


def test_a_failed_conversion_leaves_no_file(main: Cli, tmp_path: Path) -> None:
    path = write_session(tmp_path / "a.spark.jsonl", Answer(has_confidence=False))
    before = sorted(os.listdir(tmp_path))
    done = main("trace", "convert", path, tmp_path / "out.jsonl")
    assert done.code == 2 and "confidences" in done.error and sorted(os.listdir(tmp_path)) == before


def test_damaged_lines_are_said_on_stderr(main: Cli, session: Path, tmp_path: Path) -> None:
    session.write_bytes(session.read_bytes() + b"garbage\nhalf a li")
    done = main("trace", "convert", session, "--to", "csv")
    assert done.code == 0 and "2 damaged lines" in done.error
    assert (
        "2 damaged lines of the trace are left out" in main("trace", "replay", session, "--plain", "--speed", "0").out
    )


def test_diff_text_json_and_exit_codes(main: Cli, session: Path, tmp_path: Path) -> None:
    other = write_session(tmp_path / "o.spark.jsonl", Answer("x", seed=1), Answer("y", seed=5))
    same = main("trace", "diff", session, session, "--exit-code")
    assert same.code == 0 and "same tokens: 2 of 2" in same.out and not same.err
    found = main("trace", "diff", session, other)
    assert found.code == 0 and "first difference at token 2" in found.out and "interval" in found.out
    assert main("trace", "diff", session, other, "--exit-code").code == 1
    assert main("trace", "diff", session, other, "--json").json["num_different"] == 1


def test_plain_replay_is_one_line_a_step(main: Cli, session: Path) -> None:
    done = main("trace", "replay", session, "--plain", "--speed", "0")
    lines = [json.loads(line) for line in session.read_text().splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    shown = [line for line in done.out.splitlines() if " step " in line]
    assert done.code == 0 and not done.err and len(shown) == len(steps)
    for text, step in zip(shown, steps, strict=True):
        assert f"turn {step['turn']} step {step['i'] + 1}  {step['mode']}  " in text
        assert f"verified {step['verify_len']} of {len(step['draft_ids'])}" in text
    assert done.out.splitlines()[-1].startswith("turn ") and "tokens" in done.out.splitlines()[-1]
    # Without a terminal the full screen is not tried.
    assert main("trace", "replay", session, "--speed", "0").out == done.out
    assert main("trace", "replay", session, "--speed", "0", "--ascii").out.isascii()


def test_hostile_text_reaches_no_terminal(main: Cli, tmp_path: Path) -> None:
    path = write_session(tmp_path / "h.spark.jsonl", Answer("x", seed=1), change=make_hostile)
    for args in (("summary",), ("verify",), ("replay", "--plain", "--speed", "0"), ("diff", str(path))):
        done = main("trace", args[0], path, *args[1:])
        assert "Traceback" not in done.err and done.out
        said = done.out + done.err
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u202a-\u202e\u2028\u2066-\u2069]", said), args


def test_the_screen_replays_and_leaves_the_terminal_as_it_was(session: Path) -> None:
    arguments = command("trace", "replay", session, "--step")
    with PtyProgram((100, 30), environment=child_environment(), command=arguments) as program:
        program.shows("paused 1x")
        program.send("\x1b[C\x1b[C")
        program.shows("step 2 of")
        program.send("\x1b[D")
        program.shows("step 1 of")
        program.send("+ ")
        program.shows("recording ends here")
        program.send("q")
        assert program.ended() == 0
        program.assert_restored()


def test_a_hostile_session_is_replayed_without_harm(tmp_path: Path) -> None:
    path = write_session(tmp_path / "h.spark.jsonl", Answer("x", seed=1), change=make_hostile)
    assert "\x1b]52" in HOSTILE
    arguments = command("trace", "replay", path, "--speed", "0")
    with PtyProgram((80, 24), environment=child_environment(), command=arguments) as program:
        program.shows("recording ends here")
        assert b"\x1b]52" not in program.raw and "\u202e".encode() not in program.raw
        program.send("q")
        assert program.ended() == 0
        program.assert_restored()
