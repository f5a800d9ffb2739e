"""Playing a recorded session back: as events, and on the screen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from textual._xterm_parser import XTermParser

from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.trace import TraceWriter, read_lines
from sparkchat.ui import recorded
from sparkchat.ui.recorded import RecordedEngine, Recording
from sparkchat.ui.replay import ReplayApp, replay_config
from sparkchat.ui.scripted import SCRIPTS, ScriptedEngine, ScriptedOptions
from ui.chat import screen_of


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


def slow_copy(path: Path, seconds: float) -> Path:
    """The same session with steps that far apart."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line.get("t_ns") is not None):
        line["t_ns"] = int(number * seconds * 1e9)
    copy = path.with_name("slow.spark.jsonl")
    copy.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def steps_of(events: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "step" for event in events)


def test_a_recording_gives_the_events_it_was_made_from(recording: Path) -> None:
    events = played(RecordedEngine(Recording(recording), speed=0))
    assert [event["event"] for event in events[:2]] == ["ready", "start"]
    texts = [e["text"] for e in events if e["event"] == "delta" and e["id"] == "turn 0" and e["channel"] == "answer"]
    assert "".join(texts) == SCRIPTS["short"]
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == 1 and ends[0]["result"]["finish_reason"] == "stop"
    assert steps_of(events) == sum(line.type == "step" for line in read_lines(recording))


def test_a_recording_cannot_be_asked(recording: Path) -> None:
    engine = RecordedEngine(Recording(recording))
    with pytest.raises(UsageError):
        engine.generate(GenerateRequest("x", prompt="x"))
    with pytest.raises(UsageError):
        engine.set_mode("off")


def test_lines_come_at_their_time_and_not_before(recording: Path) -> None:
    index = Recording(slow_copy(recording, 0.05))
    engine = RecordedEngine(index, speed=1.0)
    began = time.monotonic()
    engine.start()
    events: list[dict[str, Any]] = []
    while steps_of(events) < 4:
        events += engine.poll(1.0)
        # A turn line, then steps 0.05 s apart: never ahead of the recording.
        assert steps_of(events) <= (time.monotonic() - began) / 0.05 + 1e-6
    engine.close()


def test_speed_divides_the_time_and_pause_stops_it(recording: Path) -> None:
    index = Recording(slow_copy(recording, 30.0))
    engine = RecordedEngine(index, speed=1.0)
    engine.start()
    assert steps_of(engine.poll(0.05)) == 0
    engine.set_speed(30.0 / 0.02)
    events: list[dict[str, Any]] = []
    while steps_of(events) < 2:
        events += engine.poll(1.0)
    engine.pause()
    given = steps_of(events) + steps_of(engine.poll(0.0))
    assert engine.poll(0.15) == [] and engine.steps_given == given
    engine.play()
    assert steps_of(engine.poll(1.0)) >= 1


def test_stepping_gives_one_step_at_a_time_to_the_end(recording: Path) -> None:
    index = Recording(slow_copy(recording, 30.0))
    engine = RecordedEngine(index, is_paused=True)
    engine.start()
    assert [event["event"] for event in engine.poll(0.0)] == ["ready"]
    for number in range(1, index.num_steps + 1):
        engine.step()
        events = engine.poll(0.0)
        assert steps_of(events) == 1 and engine.steps_given == number
    engine.step()
    assert [*events, *engine.poll(0.0)][-1]["event"] == "recording_end"


