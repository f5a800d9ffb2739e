"""What the engine leaves to Python's collector, and when that looks: counted, never timed."""

from __future__ import annotations

import gc
import json
import queue
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases.harness import random_prompts, to_request, varied_cost
from sparkchat import collector
from sparkchat.engine import worker
from sparkchat.engine.engine import Engine
from sparkchat.params import LoadSpec

REQUESTS = 8
EACH, FIXED = 2, 24
"""Objects that may outlive a step: of each request, and whatever their number. A request has its part of the step in
flight; one that has begun another stretch of text has five more."""
MODES = ("off", "static", "compact", "cap-accept")
Record = dict[str, Any]
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def engines() -> Iterator[Open]:
    """Return ``engines(target, drafter, is_captured)``."""
    opened: dict[Any, Engine] = {}

    def get(target: Path, drafter: Path, is_captured: bool = True) -> Engine:
        if (target, is_captured) not in opened:
            spec: Record = {"device": "cpu", "threads": 1, "context": 300, "concurrency": REQUESTS}
            graphs = True if is_captured else None
            opened[target, is_captured] = Engine(
                LoadSpec("fixture", str(target), str(drafter), cost_table=varied_cost(), graphs=graphs, **spec)
            )
        return opened[target, is_captured]

    yield get
    opened.clear()


@pytest.fixture(params=[True, False], ids=["captured", "loop"])
def engine(request: pytest.FixtureRequest, tiny_pair: Any, engines: Open) -> Iterator[Engine]:
    yield engines(tiny_pair.target, tiny_pair.drafter, request.param)


@contextmanager
def taken_over() -> Iterator[None]:
    """As an engine's process is, and only what comes from here on is counted."""
    collector.take_over()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        # Not handed back: then later tests would be slowed by looks at all modules again.
        gc.collect()
        gc.freeze()


