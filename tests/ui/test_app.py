"""The full-screen chat by its keys and its screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


async def test_the_panel_comes_and_goes_with_the_room_at_once(chat: Open) -> None:
    async with chat(size=(80, 24)) as c:
        await c.ready()
        for size, has_room in (((40, 12), False), ((120, 40), True), ((50, 30), False), ((100, 10), True)):
            await c.pilot.resize_terminal(*size)
            assert c.app.panel.display is has_room, size
        await c.pilot.press("f2")
        for size in ((40, 12), (120, 40)):
            await c.pilot.resize_terminal(*size)
            assert not c.app.panel.display, size


async def test_resizing_in_mid_answer_keeps_the_end_in_view(chat: Open) -> None:
    async with chat(config=make_config(max_tokens=3000), options=ScriptedOptions(tokens_per_second=800)) as c:
        await c.ready()
        await c.send("code")
        await c.until(lambda: c.app.transcript.num_rows > 60)
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
    # So long that it is still coming at the end of the test, however slow the machine.
    options = ScriptedOptions(tokens_per_second=600, repeat=20)
    async with chat(config=make_config(max_tokens=None), options=options) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.transcript.num_rows > 40)
        await c.pilot.press("pageup")
        top = c.app.transcript.render_line(0).text
        at, rows = c.app.transcript.scroll_offset.y, c.app.transcript.num_rows
        await c.until(lambda: c.app.transcript.num_rows > rows + 20)
        assert c.app.transcript.scroll_offset.y == at and c.app.transcript.render_line(0).text == top
        assert "more below" in rows_of(c.app)[0]
        await c.pilot.press("end")
        assert c.app.transcript.is_following
        rows = c.app.transcript.num_rows
        await c.until(lambda: c.app.transcript.num_rows > rows + 5)
        assert round(c.app.transcript.scroll_y) == c.app.transcript.max_scroll_y
        assert "more below" not in rows_of(c.app)[0]


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


@pytest.mark.parametrize("size", [(20, 6), (9, 3), (3, 2), (300, 100)])
async def test_odd_sizes_do_no_harm(chat: Open, size: tuple[int, int]) -> None:
    async with chat(size=size, config=make_config(max_tokens=60)) as c:
        await c.ready()
        for text in ("table", "code 你好", "/help"):
            await c.say(text)
        await c.pilot.press("f2", "f3", "f4", "escape", "f1", "escape", "ctrl+t", "pageup")
        await c.pilot.pause(0.05)
        assert all(text_width(row) == size[0] for row in rows_of(c.app))
