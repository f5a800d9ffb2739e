"""What the screen looks like, at three sizes and in two themes, character by character and style by style."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sparkchat.ui.scripted import ScriptedOptions
from ui.chat import make_config
from ui.pictures import check

Open = Callable[..., Any]
SIZES = [(120, 40), (80, 24), (40, 12)]
THEMES = ["textual-dark", "textual-light"]
ANSWER = (
    "# A heading\nSome **bold** and `code`, a wide 你好 and [/] markup.\n\n- one\n- two\n\n"
    "```python\ndef f(x):  # a comment\n    return x + 1\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | two |\n\n> quoted, and done\n"
)
OPTIONS = ScriptedOptions(tokens_per_second=1000, accuracy=0.7, text=ANSWER, mode="compact")


class SteadyTime:
    """The engine's clock: twenty milliseconds between two events, whatever the machine is doing."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._now = 0

    def monotonic_ns(self) -> int:
        self._now += 20_000_000
        return self._now


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.ui.scripted.time", SteadyTime())
    for name in ("COLORTERM", "TERM", "TMUX", "STY", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


def named(what: str, size: tuple[int, int], theme: str = "") -> str:
    return "-".join(part for part in (what, f"{size[0]}x{size[1]}", theme.removeprefix("textual-")) if part)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES)
async def test_an_answer_and_its_panel(chat: Open, size: tuple[int, int], theme: str) -> None:
    async with chat(size=size, config=make_config("compact"), options=OPTIONS) as c:
        c.app.theme = theme
        await c.ready()
        await c.say("a question [bold]")
        check(c.app, named("answer", size, theme))


@pytest.mark.parametrize("size", SIZES)
async def test_token_colours_and_the_line_of_a_token(chat: Open, size: tuple[int, int]) -> None:
    async with chat(size=size, config=make_config("compact"), options=OPTIONS) as c:
        await c.ready()
        await c.say("x")
        await c.pilot.press("f2", "alt+left", "alt+left", "alt+left")
        c.app.chat._end_flash(c.app.chat._flash_number)
        await c.pilot.pause(0.1)
        check(c.app, named("tokens", size))


@pytest.mark.parametrize("size", SIZES)
async def test_the_inspector(chat: Open, size: tuple[int, int]) -> None:
    async with chat(size=size, config=make_config("compact"), options=OPTIONS) as c:
        await c.ready()
        await c.say("x")
        await c.pilot.press("f4", "home", "right", "right")
        await c.pilot.pause(0.1)
        check(c.app, named("inspector", size))


@pytest.mark.parametrize("size", SIZES)
async def test_the_comparison(chat: Open, size: tuple[int, int]) -> None:
    async with chat(size=size, config=make_config("compact"), options=OPTIONS) as c:
        await c.ready()
        await c.say("x")
        await c.pilot.press("f5")
        await c.until(lambda: c.app.chat._comparison is None)
        await c.pilot.press("home")
        await c.pilot.pause(0.1)
        check(c.app, named("comparison", size))


@pytest.mark.parametrize("size", SIZES)
async def test_ascii_without_colour(chat: Open, size: tuple[int, int]) -> None:
    config = make_config("compact", ascii=True, color="never")
    async with chat(size=size, config=config, options=OPTIONS) as c:
        await c.ready()
        await c.say("x")
        check(c.app, named("ascii", size))


async def test_sixteen_colours(chat: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.constants.COLOR_SYSTEM", "standard")
    async with chat(size=(80, 24), config=make_config("compact"), options=OPTIONS) as c:
        await c.ready()
        await c.say("x")
        assert c.app.theme == "ansi-dark"
        check(c.app, "sixteen-80x24")
