"""Between the pipe and the screen: few updates, nothing lost, nothing out of order."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.ui.bridge import Batch, Bridge, TextUpdate
from sparkchat.ui.scripted import ScriptedEngine, ScriptedOptions
from sparkchat.ui.token_text import TokenText
from sparkchat.ui.trace_sink import TraceSink


class Receiver:
    """Collects batches and tells when one holds an event."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.times: list[float] = []
        self._news = threading.Condition()

    def __call__(self, batch: Batch) -> None:
        with self._news:
            self.batches.append(batch)
            self.times.append(time.monotonic())
            self._news.notify_all()

    def events(self) -> list[dict[str, Any]]:
        return [item for batch in self.batches for item in batch.items if isinstance(item, dict)]

    def text(self, channel: str) -> str:
        return "".join(
            run.text
            for batch in self.batches
            for item in batch.items
            if isinstance(item, TextUpdate) and item.channel == channel
            for run in item.runs
        )

    def wait_for(self, kind: str, seconds: float = 20.0) -> dict[str, Any]:
        with self._news:
            assert self._news.wait_for(lambda: any(e["event"] == kind for e in self.events()), seconds), kind
        return next(event for event in self.events() if event["event"] == kind)


def play(prompt: str, options: ScriptedOptions, trace: TraceSink | None = None, tokens: int | None = None) -> Receiver:
    receiver = Receiver()
    bridge = Bridge(lambda: ScriptedEngine(options), receiver, trace or TraceSink())
    bridge.start()
    try:
        receiver.wait_for("ready")
        bridge.generate(GenerateRequest("1", prompt=prompt, sampling=SamplingParams(max_tokens=tokens)))
        receiver.wait_for("end")
    finally:
        bridge.close()
    return receiver


def test_text_arrives_whole_and_in_few_updates() -> None:
    receiver = play("prose think", ScriptedOptions(tokens_per_second=1500), tokens=1500)
    result = receiver.wait_for("end")["result"]
    assert receiver.text("answer") == result["text"]
    assert receiver.text("thinking") == "Let me think about this.\nIt is not hard.\n"
    answering = receiver.times[-1] - receiver.times[0]
    assert len(receiver.batches) <= answering * 12 + 4
    last = [batch.stats["1"] for batch in receiver.batches if "1" in batch.stats][-1]
    assert last.num_tokens == result["usage"]["completion_tokens"]
    assert last.num_steps == result["speculation"]["num_steps"]


def test_origins_follow_the_drafts_of_the_step() -> None:
    receiver = play("prose", ScriptedOptions(tokens_per_second=3000, accuracy=0.9), tokens=200)
    runs = [run for b in receiver.batches for i in b.items if isinstance(i, TextUpdate) for run in i.runs]
    assert {run.origin for run in runs} == {"prefill", "draft", "bonus", "corrected"}
    drafted = sum(len(run.text) for run in runs if run.origin == "draft")
    result = receiver.wait_for("end")["result"]
    share = result["speculation"]["num_accepted_draft_tokens"] / result["usage"]["completion_tokens"]
    assert abs(drafted / len(result["text"]) - share) < 0.15


def test_a_delta_without_its_step_is_not_held_for_ever() -> None:
    text = TokenText()
    assert text.add_delta({"text": "ab", "origins": ["draft", "bonus"], "channel": "answer"}) == []
    assert not text.has_waited() and text.has_waited()
    assert [run.text for _, run in text.flush()] == ["ab"]


def test_one_step_over_both_channels_is_split_at_the_right_places() -> None:
    text = TokenText()
    text.add_delta({"text": "think", "origins": ["draft", "draft"], "channel": "thinking"})
    assert text.add_delta({"text": "ABCD", "origins": ["draft", "bonus"], "channel": "answer"}) == []
    found = text.add_step({"draft_text": ["AB"], "correct_drafts": 1})
    assert [(channel, run.text, run.origin) for channel, run in found] == [
        ("answer", "AB", "draft"),
        ("answer", "CD", "bonus"),
    ]


def test_every_event_is_recorded(tmp_path: Path) -> None:
    trace = TraceSink(["sparkchat", "run"])
    trace.open(tmp_path / "a.spark.jsonl")
    receiver = play("prose", ScriptedOptions(tokens_per_second=3000), trace, tokens=50)
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "a.spark.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines[:2]] == ["header", "turn"] and lines[-1]["type"] == "end"
    num_steps = receiver.wait_for("end")["result"]["speculation"]["num_steps"]
    assert sum(line["type"] == "step" for line in lines) == num_steps


def test_a_trace_begun_later_has_its_header(tmp_path: Path) -> None:
    trace = TraceSink()
    trace.event({"event": "ready", "info": {"model": "m"}})
    assert trace.path is None
    trace.open(tmp_path / "b.spark.jsonl")
    assert trace.close() == tmp_path / "b.spark.jsonl"
    assert json.loads((tmp_path / "b.spark.jsonl").read_text())["model"] == "m"


def test_a_crash_is_told_and_the_engine_can_be_started_again() -> None:
    receiver = Receiver()
    engines: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        engines.append(ScriptedEngine(ScriptedOptions()))
        return engines[-1]

    bridge = Bridge(make, receiver, TraceSink())
    bridge.start()
    receiver.wait_for("ready")
    engines[0].crash("gone")
    assert receiver.wait_for("crashed")["message"] == "gone"
    receiver.batches.clear()
    bridge.restart()
    receiver.wait_for("ready")
    bridge.close()
    assert len(engines) == 2


def test_a_pipe_that_breaks_is_told_as_a_crash() -> None:
    class Broken(ScriptedEngine):
        def poll(self, timeout: float | None = 0.0) -> list[dict[str, Any]]:
            raise ValueError("half a line")

    receiver = Receiver()
    bridge = Bridge(Broken, receiver, TraceSink())
    bridge.start()
    assert "half a line" in receiver.wait_for("crashed")["message"]
    bridge.close()
