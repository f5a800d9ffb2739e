"""Settings changed in the middle of an answer: from the next step on, and as if they had stood from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.tokenizer import END_THINK, THINK
from sparkchat.engine.engine import Engine
from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams
from sparkchat.trace import TraceWriter, verify


@pytest.fixture(scope="module")
def engine(tiny_pair: Any) -> Engine:
    spec = LoadSpec("tiny", str(tiny_pair.target), str(tiny_pair.drafter), device="cpu", dtype="float32", mode="static")
    return Engine(spec)


def request(name: str, ids: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt_ids=ids, sampling=SamplingParams(max_tokens=40, ignore_eos=True, **sampling))


def steps(engine: Engine, count: int) -> list[dict[str, Any]]:
    """Events of so many engine steps."""
    return [event for _ in range(count) for event in engine.step()]


def tokens(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events if event["event"] == "delta" for token in event["token_ids"]]


def rest(engine: Engine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while engine.has_work:
        found += engine.step()
    return found


def test_a_colder_temperature_holds_from_the_next_step_on(engine: Engine) -> None:
    engine.submit(request("a", temperature=5.0, seed=3))
    before = tokens(steps(engine, 4))
    (event,) = engine.change("a", {"temperature": 0.0})
    assert event["event"] == "setting_change" and event["changes"] == {"temperature": {"from": 5.0, "to": 0.0}}
    after = tokens(rest(engine))
    # Greedy from here: the same as a greedy answer to everything that stood before.
    engine.submit(request("b", (1, 2, 3, *before)))
    assert after == tokens(rest(engine))[: len(after)]


def test_what_settles_at_the_start_cannot_change(engine: Engine) -> None:
    engine.submit(request("c"))
    steps(engine, 2)
    for values in ({"seed": 1}, {"max_tokens": 3}, {"stop": ["x"]}):
        with pytest.raises(UsageError, match="next one"):
            engine.change("c", values)
    with pytest.raises(UsageError, match="not possible"):
        engine.change("c", {"temperature": -1.0})
    assert engine.change("c", {"temperature": 0.0}) == []  # nothing is different
    rest(engine)
    with pytest.raises(UsageError, match="no answer"):
        engine.change("c", {"temperature": 1.0})


@pytest.mark.parametrize("bias", [[[100_000, 1.0]], [[1]], [[1, None]], 7, None])
def test_a_bias_that_is_none_is_refused_and_the_answer_goes_on(bias: Any, engine: Engine) -> None:
    engine.submit(request("g"))
    events = steps(engine, 2)
    with pytest.raises(UsageError, match="logit_bias"):
        engine.change("g", {"logit_bias": bias})
    (end,) = [event for event in events + rest(engine) if event["event"] == "end"]
    assert end["result"]["error"] is None and len(end["result"]["token_ids"]) == 40


def test_thinking_can_be_ended_only_while_it_goes_on(engine: Engine) -> None:
    engine.submit(request("d"))
    steps(engine, 2)
    with pytest.raises(UsageError, match="not thinking"):
        engine.change("d", think=False)
    rest(engine)


def test_ending_the_thinking_closes_the_block_with_the_next_token(engine: Engine) -> None:
    engine.submit(request("e", (1, 2, THINK), seed=5, temperature=1.0))
    before = steps(engine, 3)
    assert {event["channel"] for event in before if event["event"] == "delta"} == {"thinking"}
    (event,) = engine.change("e", think=False)
    assert event["changes"] == {"think": {"from": True, "to": False}}
    after = rest(engine)
    assert tokens(after)[0] == END_THINK and END_THINK not in tokens(after)[1:]
    assert {event["channel"] for event in after if event["event"] == "delta" and event["token_ids"]} == {"answer"}
    modes = [event["mode"] for event in after if event["event"] == "step"]
    assert modes[0] == "off" and set(modes[1:]) == {"static"}


def test_a_bias_changed_while_the_thinking_ends_holds_behind_it(engine: Engine) -> None:
    """The tag comes next in any case, and is not the last of what the change does."""
    engine.submit(request("h", (1, 2, THINK), seed=5, temperature=1.0))
    steps(engine, 3)
    engine.change("h", think=False)
    (event,) = engine.change("h", {"logit_bias": [[7, 50.0]], "temperature": 0.5})
    assert event["changes"] == {
        "logit_bias": {"from": (), "to": ((7, 50.0),)},
        "temperature": {"from": 1.0, "to": 0.5},
    }
    after = tokens(rest(engine))
    assert after[0] == END_THINK and set(after[1:]) == {7}


def test_a_trace_with_changes_agrees_with_itself(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.spark.jsonl"
    with TraceWriter(path) as writer:
        writer.event({"event": "ready", "info": engine.info})
        events = engine.submit(request("t", temperature=1.0, seed=1)) + steps(engine, 3)
        events += engine.change("t", {"temperature": 0.0, "top_k": 3})
        for event in events + rest(engine):
            writer.event(event)
    assert verify(path).ok
    (line,) = [line for line in map(json.loads, path.read_text().splitlines()) if line["type"] == "setting_change"]
    assert line["changes"] == {"temperature": {"from": 1.0, "to": 0.0}, "top_k": {"from": 0, "to": 3}}
    assert line["turn"] == 0
