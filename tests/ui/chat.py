"""A chat over a scripted engine, and what can be read on its screen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.params import LoadSpec, Mode, SamplingParams
from sparkchat.ui.scripted import ScriptedEngine, ScriptedOptions


def make_config(mode: Mode = "static", max_tokens: int | None = 150, **changes: Any) -> RunConfig:
    spec = LoadSpec(name="scripted", model_path="/nowhere", mode=mode)
    return RunConfig(spec=spec, sampling=SamplingParams(max_tokens=max_tokens), **changes)


def rows_of(app: Any) -> list[str]:
    """The rows of the screen as text, as the app would draw them."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def screen_of(app: Any) -> str:
    return "\n".join(rows_of(app))


class Chat:
    """A running app with its pilot and its engines."""

    def __init__(self, app: Any, pilot: Any, engines: list[ScriptedEngine]) -> None:
        self.app = app
        self.pilot = pilot
        self.engines = engines
        self.num_sent = 0
        send = app.chat.send

        def counting(text: str) -> None:
            send(text)
            self.num_sent += 1

        app.chat.send = counting

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    @property
    def screen(self) -> str:
        return screen_of(self.app)

    @property
    def said(self) -> str:
        """Everything in the transcript, without the breaks of the rows."""
        return "\n".join(section.text for section in self.app.transcript.sections)

    @property
    def status(self) -> str:
        return self.app.query_one("#status").text

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait for a condition, not for a time."""
        waited = 0.0
        while not condition():
            assert waited < seconds, f"waited {seconds} s in vain; the screen shows:\n{self.screen}"
            await self.pilot.pause(0.02)
            waited += 0.02

    async def ready(self) -> None:
        await self.until(lambda: self.app.chat.state == "ready")

    async def send(self, text: str) -> None:
        self.app.prompt.set_value(text)
        sent = self.num_sent
        await self.pilot.press("enter")
        await self.until(lambda: self.num_sent > sent)

    async def answered(self) -> None:
        await self.until(lambda: self.app.chat.active is None)
        await self.pilot.pause(0.05)

    async def say(self, text: str) -> None:
        await self.send(text)
        await self.answered()


@asynccontextmanager
async def open_chat(
    size: tuple[int, int] = (80, 24),
    config: RunConfig | None = None,
    options: ScriptedOptions | None = None,
) -> AsyncIterator[Chat]:
    from sparkchat.ui.app import SparkApp
    from sparkchat.ui.trace_sink import TraceSink

    engines: list[ScriptedEngine] = []

    def make_engine() -> ScriptedEngine:
        engines.append(ScriptedEngine(options or ScriptedOptions(tokens_per_second=2000)))
        return engines[-1]

    config = config or make_config()
    trace = TraceSink(config.argv)
    if config.trace_path is not None:
        trace.open(config.trace_path)
    app = SparkApp(config, make_engine, trace)
    try:
        async with app.run_test(size=size) as pilot:
            yield Chat(app, pilot, engines)
    finally:
        app.bridge.close()
        trace.close()
