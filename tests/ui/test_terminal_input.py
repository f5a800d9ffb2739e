"""What a terminal may send, byte by byte: nothing takes the keyboard away, and pasted lines are never sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from textual._xterm_parser import XTermParser
from textual.events import Key, Paste

from sparkchat.ui.scripted import ScriptedOptions
from sparkchat.ui.terminal_input import with_pastes
from ui.pty_program import PtyProgram

SLOW = ScriptedOptions(tokens_per_second=40)


def read_as(text: str) -> list[str]:
    """Names of the keys and texts of the pastes that one read gives."""
    messages = with_pastes(XTermParser().feed(text))
    return [each.text if isinstance(each, Paste) else each.key for each in messages if isinstance(each, (Key, Paste))]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("one\rtwo", ["one\ntwo"]),
        ("one\rtwo\r", ["one\ntwo\n"]),
        ("def f():\r\r\treturn 1\r", ["def f():\n\n\treturn 1\n"]),
        ("// a remark\r/usr/bin/true\r", ["// a remark\n/usr/bin/true\n"]),
        ("好\r👩‍💻", ["好\n👩‍💻"]),
        ("a\rb\x1b[Zc", ["a\nb", "shift+tab", "c"]),
        ("hi\r", ["h", "i", "enter"]),
        ("hi\r\x1b[Z", ["h", "i", "enter", "shift+tab"]),
        ("hi\r/quit\r", ["h", "i", "enter", "slash", *"quit", "enter"]),
        ("/new\rhi\r", ["slash", *"new", "enter", "h", "i", "enter"]),
        ("x" * 64 + "\r", ["x" * 64, "enter"]),
        ("x" * 63 + "\r", [*("x" * 63), "enter"]),
        ("/system " + "x" * 64 + "\r", ["slash", *"system", "space", *("x" * 64), "enter"]),
        ("a\x1b[1;3D\rb", ["a", "alt+left", "\nb"]),
    ],
)
def test_lines_that_come_in_one_piece_are_a_paste(text: str, read: list[str]) -> None:
    assert read_as(text) == read


@pytest.mark.parametrize(
    "sent",
    [b"h\xe9 \xff\xfe", b"\xf0\x9f", b"\x1b[1114112;1u", b"\x1b[99999999999999999999999;1u", b"\x1b[M \xf5\xf5"],
    ids=repr,
)
def test_no_byte_takes_the_keyboard_away(sent: bytes) -> None:
    with PtyProgram() as program:
        program.shows("ready")
        os.write(program.master, sent)
        program.read(0.1)
        program.send(" then words")
        program.shows("then words")
        program.send("\x11")
        assert program.ended() == 0
        program.assert_restored()


def test_lines_pasted_into_a_terminal_that_does_not_mark_them_are_not_sent() -> None:
    lines = [f"line {number}\tof a long text" for number in range(400)]
    with PtyProgram(options={"text": "the answer"}) as program:
        program.shows("ready")
        sent = "".join(f"{line}\r" for line in lines).encode()
        while sent:
            sent = sent[os.write(program.master, sent) :]
        program.shows("line 399")
        assert "the answer" not in program.text
        program.send("\r")
        program.shows("the answer")
        program.send("\x11")
        assert program.ended() == 0


async def test_a_message_that_has_to_wait_comes_back_before_what_was_written_since(chat: Callable[..., Any]) -> None:
    async with chat(options=SLOW) as c:
        await c.ready()
        await c.send("prose")
        await c.until(lambda: c.app.chat.active is not None and c.app.chat.active.has_started)
        c.app.prompt.post_message(c.app.prompt.Sent("sent too early"))
        c.app.prompt.set_value("written since")
        await c.until(lambda: "an answer is running" in c.status)
        assert c.app.prompt.value == "sent too early\nwritten since"
