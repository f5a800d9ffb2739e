"""The full-screen chat by its keys and its screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.color import Color
from textual.events import Paste

from sparkchat.ui.bridge import Batch
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.scripted import HOSTILE, SCRIPTS, ScriptedOptions
from ui.chat import make_config, rows_of

SLOW = ScriptedOptions(tokens_per_second=40)
Open = Callable[..., Any]


async def test_a_question_is_answered(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.say("hello")
        assert "hello" in c.screen and "Hello there, this is a short answer." in c.screen
        assert "acceptance length" in c.screen and "complete" in c.screen
        assert c.app.chat.conversation.messages == (
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello there, this is a short answer."},
        )


async def test_the_screen_opens_while_the_engine_loads_and_a_message_may_wait(chat: Open) -> None:
    async with chat(size=(120, 40), options=ScriptedOptions(load_seconds=600, tokens_per_second=2000)) as c:
        await c.until(lambda: "loading" in c.status)
        await c.send("hello")
        await c.until(lambda: "your message waits" in c.status)
        c.engine.finish_loading()
        await c.answered()
        assert "short answer" in c.screen


async def test_every_request_carries_the_chat_and_its_session(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.say("one")
        await c.say("two")
        first, second = c.engine.requests
        assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
        assert first.session == second.session and first.id != second.id
        await c.send("/new")
        await c.say("three")
        assert len(c.engine.requests[2].messages) == 1 and c.engine.requests[2].session != first.session


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_stopping_keeps_what_came(chat: Open, key: str) -> None:
    async with chat(options=SLOW) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.turn.answer.text)
        await c.pilot.press(key)
        await c.answered()
        turn = c.app.chat.conversation.turns[0]
        assert turn.answer.was_stopped and SCRIPTS["prose"].startswith(turn.answer.text)
        assert turn.answer.text and "stopped" in c.screen
        assert turn.answer.result["finish_reason"] == "cancelled"
        await c.say("short")
        assert c.engine.requests[1].messages[1]["content"] == turn.answer.text


async def test_an_engine_that_does_not_react_is_left_alone(chat: Open) -> None:
    async with chat(options=SLOW) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.turn.answer.text)
        c.engine.cancel = lambda request_id: None
        await c.pilot.press("escape")
        await c.until(lambda: c.app.chat.active is None, 1.0)
        shown = c.app.chat.conversation.turns[0].answer.text
        await c.pilot.pause(0.3)
        assert c.app.chat.conversation.turns[0].answer.text == shown
        assert "stopped" in c.screen


async def test_ctrl_c_ladder(chat: Open) -> None:
    async with chat(options=SLOW) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.turn.answer.text)
        c.app.prompt.set_value("half a message")
        c.app.prompt.select_all()
        await c.pilot.press("ctrl+c")
        assert c.app.clipboard == "half a message" and c.app.chat.active is not None
        c.app.prompt.move_cursor((0, 0))
        await c.pilot.press("ctrl+c")
        await c.answered()
        assert c.app.prompt.value == "half a message"
        await c.pilot.press("ctrl+c")
        assert c.app.prompt.value == "" and c.app.is_running
        await c.pilot.press("up")
        assert c.app.prompt.value == "half a message"
        c.app.prompt.clear()
        await c.pilot.press("ctrl+c")
        assert c.app.is_running and "ctrl+c again" in c.status
        await c.pilot.press("ctrl+c")
        await c.pilot.pause()
        assert c.app.return_code == 0 and not c.app.is_running


async def test_ctrl_c_while_loading_takes_the_waiting_message_back(chat: Open) -> None:
    async with chat(options=ScriptedOptions(load_seconds=30)) as c:
        await c.send("hello")
        await c.until(lambda: c.app.chat.active is not None)
        await c.pilot.press("ctrl+c")
        assert c.app.chat.active is None and "stopped" in c.screen


async def test_ctrl_d_leaves_only_when_nothing_is_written(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        c.app.prompt.set_value("ab")
        c.app.prompt.move_cursor((0, 0))
        await c.pilot.press("ctrl+d")
        assert c.app.prompt.value == "b" and c.app.is_running
        await c.pilot.press("delete", "ctrl+d")
        await c.pilot.pause()
        assert not c.app.is_running


@pytest.mark.parametrize("key", ["shift+tab", "f6"])
async def test_the_mode_changes_during_an_answer(chat: Open, key: str) -> None:
    async with chat(size=(120, 40), options=ScriptedOptions(tokens_per_second=60)) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat._snapshot.mode == "static")
        await c.pilot.press(key)
        assert c.app.prompt.has_focus and c.app.chat.conversation.mode == "compact"
        await c.until(lambda: c.app.chat._snapshot.mode == "compact")
        assert "compact" in c.status
        await c.pilot.press("escape")


async def test_mode_by_name_and_unknown_words(chat: Open) -> None:
    async with chat(size=(120, 40)) as c:
        await c.ready()
        await c.say("/mode cap-accept")
        assert c.app.chat.conversation.mode == "cap-accept" and "capped" in c.screen
        await c.say("/mode capaccept")
        assert "did you mean 'cap-accept'?" in c.screen
        await c.say("/exprt x")
        assert "did you mean '/export'?" in c.screen
        await c.say("/set temprature 1")
        assert "did you mean 'temperature'?" in c.screen
        await c.say("/set temperature 200")
        assert "temperature 200.0 is not possible" in c.screen
        await c.say("/set temperature 0.5")
        assert c.app.chat.conversation.sampling.temperature == 0.5


async def test_without_a_drafter_the_reason_stays_on_the_screen(chat: Open) -> None:
    options = ScriptedOptions(has_drafter=False, mode="off", reason_off="no drafter is published for this model")
    async with chat(config=make_config("off"), options=options) as c:
        await c.ready()
        await c.pilot.pause(0.1)
        assert "no drafter is published" in rows_of(c.app)[1]
        await c.say("hello")
        await c.pilot.press("f6")
        assert "needs a drafter" in c.status and "no drafter is published" in rows_of(c.app)[1]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_screen_fits_and_follows_resizing(chat: Open, size: tuple[int, int], ascii_only: bool) -> None:
    async with chat(size=(80, 24), config=make_config(ascii=ascii_only)) as c:
        await c.ready()
        await c.say("prose")
        await c.pilot.resize_terminal(*size)
        await c.pilot.pause(0.1)
        rows = rows_of(c.app)
        assert len(rows) == size[1] and all(text_width(row) == size[0] for row in rows)
        assert "static" in rows[-1] and "sparkchat" in rows[0]
        assert any("150 tokens" in row for row in rows)
        if ascii_only:
            assert all(row.isascii() for row in rows), [row for row in rows if not row.isascii()]


async def test_resizing_in_mid_answer_keeps_the_end_in_view(chat: Open) -> None:
    async with chat(config=make_config(max_tokens=3000), options=ScriptedOptions(tokens_per_second=800)) as c:
        await c.ready()
        await c.send("code")
        await c.until(lambda: len(c.app.transcript.rows) > 60)
        for size in ((40, 12), (120, 40), (80, 24)):
            await c.pilot.resize_terminal(*size)
            await c.pilot.pause(0.15)
            assert c.app.transcript.is_following
            assert round(c.app.transcript.scroll_y) == c.app.transcript.max_scroll_y


async def test_hostile_text_is_shown_and_harmless(chat: Open) -> None:
    words = [word for word in HOSTILE.replace("\n", " ").split(" ") if word.isascii() and word.isprintable()]
    config = make_config(max_tokens=None, label="model [bold]x[/] \x1b[31m")
    async with chat(size=(120, 45), config=config, options=ScriptedOptions(text=HOSTILE)) as c:
        await c.ready()
        await c.say(HOSTILE)
        screen = c.screen
        assert all(screen.count(word) >= 2 for word in words), [w for w in words if screen.count(w) < 2]
        assert "model [bold]x[/] ␛[31m" in screen
        assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in screen.replace("\n", ""))
        turn = c.app.chat.conversation.turns[0]
        assert turn.prompt == HOSTILE and turn.answer.text == HOSTILE
        await c.say("/nosuch [/] [bold red]")
        assert "nosuch" in c.screen


async def test_reading_above_is_not_disturbed_and_end_follows_again(chat: Open) -> None:
    async with chat(config=make_config(max_tokens=3000), options=ScriptedOptions(tokens_per_second=600)) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: len(c.app.transcript.rows) > 40)
        await c.pilot.press("pageup")
        top = c.app.transcript.render_line(0).text
        at, rows = c.app.transcript.scroll_offset.y, len(c.app.transcript.rows)
        await c.until(lambda: len(c.app.transcript.rows) > rows + 20)
        assert c.app.transcript.scroll_offset.y == at and c.app.transcript.render_line(0).text == top
        assert "more below" in rows_of(c.app)[0]
        await c.pilot.press("end")
        assert c.app.transcript.is_following
        rows = len(c.app.transcript.rows)
        await c.until(lambda: len(c.app.transcript.rows) > rows + 5)
        assert round(c.app.transcript.scroll_y) == c.app.transcript.max_scroll_y
        assert "more below" not in rows_of(c.app)[0]


async def test_enter_sends_and_other_ways_make_new_lines(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert c.app.prompt.value == "a\nb\nc\nd" and not c.engine.requests
        await c.pilot.press("enter")
        await c.answered()
        assert c.engine.requests[0].messages[0]["content"] == "a\nb\nc\nd"


async def test_pasting_never_sends_and_keeps_every_character(chat: Open) -> None:
    text = "first\r\nsecond\x1b[31m\u202etail\x00\x85 👨‍👩‍👧 \U0010ffff\n"
    async with chat() as c:
        await c.ready()
        c.app.prompt.post_message(Paste(text))
        await c.pilot.pause(0.05)
        assert not c.engine.requests and c.app.prompt.value == text.replace("\r\n", "\n")
        assert "␛[31m" in c.screen and "\x1b" not in c.screen
        await c.pilot.press("enter")
        await c.answered()
        assert c.engine.requests[0].messages[0]["content"] == text.replace("\r\n", "\n")


async def test_arrows_and_backspace_move_by_what_is_seen(chat: Open) -> None:
    seen = ["a", "👨‍👩‍👧", "1️⃣", "🇫🇷", "🇩🇪", "👋🏽", "e\u0301\u0302", "ก็", "好"]
    async with chat() as c:
        await c.ready()
        c.app.prompt.set_value("".join(seen))
        for _ in seen:
            await c.pilot.press("left")
        assert c.app.prompt.cursor_location == (0, 0)
        await c.pilot.press("right", "right")
        assert c.app.prompt.cursor_location == (0, len("".join(seen[:2])))
        await c.pilot.press("backspace", "end", "backspace")
        assert c.app.prompt.value == "".join([seen[0], *seen[2:-1]])
        assert all(text_width(row) == 80 for row in rows_of(c.app))


async def test_history_keeps_the_draft(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.say("first question")
        await c.say("second\nquestion")
        c.app.prompt.set_value("draft")
        await c.pilot.press("up")
        assert c.app.prompt.value == "second\nquestion"
        await c.pilot.press("up", "up")
        assert c.app.prompt.value == "first question"
        await c.pilot.press("down", "down", "down")
        assert c.app.prompt.value == "draft"
        c.app.prompt.set_value("first")
        await c.pilot.press("ctrl+r")
        assert c.app.prompt.value == "first question"


async def test_thinking_is_apart_and_folded(chat: Open) -> None:
    async with chat(size=(100, 40)) as c:
        await c.ready()
        await c.say("think short")
        assert "thinking" in c.screen and "Let me think" not in c.screen
        assert c.app.chat.conversation.turns[0].answer.thinking.startswith("Let me think")
        assert "Let me" not in c.app.chat.conversation.messages[1]["content"]
        await c.pilot.press("ctrl+t")
        await c.pilot.pause()
        assert "Let me think about this." in c.screen
        await c.pilot.press("ctrl+t")
        await c.pilot.pause()
        assert "Let me think about this." not in c.screen


async def test_a_crash_is_said_and_the_next_message_starts_the_engine_again(chat: Open) -> None:
    async with chat(size=(120, 40), options=SLOW) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.turn.answer.text)
        c.engine.crash("the engine was ended by SIGABRT [/]")
        await c.until(lambda: c.app.chat.state == "down")
        kept = c.app.chat.conversation.turns[0].answer.text
        assert kept and "SIGABRT [/]" in c.screen and "the chat is kept" in c.screen
        assert c.app.chat.failure.exit_code == 70
        await c.say("hello again")
        assert len(c.engines) == 2 and "short answer" in c.screen
        assert c.engine.requests[0].messages[1]["content"] == kept
        assert c.app.chat.failure is None


async def test_a_load_that_fails_is_said_and_sets_the_exit_code(chat: Open) -> None:
    options = ScriptedOptions(load_error=("NotEnoughMemory", "needs 9 GB, 4 GB are free"))
    async with chat(options=options) as c:
        await c.until(lambda: c.app.chat.state == "down")
        assert "needs 9 GB" in c.screen
        await c.pilot.press("ctrl+q")
        await c.pilot.pause()
        assert c.app.return_code == 4


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


async def test_a_session_is_traced_from_the_start(chat: Open, tmp_path: Path) -> None:
    path = tmp_path / "t.spark.jsonl"
    async with chat(options=SLOW, config=make_config(trace_path=path)) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.turn.answer.text)
        await c.pilot.press("f6", "ctrl+c")
        await c.answered()
    kinds = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert kinds[0] == "header" and "mode_change" in kinds and kinds[-1] == "end"


async def test_help_lists_what_is_bound(chat: Open) -> None:
    async with chat(size=(120, 60)) as c:
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


async def test_keys_can_be_given_other_places(chat: Open, own_folders: Path) -> None:
    folder = own_folders / "config" / "sparkchat"
    folder.mkdir()
    (folder / "keymap.toml").write_text('mode.cycle = "f7"\n"panel.togle" = "f8"\n')
    async with chat(size=(120, 40)) as c:
        await c.ready()
        assert "did you mean 'panel.toggle'?" in c.said
        await c.pilot.press("f6")
        assert c.app.chat.conversation.mode == "static"
        await c.pilot.press("f7")
        assert c.app.chat.conversation.mode == "compact"
        assert "f7  " in c.app.key_help()


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
        for words in ("speed-up", "1.00x", "the reference", "the same"):
            assert words in c.screen
        assert len(c.app.chat.conversation.messages) == 2 and c.app.chat.conversation.mode == "static"


async def test_a_comparison_can_be_stopped(chat: Open) -> None:
    async with chat(options=SLOW, config=make_config(max_tokens=30)) as c:
        await c.ready()
        await c.say("short")
        await c.pilot.press("f5")
        await c.until(lambda: "comparing off" in c.status)
        await c.pilot.press("escape")
        assert "comparison stopped" in c.said
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


@pytest.mark.parametrize("size", [(20, 6), (9, 3), (3, 2), (300, 100)])
async def test_odd_sizes_do_no_harm(chat: Open, size: tuple[int, int]) -> None:
    async with chat(size=size, config=make_config(max_tokens=60)) as c:
        await c.ready()
        for text in ("table", "code 你好", "/help"):
            await c.say(text)
        await c.pilot.press("f2", "f3", "f4", "escape", "f1", "escape", "ctrl+t", "pageup")
        await c.pilot.pause(0.05)
        assert all(text_width(row) == size[0] for row in rows_of(c.app))


async def test_a_cost_table_measured_later_takes_the_warning_away(chat: Open) -> None:
    async with chat(config=make_config("compact"), options=ScriptedOptions(has_cost_table=False, mode="compact")) as c:
        await c.ready()
        await c.until(lambda: "no cost table" in c.screen)
        info = {**c.app.chat.info, "cost_table": {"id": "x", "rows": [1], "step_ms": [2.0]}}
        c.app.chat.receive([Batch([{"event": "info", "info": info}])])
        await c.until(lambda: "no cost table" not in c.screen)
