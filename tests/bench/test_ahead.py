"""What is captured before rounds are timed, and that rounds of many requests then capture little themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import pytest

from cases.harness import Runner, open_runner, to_request
from sparkchat.bench.ahead import capture_ahead
from sparkchat.bench.arms import Arm
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.engine import worker
from sparkchat.engine.captured.graphs import EagerStages
from sparkchat.errors import UsageError
from sparkchat.params import SamplingParams

ARMS = [
    Arm("off", "off"),
    Arm("static", "static"),
    Arm("static-2", "static", 2),
    Arm("compact", "compact"),
    Arm("cap-accept", "cap-accept"),
]


class FakeClient:
    """The engine's end of the pipe, without one: commands go to the worker's own reading of them."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.sent, self.events = engine, [], []
        self.is_running = True

    def send(self, *events: Any) -> None:
        """Of a command, as the client has it; and of events, as the worker's channel has it."""
        for event in events:
            if "op" in event:
                self.sent.append(event)
                assert worker._obey(self.engine, event, self)  # type: ignore[arg-type]
            else:
                self.events.append(event)

    def poll(self, _timeout: float | None) -> list[Any]:
        events, self.events = self.events, []
        return events


class CountingEngine:
    num_graphs = 5

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def capture_ahead(self, *asked: Any) -> None:
        self.asked.append(asked)
        self.num_graphs += 3


def test_arms_say_what_their_rounds_will_need() -> None:
    engine = CountingEngine()
    run = EngineRun(FakeClient(engine), {"graphs": True})  # type: ignore[arg-type]
    begun: list[int] = []

    def ahead(arms: list[Arm], together: int, draft_temperature: str = "target", **sampling: Any) -> int | None:
        begin = partial(begun.append, together)
        return capture_ahead(run, arms, together, SamplingParams(**sampling), 7, begin, draft_temperature)

    assert ahead(ARMS, 32, temperature=0.0) == 3
    assert engine.asked == [(31, 32, [(0, False), (2, False), (7, False), (7, True)], "greedy")]
    assert ahead(ARMS[:1], 16, temperature=0.7) == 3
    assert engine.asked[1:] == [(15, 16, [(0, False)], "sampled")]
    ahead(ARMS, 16, temperature=0.7, top_k=5)
    assert engine.asked[2][-1] == "filtered"
    # Greedy, filters change nothing.
    ahead(ARMS, 16, temperature=0.0, top_k=5)
    assert engine.asked[3][-1] == "greedy"
    assert ahead(ARMS, 1) is ahead(ARMS, 16, repetition_penalty=1.1) is ahead(ARMS, 16, "adaptive") is None
    assert begun == [32, 16, 16, 16]


def test_an_engine_that_captures_nothing_is_not_asked() -> None:
    engine = CountingEngine()
    run = EngineRun(FakeClient(engine), {"graphs": "no"})  # type: ignore[arg-type]
    assert capture_ahead(run, ARMS, 32, SamplingParams(), 7, lambda: pytest.fail("nothing is captured")) is None
    assert engine.asked == []


class KeptStages(EagerStages):
    """Runs every stage anew, and knows which ones a GPU would have captured."""

    def __init__(self) -> None:
        self.keys: set[Any] = set()

    def is_ready(self, key: Hashable) -> bool:
        return key in self.keys

    def prepare(self, key: Hashable, stage: Callable[[], None]) -> None:
        stage()
        self.keys.add(key)


@pytest.fixture(scope="module")
def runner(tiny_pair: Any) -> Iterator[Runner]:
    runner = open_runner(tiny_pair.target, tiny_pair.drafter, concurrency=16, context=64, graphs=True)
    yield runner


def test_whole_blocks_of_many_requests_are_ready(runner: Runner) -> None:
    decoder = runner.engine._captured
    assert decoder is not None
    decoder.stages = stages = KeptStages()
    runner.engine.capture_ahead(8, 16, [(0, False), (5, False), (5, True)], "greedy")
    assert {(key[1], key[3]) for key in stages.keys if key[0] == "verify"} == {
        (rows, shares) for rows in (60, 72, 84, 96) for shares in (False, True)
    }
    assert {key[1] for key in stages.keys if key[0] == "draft"} == {12, 16}
    ahead = set(stages.keys)
    lines = [
        {"prompt_ids": [7 + n, 9], "mode": "static", "temperature": 0.0, "max_tokens": 4 + n % 3, "ignore_eos": True}
        for n in range(16)
    ]
    runner.ids(lines)
    met = stages.keys - ahead
    assert met, "steps of few requests are captured when they come up"
    assert all(key[1] <= (48 if key[0] == "verify" else 8) for key in met)


def test_nothing_is_captured_ahead_in_the_middle_of_answers(runner: Runner) -> None:
    decoder = runner.engine._captured
    assert decoder is not None
    decoder.stages = stages = KeptStages()
    with pytest.raises(UsageError, match="cannot be captured"):
        runner.engine.capture_ahead(8, None, [(5, False)], "greedy")
    with pytest.raises(UsageError, match="cannot be captured"):
        runner.engine.capture_ahead(8, 16, [(5, False)], "loud")
    runner.engine.submit(to_request({"prompt_ids": [7], "max_tokens": 2}, 0))
    runner.engine.capture_ahead(8, 16, [(5, False)], "greedy")
    assert not stages.keys
    while runner.engine.has_work:
        runner.engine.step()
