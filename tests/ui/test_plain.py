"""The front ends without a screen: exact bytes for pipes, safe text for terminals, exit codes, strict JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparkchat import strict_json
from sparkchat.ui.line_reader import LineReader
from sparkchat.ui.scripted import HOSTILE, SCRIPTS
from ui.pty_program import PROGRAM, ROOT, PtyProgram

FAST = {"tokens_per_second": 3000}


def start(stdin: str | None = None, **wish: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), json.dumps({"front": "one_shot", **wish})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if stdin is not None:
        assert process.stdin is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        process.stdin = None
    return process


def run(stdin: str | None = None, **wish: Any) -> tuple[int, bytes, str]:
    process = start(stdin, **wish)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err.decode()


def test_a_pipe_gets_the_exact_bytes() -> None:
    code, out, err = run(options={**FAST, "text": HOSTILE})
    assert (code, out, err) == (0, HOSTILE.encode(), "")


def test_json_is_one_strict_object() -> None:
    code, out, _ = run(prompt="prose", config={"output": "json", "max_tokens": 30}, options=FAST)
    lines = out.decode().splitlines()
    result = strict_json.loads(lines[0])
    assert code == 0 and len(lines) == 1
    assert result["schema"] == "sparkchat.result/1" and result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) == 30


def test_jsonl_is_the_stream_of_events() -> None:
    code, out, _ = run(prompt="think short", config={"output": "jsonl"}, options=FAST)
    events = [strict_json.loads(line) for line in out.decode().splitlines()]
    kinds = [event["event"] for event in events]
    assert code == 0 and kinds[0] == "start" and kinds[-1] == "end" and set(kinds) == {"start", "delta", "step", "end"}
    text = "".join(e["text"] for e in events if e["event"] == "delta" and e["channel"] == "answer")
    assert text == events[-1]["text"] == SCRIPTS["short"]
    assert "result" not in events[-1]  # the event is the result
    ids = [token for e in events if e["event"] == "delta" for token in e["token_ids"]]
    assert ids == events[-1]["token_ids"]
    assert {"verify_len", "survival", "committed_ids"} <= set(next(e for e in events if e["event"] == "step"))


@pytest.mark.parametrize("output", ["text", "json", "jsonl"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_signal_keeps_the_partial_answer(output: str, number: signal.Signals, code: int) -> None:
    process = start(prompt="prose", config={"output": output, "verbose": True}, options={"tokens_per_second": 100})
    assert process.stderr is not None and process.stdout is not None
    while b"66%" not in process.stderr.readline():
        pass
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    if output == "text":
        assert out and SCRIPTS["prose"].encode().startswith(out)
    else:
        last = strict_json.loads(out.decode().splitlines()[-1])
        assert last["finish_reason"] == "cancelled" and last["text"] and SCRIPTS["prose"].startswith(last["text"])
    assert b"Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_loading_ends_at_once(number: signal.Signals, code: int) -> None:
    process = start(config={"verbose": True}, options={"load_seconds": 60})
    assert process.stderr is not None
    process.stderr.readline()
    before = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) == code and time.monotonic() - before < 4


def test_a_crash_is_one_line_and_70() -> None:
    code, out, err = run(prompt="prose", config={"output": "json"}, options=FAST, fault="crash")
    assert code == 70 and err.count("\n") == 1 and "SIGABRT" in err
    result = strict_json.loads(out)
    assert result["finish_reason"] == "error" and result["text"] and "SIGABRT" in result["error"]


def test_a_load_error_has_its_own_exit_code() -> None:
    code, out, err = run(options={"load_error": ("NotEnoughMemory", "needs 9 GB")})
    assert (code, out) == (4, b"") and "needs 9 GB" in err


def test_verbose_numbers_go_to_stderr() -> None:
    code, out, err = run(prompt="short", config={"verbose": True}, options=FAST)
    assert code == 0 and out.decode() == SCRIPTS["short"]
    assert "acceptance length" in err and "decode rate" in err and "finish reason" in err


def test_a_reader_that_goes_away_is_no_disaster() -> None:
    process = start(prompt="prose", options={"tokens_per_second": 500})
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(60) != 0


def test_a_trace_is_written_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "one.spark.jsonl"
    wish = {"prompt": "short", "config": {"trace_path": str(path)}, "options": FAST}
    assert run(**wish)[0] == 0
    kinds = [strict_json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert kinds[0] == "header" and kinds[-1] == "end"
    code, _, err = run(**wish)
    assert code == 2 and "exists already" in err


def test_a_terminal_gets_no_control_from_the_model() -> None:
    with PtyProgram(front="one_shot", options={**FAST, "text": "a\x1b[31mb\x9b2Jc\r\nd\u202e"}) as program:
        assert program.ended() == 0
        assert "a␛[31mb<9B>2Jc" in program.text and "d<U+202E>" in program.text
        assert b"\x1b[31m" not in program.raw and b"\xc2\x9b" not in program.raw


# The line REPL


def test_repl_answers_line_by_line_and_ends_with_the_input() -> None:
    code, out, err = run("hello\nshort\n", front="repl", options=FAST)
    assert code == 0 and out.decode().count(SCRIPTS["short"]) == 2
    assert out.decode().count("acceptance length") == 2 and "Traceback" not in err


def test_repl_keeps_texts_of_several_lines_together(tmp_path: Path) -> None:
    stdin = f'one \\\ntwo\n"""\nthree\n\nfour\n"""\n//usr\n/export {tmp_path}/c.json\n'
    run(stdin, front="repl", options=FAST)
    turns = json.loads((tmp_path / "c.json").read_text())["turns"]
    assert [turn["prompt"] for turn in turns] == ["one \ntwo", "three\n\nfour", "/usr"]


def test_repl_reads_and_writes_utf8_whatever_the_locale_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve 你好 👩‍💻"
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = start(front="repl", options={**FAST, "text": text})
    stdin = f"\ufefffirst {text}\r\n".encode() + b"h\xe9llo\n" + f"last\n/export {tmp_path}/c.json\n".encode()
    out, err = process.communicate(stdin, timeout=120)
    assert process.returncode == 0 and out.decode().count(text) == 2, err
    assert "line 2 is not UTF-8 and was not sent" in out.decode()
    turns = json.loads((tmp_path / "c.json").read_text("utf-8"))["turns"]
    assert [turn["prompt"] for turn in turns] == [f"first {text}", "last"]


def test_repl_recalls_and_edits_texts_of_several_lines_as_they_were(tmp_path: Path) -> None:
    def turns(name: str) -> list[str]:
        return [turn["prompt"] for turn in json.loads((tmp_path / name).read_text())["turns"]]

    with PtyProgram(front="repl", options={**FAST, "text": "ok"}) as program:
        program.shows(">>>")
        program.send("\x1b[200~one\n  two\x1b[201~\r")
        program.shows("complete")
        program.send("/edit\r")
        program.until(lambda: program.text.count("  two") == 2)
        program.send(" more\r")
        program.until(lambda: program.text.count("complete") == 2)
        program.send(f"/export {tmp_path}/a.json\r")
        program.until((tmp_path / "a.json").exists)
        program.send("\x04")
        assert program.ended() == 0
    assert turns("a.json") == ["one\n  two more"]
    with PtyProgram(front="repl", options={**FAST, "text": "ok"}) as program:
        program.shows(">>>")
        program.send("\x1b[A\x1b[A\r")
        program.shows("complete")
        program.send(f"/export {tmp_path}/b.json\r")
        program.until((tmp_path / "b.json").exists)
        program.send("\x04")
        assert program.ended() == 0
    assert turns("b.json") == ["one\n  two more"]


def test_repl_help_fits_the_terminal() -> None:
    with PtyProgram((64, 60), front="repl", options=FAST) as program:
        program.shows(">>>")
        program.send("/help\r")
        program.shows("ctrl+d leaves")
        assert "token colours on or off" in program.text


def test_repl_commands() -> None:
    lines = ["/mode compact", "/mod", "/set top_p 0.9", "/system Be [/] short", "/think on", "/copy", "/regen"]
    stdin = "\n".join([*lines, "/stats off", "short", "/quit", "never", ""])
    code, out, _ = run(stdin, front="repl", options=FAST)
    text = out.decode()
    assert code == 0
    for words in (
        "mode: compact",
        "did you mean '/mode'?",
        "top_p = 0.9",
        "system text: Be [/] short",
        "thinking: on",
        "nothing to copy",
        "nothing to answer again",
    ):
        assert words in text, words
    assert "acceptance length" not in text and text.count(SCRIPTS["short"]) == 1


def test_repl_survives_a_crash_and_tells_the_exit_code() -> None:
    code, out, err = run("prose\n", front="repl", options=FAST, fault="crash")
    assert code == 70 and "SIGABRT" in out.decode() and err.count("SIGABRT") == 1


def test_repl_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    with PtyProgram(front="repl", options={"tokens_per_second": 60}) as program:
        program.shows(">>>")
        program.send("prose\r")
        program.shows("A draft is a guess")
        program.send("\x03")
        program.shows("stopped")
        program.send("\x03")
        program.shows("ctrl+d or /quit leaves")
        program.send("/mode static\r")
        program.shows("mode: static")
        program.send("\x04")
        assert program.ended() == 0


@pytest.mark.parametrize("in_answer", [True, False])
def test_repl_ends_on_sigterm(in_answer: bool) -> None:
    with PtyProgram(front="repl", options={"tokens_per_second": 60}) as program:
        program.shows(">>>")
        if in_answer:
            program.send("prose\r")
            program.shows("A draft is a guess")
        program.signal(signal.SIGTERM)
        assert program.ended() == 143


@pytest.mark.parametrize(("term", "pastes"), [("dumb", "off"), ("", "off"), ("xterm-256color", "on")])
def test_a_dumb_terminal_is_not_asked_to_mark_pastes(
    term: str, pastes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows ``ESC [?2004h`` in front of every line."""
    asked: list[str] = []
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("readline.parse_and_bind", asked.append)
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)
    LineReader()
    assert f"set enable-bracketed-paste {pastes}" in asked
