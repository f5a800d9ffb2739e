"""Writing in the prompt of the full-screen chat: keys, pasting, history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste

from sparkchat.ui.safe_text import text_width
from sparkchat.ui.scripted import ScriptedOptions
from ui.chat import rows_of

SLOW = ScriptedOptions(tokens_per_second=40)
Open = Callable[..., Any]


async def send_as_one_read(c: Any, keys: str) -> None:
    """As a slow line delivers them."""
    from textual._xterm_parser import XTermParser

    for message in XTermParser().feed(keys):
        message.set_sender(c.app)
        c.app._driver.send_message(message)
    await c.pilot.pause()


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
        rows = c.app.key_rows()
        assert ("f7", "next verify mode, also during an answer") in rows
        assert ("no key", "copy the last code block") in rows and "copy.code has no key any more" in c.said


@pytest.mark.parametrize(
    ("keys", "written"),
    [
        ("ab\x7fc", "ac"),
        ("abc\x1b[D\x1b[DX", "aXbc"),
        ("abc\x15xyz", "xyz"),
        ("a b\x17c", "a c"),
        ("ab\x01X\x05Y", "XabY"),
        ("全角\u3000空白 می\u200cخواهم a\u00a0b 👩\u200d💻", "全角\u3000空白 می\u200cخواهم a\u00a0b 👩\u200d💻"),
        ("a\u202eb\ufeffc", "a\u202eb\ufeffc"),
        ("/reg\t", "/regen "),
        ("/st\t", "/st"),
        ("/sy\tx", "/system x"),
        ("a/st\tb", "a/stb"),
    ],
)
async def test_keys_that_come_in_a_bunch_keep_their_order(chat: Open, keys: str, written: str) -> None:
    async with chat() as c:
        await c.ready()
        await send_as_one_read(c, keys)
        await c.until(lambda: c.app.prompt.value == written)


async def test_a_setting_in_mid_answer_is_told_in_the_status_bar_and_commands_stop_and_find(chat: Open) -> None:
    options = ScriptedOptions(tokens_per_second=100, repeat=9)
    async with chat(options=options) as c:
        await c.ready()
        await c.send("prose, please")
        await c.until(lambda: c.app.chat.active is not None and c.app.chat.active.has_started)
        await c.send("/set temperature 0.3")
        await c.until(lambda: "0.3, from this step on" in c.status)
        assert "temperature" not in c.said, "a note would stand below the answer that grows"
        await c.send("/stop")
        await c.answered()
        assert c.app.chat.conversation.turns[0].answer.was_stopped
        await c.send("/history prose")
        await c.until(lambda: c.app.prompt.value == "prose, please")


async def test_a_key_of_the_app_waits_for_the_letters_before_it(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.say("first question")
        await c.say("second thought")
        await send_as_one_read(c, "question\x12")
        await c.until(lambda: c.app.prompt.value == "first question")
        await send_as_one_read(c, "\x03")
        await c.until(lambda: c.app.prompt.value == "")
        await send_as_one_read(c, "not lost\x04")
        await c.pilot.pause(0.1)
        assert c.app.is_running and c.app.prompt.value == "not lost"
        await send_as_one_read(c, " either\x03")
        await c.until(lambda: c.app.prompt.value == "")
        assert "up brings it back" in c.status