def test_a_position_is_drawn_at_once_and_old_steps_are_left_out(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Recording(slow_copy(recording, 30.0))
    engine = RecordedEngine(index, position=index.after_step(3), is_paused=True)
    engine.start()
    assert steps_of(engine.poll(0.0)) == 3 and engine.steps_given == 3
    monkeypatch.setattr(recorded, "MOST_REDRAWN_STEPS", 2)
    last = index.num_steps
    engine = RecordedEngine(index, position=index.after_step(last), is_paused=True)
    engine.start()
    events = engine.poll(0.0)
    assert events[1]["event"] == "notice" and "not drawn again" in events[1]["message"]
    assert events[2]["event"] == "start" and events[2]["id"] == "turn 1" and steps_of(events) < last


def test_long_pauses_between_answers_are_shortened(recording: Path) -> None:
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    for line in lines:
        if line.get("turn") == 1 and line.get("t_ns") is not None:
            line["t_ns"] += int(3600e9)
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Recording(recording).seconds < 3


async def replayed(path: Path, pilot: Any, app: ReplayApp, words: str) -> None:
    for _ in range(500):
        await pilot.pause(0.02)
        if words in screen_of(app):
            return
    raise AssertionError(f"{words!r} is not on the screen:\n{screen_of(app)}")


async def test_replay_on_the_screen(recording: Path) -> None:
    index = Recording(recording)
    app = ReplayApp(replay_config(index, "auto", False), index, 0)
    async with app.run_test(size=(110, 40)) as pilot:
        await replayed(recording, pilot, app, "recording ends here")
        screen = screen_of(app)
        assert screen.count(SCRIPTS["short"]) == 2 and "a question of 12 tokens" in screen
        assert "complete" in screen and "stopped" in screen and "verify" in screen
        await pilot.press("slash")
        app.prompt.set_value("hello")
        await pilot.press("enter")
        await replayed(recording, pilot, app, "it can be watched and inspected")
        assert not app.prompt.display
        report = recording.with_name("replayed.html")
        for message in XTermParser().feed(f"/export {report}\r"):  # in a bunch, as a slow line delivers keys
            message.set_sender(app)
            app._driver.send_message(message)
        await replayed(recording, pilot, app, "a report in one file")
        assert report.stat().st_size > 5000
        await pilot.press("f4")
        await replayed(recording, pilot, app, "steps, ")
        await pilot.press("escape")
        await pilot.press("q")
        await pilot.pause(0.1)
        assert app.return_code == 0
    app.bridge.close()


async def test_keys_step_forth_and_back(recording: Path) -> None:
    index = Recording(slow_copy(recording, 30.0))
    app = ReplayApp(replay_config(index, "auto", False), index, 1.0, is_paused=True)
    async with app.run_test(size=(110, 40)) as pilot:
        await replayed(recording, pilot, app, f"step 0 of {index.num_steps}")
        for _ in range(3):
            await pilot.press("right")
        await replayed(recording, pilot, app, f"paused 1x  step 3 of {index.num_steps}")
        await replayed(recording, pilot, app, "step 3  ")
        three = app.transcript.sections[-1].text
        await pilot.press("right")
        await replayed(recording, pilot, app, "step 4  ")
        four = app.transcript.sections[-1].text
        assert four.startswith(three) and four != three
        await pilot.press("left")
        await replayed(recording, pilot, app, "step 3  ")
        assert app.transcript.sections[-1].text == three
        await pilot.press("plus", "plus", "minus", "space")
        await replayed(recording, pilot, app, "playing 2x")
        await pilot.press("home", "space")
        await replayed(recording, pilot, app, f"paused 2x  step 0 of {index.num_steps}")
    app.bridge.close()


@pytest.mark.parametrize("size", [(40, 12), (80, 24)])
async def test_the_replay_fits_small_screens_and_its_help_lists_its_keys(
    recording: Path, size: tuple[int, int]
) -> None:
    index = Recording(slow_copy(recording, 30.0))
    app = ReplayApp(replay_config(index, "never", True), index, 1.0, is_paused=True)
    async with app.run_test(size=size) as pilot:
        await replayed(recording, pilot, app, "paused 1x")
        await pilot.press("n")
        await replayed(recording, pilot, app, "step 1 of")
        assert screen_of(app).isascii()
        await pilot.press("f1")
        await replayed(recording, pilot, app, "new line")
        assert "next step, then wait" in app.chat.help_text()
    app.bridge.close()
