"""Text that is made to do harm: nothing of it reaches the terminal as control, no border moves, copies are exact."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from sparkchat.ui.bridge import Batch, TextUpdate
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.scripted import HOSTILE, ScriptedOptions
from sparkchat.ui.token_text import TextRun
from ui.chat import make_config, rows_of

Open = Callable[..., Any]
TEXTS = {
    "one line of a megabyte": "x" * 1_000_000,
    "a megabyte of wide text": "你" * 330_000,
    "controls": "\x1b[31m\x1b]52;c;eA==\x07\x9b2J\x1bP\x00" * 8_000,
    "right to left": "שלום \u202e مرحبا \u2066 x \u2069 " * 5_000,
    "zero width": "a\u200d\ufe0f\u0301\u200b" * 20_000,
    "marks without end": "**__``~~[" * 10_000,
    "fences without end": "```\n~~~\n" * 3_000,
    "a table of pipes": "|" * 900 + "\n|" + "-|" * 450 + "\n" + ("|" * 900 + "\n") * 50,
    "markup": HOSTILE * 40,
}


@pytest.mark.parametrize("name", TEXTS)
async def test_hostile_answers_stay_inside(chat: Open, name: str) -> None:
    text = TEXTS[name]
    options = ScriptedOptions(prompt_seconds=1e6)
    async with chat(size=(80, 24), config=make_config(max_tokens=None), options=options) as c:
        await c.ready()
        await c.send("x")
        turn = c.app.chat.active.turn
        for at in range(0, len(text), 250_000):
            run = TextRun(text[at : at + 250_000], "draft", 0)
            c.app.chat.receive([Batch([TextUpdate(turn.request_id, "answer", (run,))])])
        await c.pilot.press("f3", "pageup", "ctrl+home", "end")
        await c.pilot.pause(0.05)
        rows = rows_of(c.app)
        assert len(rows) == 24 and all(text_width(row) == 80 for row in rows)
        assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for row in rows for each in row)
        assert not any(each in row for row in rows for each in "\u202e\u2066\u200d\ufe0f")
        assert turn.answer.text == text
        await c.pilot.press("escape")
        written: list[str] = []
        c.app._driver.write = written.append
        await c.send("/copy")
        sent = [each[7:-1] for each in written if each.startswith("\x1b]52;c;")]
        if len(text.encode()) > 100_000:
            assert not sent and "too many for a terminal's clipboard" in c.said
        else:
            assert [base64.b64decode(each).decode() for each in sent] == [text]


async def test_hostile_names_and_steps_stay_inside(chat: Open) -> None:
    evil = "\x1b]0;x\x07[bold]\u202e"
    config = make_config(label=evil, notices=(evil,))
    async with chat(size=(100, 30), config=config, options=ScriptedOptions(text=f"{evil} done " * 20)) as c:
        await c.ready()
        await c.say(evil)
        for key in ("f4", "escape", "f8", "escape", "f5", "escape", "escape", "f1", "escape", "alt+left"):
            await c.pilot.press(key)
            await c.pilot.pause(0.02)
            rows = rows_of(c.app)
            assert all(text_width(row) == 100 for row in rows)
            assert not any(ord(each) < 32 or 127 <= ord(each) < 160 or each == "\u202e" for row in rows for each in row)
