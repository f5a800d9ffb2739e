"""What else the full-screen chat shows and gives away: panel, help, inspector, comparison, copies, exports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.color import Color

from sparkchat.ui.bridge import Batch
from sparkchat.ui.scripted import ScriptedOptions
from ui.chat import make_config, rows_of

SLOW = ScriptedOptions(tokens_per_second=40)
Open = Callable[..., Any]


async def test_token_colours_tell_drafts_from_the_rest(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.say("short")
        await c.pilot.press("f3")
        await c.pilot.pause()
        y = next(y for y, row in enumerate(rows_of(c.app)) if "short answer" in row)
        strip = c.app.screen._compositor.render_strips()[y]
        underlined = "".join(segment.text for segment in strip if segment.style and segment.style.underline)
        plain = "".join(segment.text for segment in strip if segment.style and not segment.style.underline)
        assert underlined.strip() and plain.strip()
        await c.pilot.press("f3")
        await c.pilot.pause()
        strip = c.app.screen._compositor.render_strips()[y]
        assert not any(segment.style and segment.style.underline for segment in strip)


async def test_selecting_with_the_mouse_copies_the_source(chat: Open) -> None:
    async with chat(options=ScriptedOptions(text="some **bold** words\nnext \x1b line")) as c:
        await c.ready()
        await c.say("x")
        y = next(y for y, row in enumerate(rows_of(c.app)) if "some bold words" in row)
        await c.pilot.mouse_down("#transcript", offset=(5, y - 1))
        await c.pilot.hover("#transcript", offset=(4, y))
        await c.pilot.mouse_up("#transcript", offset=(4, y))
        await c.pilot.press("ctrl+c")
        assert c.app.clipboard == "bold** words\nnext "


@pytest.mark.parametrize(
    ("begin", "end_at", "end", "copied"),
    [
        ((1, 2), "#panel", (3, 4), "ine one\ntwo\nthree"),
        ((1, 2), "#transcript", (77, 2), "ine one"),  # the scroll bar
        ((0, 1), "#transcript", (2, 4), "line one\ntwo\nthr"),  # from an empty row on
        ((0, 4), "#transcript", (9, 5), "three"),  # into an empty row
        ((0, 4), "#prompt", (9, 0), "three\nend"),
    ],
)
async def test_a_selection_ends_where_the_text_does(
    chat: Open, begin: tuple[int, int], end_at: str, end: tuple[int, int], copied: str
) -> None:
    async with chat(size=(100, 24), options=ScriptedOptions(tokens_per_second=2000, text="line one\ntwo\nthree")) as c:
        await c.ready()
        await c.say("x")
        c.app.chat._answers.note("end")
        c.app.chat._answers._transcript.sections.pop(-2)  # the line of numbers
        c.app.transcript.update_rows(all_rows=True)
        await c.pilot.pause()
        assert [row[:59].rstrip() for row in rows_of(c.app)[1:8]] == ["❯ x", "", "line one", "two", "three", "", "end"]
        await c.pilot.mouse_down("#transcript", offset=begin)
        await c.pilot.hover(end_at, offset=end)
        await c.pilot.mouse_up(end_at, offset=end)
        await c.pilot.press("ctrl+c")
        assert c.app.clipboard == copied


async def test_copying_sends_the_stored_text_to_the_terminal(chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    monkeypatch.delenv("TMUX", raising=False)
    async with chat(options=ScriptedOptions(text="a\x1b[/]\n```\ncode\n```\n")) as c:
        await c.ready()
        await c.say("x")
        written: list[str] = []
        c.app._driver.write = written.append
        await c.send("/copy")
        await c.send("/copy code")
        await c.pilot.pause()
        sent = [base64.b64decode(w[7:-1]).decode() for w in written if w.startswith("\x1b]52;c;")]
        assert sent == ["a\x1b[/]\n```\ncode\n```\n", "code"]
        assert "OSC 52" in c.status


async def test_help_lists_what_is_bound(chat: Open) -> None:
    async with chat(size=(120, 80)) as c:
        await c.ready()
        await c.pilot.press("f1")
        await c.pilot.pause(0.1)
        shown = c.screen
        for word in ("shift+tab, f6", "ctrl+c", "/export", "/quit", "f3"):
            assert word in shown, word
        await c.pilot.press("escape")
        await c.pilot.pause()
        assert "shift+tab, f6" not in c.screen and c.app.prompt.has_focus


async def test_panel_key_and_stats_command(chat: Open) -> None:
    async with chat(size=(120, 40)) as c:
        await c.ready()
        await c.say("prose")
        assert "verify" in c.screen and "steps:" in c.screen
        await c.pilot.press("f2")
        await c.pilot.pause()
        assert "steps:" not in c.screen
        await c.say("/stats on")
        await c.pilot.pause()
        assert "steps:" in c.screen


async def test_export_and_regenerate(chat: Open, tmp_path: Path) -> None:
    async with chat(size=(120, 40), options=ScriptedOptions(text="raw \x1b[/] text")) as c:
        await c.ready()
        await c.say("question")
        await c.say("/regen")
        assert len(c.engine.requests) == 2 and len(c.app.chat.conversation.turns) == 1
        await c.say(f"/export {tmp_path}/chat.md")
        await c.say(f"/export {tmp_path}/chat.json")
        assert "raw \x1b[/] text" in (tmp_path / "chat.md").read_text()
        assert json.loads((tmp_path / "chat.json").read_text())["turns"][0]["text"] == "raw \x1b[/] text"
        await c.say(f"/export {tmp_path}/chat.md")
        assert "exists already" in c.said


async def test_the_trace_of_the_session_is_exported_too(chat: Open, tmp_path: Path) -> None:
    async with chat(size=(120, 40), config=make_config(max_tokens=40)) as c:
        await c.ready()
        await c.say(f"/export {tmp_path}/report.html")
        assert "none is being written" in c.said
        await c.say(f"/trace {tmp_path}/t.spark.jsonl")
        await c.say("prose")
        for name in ("report.html", "steps.csv", "plots.svg", "perfetto s.json", "confidence c.jsonl"):
            *wish, file = name.split()
            await c.say(" ".join(["/export", *wish, f"{tmp_path}/{file}"]))
            await c.until(lambda file=file: f"{file} written" in c.said)
            assert (tmp_path / file).stat().st_size > 500
        await c.say(f"/export {tmp_path}/steps.csv")
        await c.until(lambda: "exists" in c.said)
        assert not [each for each in tmp_path.iterdir() if each.name.endswith(".part")]


async def test_a_long_export_is_stopped_by_escape_and_leaves_nothing(chat: Open, tmp_path: Path) -> None:
    endless = tmp_path / "endless.spark.jsonl"
    os.mkfifo(endless)  # a trace that is never read to its end
    async with chat(size=(120, 40), config=make_config(max_tokens=40)) as c:
        await c.ready()
        await c.say(f"/trace {tmp_path}/t.spark.jsonl")
        await c.say("prose")
        c.app.chat.trace._writer.path = endless
        await c.say(f"/export {tmp_path}/report.html")
        await c.until(lambda: any(each.name.endswith(".part") for each in tmp_path.iterdir()))
        await c.say("short")  # the chat goes on meanwhile
        assert "this is a short answer" in c.screen and "report.html: 0 %, esc stops it" in c.screen
        await c.say(f"/export {tmp_path}/other.html")
        assert "esc stops it" in c.said and not (tmp_path / "other.html").exists()
        await c.pilot.press("escape")
        await c.until(lambda: "was not written: stopped" in c.said)
        assert not [each.name for each in tmp_path.iterdir() if "html" in each.name]


async def test_no_colour_means_no_colour(chat: Open) -> None:
    async with chat(config=make_config(color="never")) as c:
        await c.ready()
        await c.say("code")
        for strip in c.app.screen._compositor.render_strips():
            for line_filter in c.app.get_line_filters():
                strip = strip.apply_filter(line_filter, Color.parse("black"))
            for segment in strip:
                if segment.style is not None:
                    assert segment.style.color is None or segment.style.color.is_default
                    assert segment.style.bgcolor is None or segment.style.bgcolor.is_default


async def test_a_reason_that_has_no_room_can_be_read_in_full(chat: Open) -> None:
    options = ScriptedOptions(tokens_per_second=2000, mode="cap-accept")
    async with chat(size=(40, 12), config=make_config("cap-accept"), options=options) as c:
        await c.ready()
        await c.say("/mode")
        assert "does not speed up" not in c.screen.split("mode: ")[0]
        assert "mode: cap-accept (cap-accept: the whole block" in c.said and "does not speed up)" in c.said


@pytest.mark.parametrize("theme", ["textual-dark", "ansi-dark", "ansi-light"])
async def test_nothing_is_written_in_the_colour_that_it_stands_on(chat: Open, theme: str) -> None:
    options = ScriptedOptions(tokens_per_second=5000, accuracy=0.4, mode="cap-accept")
    async with chat(size=(100, 40), config=make_config("cap-accept"), options=options) as c:
        c.app.theme = theme
        await c.ready()
        await c.say("code")
        assert "cap-accept: the whole block" in c.screen
        for key in ("f3", "alt+left", "f4", "escape"):
            await c.pilot.press(key)
            await c.pilot.pause()
            segments = [each for strip in c.app.screen._compositor.render_strips() for each in strip]
            colors = {(each.style.color, each.style.bgcolor) for each in segments if each.style and each.text.strip()}
            assert len(colors) > 1
            assert not [pair for pair in colors if pair[0] == pair[1] and pair[0] and not pair[0].is_default]


async def test_comparing_runs_the_question_under_every_mode_with_one_seed(chat: Open) -> None:
    async with chat(size=(120, 40), options=ScriptedOptions(tokens_per_second=2000)) as c:
        await c.ready()
        await c.say("/compare")
        assert "ask something first" in c.said
        await c.say("short")
        await c.pilot.press("f5")
        await c.until(lambda: "Fastest here" in c.said)
        requests = c.engine.requests[1:]
        assert [request.mode for request in requests] == ["off", "static", "compact", "cap-accept"]
        assert {request.sampling.seed for request in requests} == {1} and {r.session for r in requests} == {None}
        assert all(request.messages == c.engine.requests[0].messages for request in requests)
        await c.pilot.pause(0.1)
        for words in ("off", "cap-accept", "1.00x", "text the reference", "text the same", "Fastest here"):
            assert words in c.screen, words
        assert c.screen.count("Hello there") == 4
        await c.pilot.press("escape")
        await c.pilot.pause(0.1)
        assert "speed-up" in c.screen and c.app.prompt.has_focus
        assert len(c.app.chat.conversation.messages) == 2 and c.app.chat.conversation.mode == "static"
        # Once more: its answers can be told from those before, in a trace too.
        await c.say("/compare")
        await c.until(lambda: c.said.count("Fastest here") == 2)
        assert len({request.id for request in c.engine.requests}) == len(c.engine.requests) == 9
        assert c.engine.requests[5].messages == c.engine.requests[1].messages


async def test_a_comparison_can_be_stopped(chat: Open) -> None:
    async with chat(options=ScriptedOptions(tokens_per_second=8), config=make_config(max_tokens=30)) as c:
        await c.ready()
        await c.say("short")
        await c.pilot.press("f5")
        await c.until(lambda: "comparing off" in c.status)
        await c.pilot.press("escape")
        assert "comparison stopped" in c.said
        await c.pilot.pause()
        assert "text not run: stopped" in c.screen
        await c.pilot.press("escape")
        await c.pilot.pause(0.1)
        await c.say("hello")
        assert c.app.chat.conversation.turns[-1].answer.text


async def test_the_inspector_shows_every_step(chat: Open) -> None:
    async with chat(size=(120, 40)) as c:
        await c.ready()
        await c.pilot.press("f4")
        await c.pilot.pause()
        assert "no step yet" in c.screen
        await c.pilot.press("escape")
        await c.say("prose")
        await c.pilot.press("f4")
        await c.pilot.pause()
        num_steps = c.app.chat._snapshot.num_steps
        assert f"{num_steps} of {num_steps} steps" in c.screen and "survival" in c.screen
        await c.pilot.press("home", "right")
        await c.pilot.pause()
        assert f"2 of {num_steps} steps" in c.screen
        await c.pilot.press("f4")
        await c.pilot.pause()
        assert c.app.prompt.has_focus


async def test_the_palette_holds_commands_and_keys(chat: Open) -> None:
    async with chat(size=(120, 40)) as c:
        await c.ready()
        titles = [command.title for command in c.app.get_system_commands(c.app.screen)]
        assert "/export" in titles and "stats panel" in titles
        await c.pilot.press("f10")
        await c.pilot.pause(0.3)
        await c.pilot.press(*"/stats")
        await c.pilot.pause(0.5)
        await c.pilot.press("enter")
        await c.until(lambda: "no answer yet" in c.said)


async def test_a_cost_table_measured_later_takes_the_warning_away(chat: Open) -> None:
    async with chat(config=make_config("compact"), options=ScriptedOptions(has_cost_table=False, mode="compact")) as c:
        await c.ready()
        await c.until(lambda: "no cost table" in c.screen)
        info = {**c.app.chat.info, "cost_table": {"id": "x", "rows": [1], "step_ms": [2.0]}}
        c.app.chat.receive([Batch([{"event": "info", "info": info}])])
        await c.until(lambda: "no cost table" not in c.screen)
