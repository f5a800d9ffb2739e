"""The chat on another engine, through every front end: the same transcript, reported figures, no choice of mode."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.harness import Finished, sparkchat
from remote.engines import LLAMA_CPP_PYTHON, VLLM, VLLM_OLD, VLLM_PLAIN
from remote.played import DONE, Part, Played, chunk
from sparkchat.config import RunConfig
from sparkchat.params import LoadSpec, SamplingParams
from sparkchat.remote.connection import Server
from sparkchat.remote.engine import RemoteEngine
from sparkchat.trace import summarize, verify
from sparkchat.ui.glyphs import glyphs
from sparkchat.ui.panel_view import panel_rows
from sparkchat.ui.stats import Snapshot
from ui.chat import Chat
from ui.pty_program import PtyProgram

Play = Callable[[Part], Played]


def text_of(rows: list[Any]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def open_screen(url: str) -> tuple[Any, Any]:
    """(app, trace) of a full-screen chat with the engine at ``url``."""
    from sparkchat.ui.app import SparkApp
    from sparkchat.ui.trace_sink import TraceSink

    config = RunConfig(spec=LoadSpec(name="the-model", model_path="", mode="server"))  # type: ignore[arg-type]
    trace = TraceSink()
    return SparkApp(config, lambda: RemoteEngine(Server(url), None, SamplingParams()), trace), trace


async def test_the_screen_shows_the_answer_its_figures_and_why_the_mode_is_fixed(play: Play) -> None:
    app, _ = open_screen(play(VLLM_OLD).url)
    try:
        async with app.run_test(size=(120, 40)) as pilot:
            chat = Chat(app, pilot, [])
            await chat.ready()
            await chat.say("hi")
            assert "Hello world!" in chat.screen
            assert "acceptance length 2.50" in chat.screen
            assert "accepted 6 of 12 verified" in chat.screen
            assert "vLLM at http://" in chat.screen and "decides how drafts are verified" in chat.screen
            await pilot.press("shift+tab")
            assert "the mode cannot be changed here" in chat.status
            for command in ("/mode compact", "/compare"):
                await chat.send(command)
                assert chat.said.count("the mode cannot be changed here") == (1 if command == "/mode compact" else 2)
            await chat.say("again")
            assert chat.said.count("Hello world!") == 2
    finally:
        app.bridge.close()


def test_the_program_itself_opens_the_chat_and_ends_when_the_server_is_gone_from_the_start(play: Play) -> None:
    played = play(VLLM)
    command = [sys.executable, "-m", "sparkchat", "run", "--engine", played.url]
    with PtyProgram(size=(110, 30), command=command) as program:
        program.shows("ready")
        program.send("hi\r")
        program.shows("Hello world!")
        program.shows("accepted 3 of 6 verified")
        program.send("\x11")
        assert program.ended() == 0
        program.assert_restored()
    command[-1] = "http://127.0.0.1:9"
    with PtyProgram(size=(110, 30), command=command) as program:
        program.shows("does not answer")
        program.send("\x11")
        assert program.ended() == 69
        program.assert_restored()


async def test_esc_stops_an_answer_there(play: Play) -> None:
    played = play(replace(VLLM, hold=threading.Event()))
    app, _ = open_screen(played.url)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            chat = Chat(app, pilot, [])
            await chat.ready()
            await chat.send("hi")
            await chat.until(lambda: "Hello" in chat.said)
            await pilot.press("escape")
            await chat.answered()
            await chat.until(lambda: played.cuts == 1)
            assert "stopped" in chat.said
    finally:
        app.bridge.close()


def test_a_panel_without_reports_holds_dashes() -> None:
    empty = dict.fromkeys(("source", "num_tokens", "num_steps", "num_verified", "num_proposed", "num_accepted"))
    empty |= dict.fromkeys(("mean_acceptance_length", "tokens_per_second"))
    shown = text_of(panel_rows(Snapshot(reported=empty), {}, 60, 20, glyphs(True)))
    assert "no speculation figures reported" in shown
    assert "acceptance length -" in shown
    assert "accepted - of - verified" in shown
    assert "0" not in shown


def run(played: Played, *args: str | Path, stdin: str = "") -> Finished:
    return sparkchat("run", "--engine", played.url, *args, stdin=stdin)


def test_one_answer_on_stdout_and_its_numbers(play: Play) -> None:
    done = run(play(VLLM), "--verbose", "the-model", "hi")
    assert (done.code, done.out) == (0, "Hello world!")
    assert "acceptance length:   2.50" in done.err
    assert "3 of 6 verified, - proposed" in done.err


def test_a_result_and_a_trace_that_holds(play: Play, tmp_path: Path) -> None:
    for part, ids in ((VLLM, [10, 11, 12, 13, 2]), (LLAMA_CPP_PYTHON, None)):
        trace = tmp_path / f"{part.owner}.spark.jsonl"
        done = run(play(part), "--json", "--trace", trace, "the-model", "hi")
        (result,) = done.records
        assert (result["text"], result["token_ids"], result["mode"]) == ("Hello world!", ids, "server")
        assert verify(trace).ok
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [line["type"] for line in lines] == ["header", "turn", "end"]
        assert lines[0]["engine"] == lines[1]["engine"]
        assert lines[2]["text"] == "Hello world!"
        told = summarize(trace).to_json()
        assert told["reported_acceptance_length"] == (2.5 if ids else None)
        assert told["mean_acceptance_length"] is None


def test_a_line_chat_keeps_what_was_said(play: Play) -> None:
    played = play(VLLM)
    done = run(played, "--plain", stdin="one\n/mode static\ntwo\n")
    assert done.code == 0
    assert done.out.count("Hello world!") == 2
    assert "the mode cannot be changed here" in done.out
    second = played.bodies[1][1]["messages"]
    assert [message["content"] for message in second] == ["one", "Hello world!", "two"]


def test_a_profile_lends_its_settings_to_the_server_s_only_model(play: Play) -> None:
    played = play(VLLM_PLAIN)
    done = run(played, "smollm2-135m", "hi")
    assert done.code == 0
    assert "asked in place of smollm2-135m" in done.err
    body = played.bodies[0][1]
    assert body["model"] == "the-model"
    assert body["temperature"] > 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--engine", "http://[x", "m", "hi"), 2, "no address"),
        (("--engine", "http://u:p@x", "m", "hi"), 2, "SPARKCHAT_ENGINE_KEY"),
        (("--engine", "http://127.0.0.1:9", "m", "hi"), 69, "does not answer"),
        (("--engine", "http://127.0.0.1:9", "--mode", "off", "m", "hi"), 2, "--mode off has no place"),
        (("--engine", "http://127.0.0.1:9", "--offline", "m", "hi"), 2, "--offline has no place"),
    ],
)
def test_what_cannot_be_is_one_line(args: tuple[str, ...], code: int, words: str) -> None:
    done = sparkchat("run", *args)
    assert (done.code, done.out) == (code, "")
    (line,) = done.err.splitlines()
    assert words in line


async def test_text_of_another_engine_is_no_terminal_control(play: Play) -> None:
    hostile = (chunk({"content": "\x1b]0;owned\x07\x1b[31m[bold]x"}), chunk({}, "stop"), DONE)
    app, _ = open_screen(play(replace(VLLM_PLAIN, chunks=hostile)).url)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            chat = Chat(app, pilot, [])
            await chat.ready()
            await chat.say("hi")
            assert "[bold]x" in chat.screen
            assert "\x1b" not in chat.screen
    finally:
        app.bridge.close()
