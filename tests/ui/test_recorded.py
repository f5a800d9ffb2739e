"""Playing a recorded session back on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.trace import TraceWriter, read_trace
from sparkchat.ui.app import SparkApp
from sparkchat.ui.recorded import RecordedEngine
from sparkchat.ui.scripted import SCRIPTS, ScriptedEngine, ScriptedOptions
from sparkchat.ui.trace_sink import TraceSink
from ui.chat import make_config, screen_of


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two answers; the second one has no end."""
    path = tmp_path / "session.spark.jsonl"
    engine = ScriptedEngine(ScriptedOptions(tokens_per_second=3000))
    engine.start()
    with TraceWriter(path) as writer:
        for number, prompt in enumerate(("think short", "short")):
            engine.generate(GenerateRequest(str(number), prompt=prompt, sampling=SamplingParams()))
            ended = False
            while not ended:
                for event in engine.poll(1.0):
                    ended = event["event"] == "end"
                    if not (ended and number == 1):
                        writer.event(event)
    return path


def played(engine: RecordedEngine) -> list[dict[str, Any]]:
    engine.start()
    found: list[dict[str, Any]] = []
    while not found or found[-1]["event"] != "recording_end":
        found += engine.poll(2.0)
    return found


def test_a_recording_gives_the_events_it_was_made_from(recording: Path) -> None:
    events = played(RecordedEngine(read_trace(recording), speed=0))
    assert [event["event"] for event in events[:2]] == ["ready", "start"]
    text = "".join(e["text"] for e in events if e["event"] == "delta" and e["id"] == "0" and e["channel"] == "answer")
    assert text == SCRIPTS["short"]
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == 1 and ends[0]["result"]["finish_reason"] == "stop"


def test_a_recording_cannot_be_asked(recording: Path) -> None:
    engine = RecordedEngine(read_trace(recording))
    with pytest.raises(UsageError):
        engine.generate(GenerateRequest("x", prompt="x"))
    with pytest.raises(UsageError):
        engine.set_mode("off")


async def test_replay_on_the_screen(recording: Path) -> None:
    trace = read_trace(recording)
    app = SparkApp(make_config(label="replay"), lambda: RecordedEngine(trace, 0), TraceSink(), is_replay=True)
    async with app.run_test(size=(110, 40)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if "recording ends here" in screen_of(app):
                break
        screen = screen_of(app)
        assert screen.count(SCRIPTS["short"]) == 2 and "a question of 12 tokens" in screen
        assert "complete" in screen and "stopped" in screen and "verify" in screen
        app.prompt.set_value("hello")
        await pilot.press("enter")
        await pilot.pause(0.1)
        assert "it can be watched and inspected" in screen_of(app)
        await pilot.press("f4")
        await pilot.pause(0.1)
        assert "steps, " in screen_of(app)
    app.bridge.close()