@contextmanager
def looks() -> Iterator[list[int]]:
    """The generations that are looked at meanwhile."""
    seen: list[int] = []

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(details["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def start(engine: Engine, mode: str | None, count: int = REQUESTS) -> None:
    """Requests that decode for long, some steps after their prompts."""
    for n, prompt in enumerate(random_prompts(count, 20, seed=1)):
        line = {"prompt_ids": prompt, "max_tokens": 250, "ignore_eos": True}
        engine.submit(to_request(line if mode is None else {**line, "mode": mode}, n))
    while len(engine._scheduler.decoding) < count:
        engine.step()
    for _ in range(3):
        engine.step()
    alive()  # what it needs for itself is there from now on


def end(engine: Engine) -> None:
    for n in range(REQUESTS):
        engine.cancel(f"r{n}")
    while engine.has_work:
        engine.step()


def alive() -> Counter[str]:
    """What the collector would have to look at, by type."""
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.parametrize("mode", MODES)
def test_a_step_leaves_few_objects_for_each_request(mode: str, engine: Engine) -> None:
    # By the loop, plain steps pile up features for the drafter, at most slots.FLUSH_ROWS of each request.
    more = REQUESTS if mode == "off" and engine._captured is None else 0
    start(engine, mode)
    with taken_over():
        for number in range(1, 16):
            engine.step()
            left = alive()
            assert left.total() <= EACH * REQUESTS + more * number + FIXED, (number, left)
    end(engine)


def test_what_a_step_leaves_grows_with_requests_alone(tiny_pair: Any, engines: Open) -> None:
    """Two more requests leave no more than twice what one may."""
    engine, left = engines(tiny_pair.target, tiny_pair.drafter), []
    for count in (2, 8):
        start(engine, "static", count)
        with taken_over():
            for _ in range(12):
                engine.step()
            left.append(alive().total())
        end(engine)
    assert left[1] - left[0] <= EACH * 6 + 8, left


def busy_steps(engine: Engine) -> set[str]:
    """Fifty steps with changes of mode, ends of every kind, cancelled and refused requests; how the requests ended."""
    lines: list[Record] = [
        {"max_tokens": 5, "temperature": 0.8, "top_p": 0.9},
        {"max_tokens": 40, "stop": ["e", "a", "t", "n", "s"], "ignore_eos": True},
        {"max_tokens": 60, "ignore_eos": True, "repetition_penalty": 1.2, "logprobs": 2},
        {"max_tokens": 6, "temperature": -1.0},
        {"max_tokens": "many"},
        {"max_tokens": 3, "prompt_ids": [[7]]},
    ]
    events: list[Record] = []
    for number in range(50):
        if number % 3 == 0:
            line = {"prompt_ids": random_prompts(1, 20, seed=number)[0], **lines[number // 3 % 6]}
            sampling = {k: line[k] for k in line if k not in ("prompt_ids", "logprobs")}
            asked = {"id": f"busy{number}", "prompt_ids": line["prompt_ids"], "logprobs": line.get("logprobs")}
            session = "one" if number % 2 == 0 else None
            events += worker._submit(engine, {**asked, "session": session, "sampling": sampling})
        if number % 7 == 0:
            events += engine.set_mode(MODES[number // 7 % 4])  # type: ignore[arg-type]
        if number % 20 == 14:
            events += engine.cancel(f"busy{number - 8}")
        events += engine.step()
    for number in range(50):
        events += engine.cancel(f"busy{number}")
    while engine.has_work:
        events += engine.step()
    return {event["result"]["finish_reason"] for event in events if event["event"] == "end"}


def test_busy_steps_leave_no_circles(engine: Engine) -> None:
    busy_steps(engine)
    with taken_over():
        gc.set_debug(gc.DEBUG_SAVEALL)
        reasons = busy_steps(engine)
        gc.collect()
        assert Counter(type(each).__name__ for each in gc.garbage) == {}
    assert reasons >= {"length", "stop_string", "cancelled", "error"}


def test_a_damaged_model_leaves_no_circles(damaged_target: Path, tiny_pair: Any, engines: Open) -> None:
    engine = engines(damaged_target, tiny_pair.drafter, is_captured=False)
    with taken_over():
        gc.set_debug(gc.DEBUG_SAVEALL)
        engine.submit(to_request({"prompt_ids": [301, 499, 302], "max_tokens": 8}, 0))
        ends = [event for _ in range(10) for event in engine.step() if event["event"] == "end"]
        gc.collect()
        assert Counter(type(each).__name__ for each in gc.garbage) == {}
    assert [event["result"]["finish_reason"] for event in ends] == ["error"]


def test_nothing_old_is_looked_at_while_requests_decode(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK_AFTER", 100)
    start(engine, None)
    kept = []
    with taken_over(), looks() as seen:
        for number in range(20):
            if number % 5 == 0:
                engine.set_mode(MODES[number // 5])  # type: ignore[arg-type]
            kept += engine.step()
    assert len(kept) > 20 * REQUESTS
    assert len(seen) > 2 and set(seen) == {0}
    end(engine)


def test_an_engine_in_another_program_leaves_its_collector_alone(engine: Engine, monkeypatch: Any) -> None:
    monkeypatch.setattr(collector, "LOOK_AFTER", 0)
    start(engine, "static")
    gc.set_threshold(0)
    try:
        with looks() as seen:
            for _ in range(3):
                engine.step()
    finally:
        gc.set_threshold(20_000, 20, 20)
    assert seen == [] and gc.isenabled()
    end(engine)


def test_circles_do_not_pile_up_in_an_engine_that_never_rests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were in use when they were looked at first."""
    monkeypatch.setattr(collector, "LOOK_AFTER", 300)
    monkeypatch.setattr(collector, "BUSY_LOOKS", 4)
    start(engine, "static")
    held: list[Any] = []
    with taken_over(), looks() as seen:
        most = 0
        for _ in range(40):
            engine.step()
            for _ in range(100):
                circle: list[Any] = []
                circle.append(circle)
                held.append(circle)
            del held[:-500], circle
            most = max(most, alive()["list"])
        assert {0, 2} == set(seen) and seen.count(2) >= 2
        # Of 4000: those in use, and what comes up between two looks at everything.
        assert most <= 500 + 300 * 6 + EACH * REQUESTS + FIXED
    end(engine)


def test_objects_do_not_grow_with_requests(engine: Engine) -> None:
    engine.set_mode("static")
    prompts, counts = random_prompts(24, 12, seed=4), []
    with taken_over():
        for _ in range(3):
            for n, prompt in enumerate(prompts):
                line = {"prompt_ids": prompt, "max_tokens": 3, "ignore_eos": True, "session": f"s{n % 4}"}
                engine.submit(to_request(line, n))
            while engine.has_work:
                engine.step()
            gc.collect()
            counts.append(alive().total())
    # The first turn fills what is kept between answers.
    assert counts[2] - counts[1] <= len(prompts) // 2, counts


def test_a_process_looks_at_everything_when_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    channel: Any = SimpleNamespace(commands=queue.SimpleQueue())
    looked: list[bool] = []

    def look() -> None:
        looked.append(channel.commands.empty())
        channel.commands.put("third")

    monkeypatch.setattr(worker, "REST_SECONDS", 0.01)
    monkeypatch.setattr(worker, "look_at_rest", look)
    channel.commands.put("first")
    channel.commands.put("second")
    assert [worker.Channel.next_command(channel) for _ in range(2)] == ["first", "second"]
    assert looked == []
    assert worker.Channel.next_command(channel) == "third"
    assert looked == [True]


def test_taking_over_and_handing_back() -> None:
    code = """
import gc, json
from sparkchat import collector
collector.take_over()
told = [gc.isenabled(), gc.get_freeze_count() > 1000, len(gc.get_objects()) < 100]
class Circle:
    def __init__(self): self.me = self
    def __del__(self): told.append("freed")
Circle()
kept = [[] for _ in range(900)]
collector.look_between_steps()
told.append("few")
kept += [[] for _ in range(200)]
collector.look_between_steps()
Circle(); gc.collect(0); made = Circle(); gc.collect(0); del made; collector.look_between_steps()
told.append("old"); collector.look_at_rest()
collector.hand_back()
print(json.dumps([*told, gc.isenabled(), gc.get_freeze_count()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, True, True, "few", "freed", "freed", "old", "freed", True, 0]
