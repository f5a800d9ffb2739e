"""A request that is set aside for want of room goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cases.harness import Runner, random_prompts, to_request, varied_cost
from engine.test_captured import MODES, SAMPLINGS, open_one
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.outlook import Outlook
from sparkchat.engine.slots import SetAside
from sparkchat.models.dense import DenseModel
from sparkchat.models.paged_cache import PagedCache
from sparkchat.params import ContextCosts

LITTLE = 300
"""Tokens of a cache that five requests share: as many as one may have."""
COST = CostLookup(replace(varied_cost(), plain_ms=1.15, context=ContextCosts(64, 0.002)))
"""Drafting does not pay for long under it, and what pays depends on what is cached."""
Engines = Callable[[str], tuple[Runner, Runner]]


@pytest.fixture(autouse=True)
def _start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests start where they will soon find no room."""
    monkeypatch.setattr("sparkchat.engine.scheduler.ROOM_TO_RUN", 8)


@pytest.fixture(scope="module")
def engines(tiny_pair: Any) -> Iterator[Engines]:
    """Return ``engines(path)``: one engine with room for all, one with little. By the reference loop over pages, or
    over storage that grows, as processor kernels want it; or by captured steps."""
    opened: dict[str, tuple[Runner, Runner]] = {}

    def get(path: str) -> tuple[Runner, Runner]:
        if path not in opened:
            graphs = True if path == "captured" else None
            with pytest.MonkeyPatch.context() as patch:
                if path == "growing":
                    patch.setattr(DenseModel, "can_page", False)
                pair = tiny_pair.target, tiny_pair.drafter
                opened[path] = tuple(open_one(*pair, graphs, cache_tokens=n) for n in (1800, LITTLE))  # type: ignore[assignment]
            for runner in opened[path]:
                runner.engine.pair.cost = COST
                is_paged = isinstance(runner.engine.pair.cache, PagedCache)
                assert is_paged == (path != "growing")
        return opened[path]

    yield get
    opened.clear()


def lines_of(mode: str, sampling: str, count: int = 6, **more: Any) -> list[dict[str, Any]]:
    prompts = [random_prompts(2, 40 + 5 * n, seed=n)[1] for n in range(count)]
    return [
        {
            "prompt_ids": prompt,
            "max_tokens": 48 - 3 * n,
            "ignore_eos": True,
            "seed": n,
            "mode": mode,
            **SAMPLINGS[sampling],
            **more,
        }
        for n, prompt in enumerate(prompts)
    ]


def counted(runner: Runner, lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Results with their steps and without times, and how often somebody was set aside; afterwards nothing is held."""
    # What a request is planned by is left by those before it.
    runner.engine.pair.outlook = Outlook()
    outcomes = runner.watch(lines)
    assert_nothing_is_held(runner)
    results = [{k: v for k, v in outcome.result.items() if k != "timing"} for outcome in outcomes]
    for result, outcome in zip(results, outcomes, strict=True):
        timed = ("_ms", "t_ns", "graph", "tokens_per_second")
        result["steps"] = [{k: v for k, v in step.items() if not k.endswith(timed)} for step in outcome.steps]
    events = [event["event"] for outcome in outcomes for event in outcome.events]
    assert events.count("preempted") == events.count("resumed")
    return results, events.count("preempted")


def assert_nothing_is_held(runner: Runner) -> None:
    pair, slots = runner.engine.pair, runner.engine._slots
    assert len(slots._open_slots) == len(slots._idle)
    for cache in (pair.cache, pair.draft_cache):
        if isinstance(cache, PagedCache) and not slots._idle:
            assert cache.table.num_free == cache.table.num_pages


GROWING = pytest.param("growing", marks=pytest.mark.slow)
PATHS = pytest.mark.parametrize("path", ["loop", GROWING, "captured"])
KINDS: tuple[dict[str, Any], ...] = (
    {"mode": "off"},
    {"mode": "static", **SAMPLINGS["sampled"]},
    {"mode": "compact", **SAMPLINGS["filtered"]},
    {"mode": "cap-accept", **SAMPLINGS["sampled"], "logprobs": 2},
    {"mode": "static", "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"mode": "off", **SAMPLINGS["sampled"], "logit_bias": [[310, 2.0]]},
    {"mode": "compact", **SAMPLINGS["sampled"]},
    {"mode": "static", **SAMPLINGS["filtered"], "min_tokens": 20, "ignore_eos": False},
)


@PATHS
def test_results_are_those_of_a_cache_with_room_for_all(path: str, engines: Engines) -> None:
    """Every mode, greedy and sampled, penalties, log-probabilities, limits and stop strings side by side."""
    ample, little = engines(path)
    lines = [line | kind for line, kind in zip(lines_of("off", "greedy", len(KINDS)), KINDS, strict=True)]
    (plain,) = ample.run(lines[1:2])
    lines[1]["stop"] = [plain["text"][len(plain["text"]) * 3 // 4 :][:4]]
    expected, none = counted(ample, lines)
    found, some = counted(little, lines)
    assert none == 0 and some >= (1 if path == "growing" else 2)
    assert expected[1]["finish_reason"] == "stop_string"
    assert found == expected


@pytest.mark.slow
@PATHS
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_by_itself(mode: str, sampling: str, path: str, engines: Engines) -> None:
    ample, little = engines(path)
    lines = lines_of(mode, sampling)
    expected, none = counted(ample, lines)
    found, some = counted(little, lines)
    assert none == 0 and some >= (1 if path == "growing" else 2)
    if sampling == "greedy" and mode in ("compact", "cap-accept"):  # plans look at who is decoded beside
        assert [r["token_ids"] for r in found] == [r["token_ids"] for r in expected]
    else:
        assert found == expected


def until_one_is_aside(runner: Runner, lines: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Submit the lines and step until a request is set aside; its id, and all events so far."""
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        events += runner.engine.submit(to_request(line, number))
    while runner.engine.has_work:
        events += runner.engine.step()
        for event in events:
            if event["event"] == "preempted":
                state = runner.engine._scheduler.find(event["id"])
                assert state is not None and isinstance(state.aside, SetAside) and state.slot is None
                return event["id"], events
    raise AssertionError("there was room for all")


def the_rest(runner: Runner) -> dict[str, dict[str, Any]]:
    """Results by id of all that is still to end."""
    results = {}
    while runner.engine.has_work:
        results |= {e["id"]: e["result"] for e in runner.engine.step() if e["event"] == "end"}
    return results


@PATHS
@pytest.mark.parametrize("end", ["cancelled", "error"])
def test_who_ends_while_set_aside_leaves_nothing_behind(end: str, path: str, engines: Engines) -> None:
    _, little = engines(path)
    lines = lines_of("static", "sampled", 5)
    aside, events = until_one_is_aside(little, lines)
    state = little.engine._scheduler.find(aside)
    assert state is not None
    if end == "cancelled":
        events += little.engine.cancel(aside)
    else:
        state.finish("error", error="it broke")
        events += little.engine._retire()
    (result,) = [e["result"] for e in events if e["event"] == "end" and e["id"] == aside]
    assert (result["finish_reason"], state.aside) == (end, None)
    told = [i for e in events if e["event"] == "delta" and e["id"] == aside for i in e["token_ids"]]
    assert result["token_ids"] == told and told
    results = the_rest(little)
    assert len(results) + sum(e["event"] == "end" for e in events) == 5
    assert_nothing_is_held(little)


@PATHS
def test_settings_may_change_while_set_aside(path: str, engines: Engines) -> None:
    """The tokens are those of a run in which the same setting changed behind the same token."""
    ample, little = engines(path)
    most = 130 if path == "growing" else 100
    lines = [line | {"mode": None, "max_tokens": most} for line in lines_of("off", "sampled", 3)]
    for runner in (ample, little):
        runner.engine.set_mode("off")
    aside, _ = until_one_is_aside(little, lines)
    state = little.engine._scheduler.find(aside)
    assert state is not None
    done, number = len(state.delivered), int(aside[1:])
    little.engine.change(aside, {"temperature": 0.4, "top_k": 5})
    little.engine.set_mode("static")
    found = the_rest(little)[aside]["token_ids"]
    for event in ample.engine.submit(to_request(lines[number], number)):
        raise AssertionError(event)
    twin = ample.engine._scheduler.find(aside)
    assert twin is not None
    # A captured step is in flight when the one before it is read.
    while len(twin.delivered) < done - (path == "captured"):
        ample.engine.step()
    ample.engine.change(aside, {"temperature": 0.4, "top_k": 5})
    ample.engine.set_mode("static")
    assert the_rest(ample)[aside]["token_ids"] == found


@pytest.mark.parametrize("path", ["loop", "captured"])
def test_a_prompt_is_read_on_where_it_was_set_aside(path: str, tiny_pair: Any, engines: Engines) -> None:
    """The first request needs a page while the second has read a part of its prompt."""
    pair, graphs = (tiny_pair.target, tiny_pair.drafter), True if path == "captured" else None
    little = open_one(*pair, graphs, cache_tokens=2500, context=2500)
    first, second = ({"prompt_ids": random_prompts(2, n, seed=n)[1], "ignore_eos": True} for n in (60, 2400))
    little.engine.submit(to_request(first | {"mode": "off", "max_tokens": 200}, 0))
    state = little.engine._scheduler.find("r0")
    assert state is not None
    # Its reach is about to leave its second page.
    while state.kv_len < 128 - 2 * (little.engine.pair.block_size + 1):
        little.engine.step()
    little.engine.submit(to_request(second | {"mode": "static", "max_tokens": 20}, 1))
    while (other := little.engine._scheduler.find("r1")).aside is None:  # type: ignore[union-attr]
        little.engine.step()
    assert other is not None and 0 < other.prefilled < 2400
    results = the_rest(little)
    ample = open_one(*pair, graphs, cache_tokens=5200, context=2500)
    assert results["r1"]["token_ids"] == ample.ids([second | {"mode": "static", "max_tokens": 20}])[0]
    assert_nothing_is_held(little)


@PATHS
def test_a_session_goes_on_behind_an_answer_that_was_set_aside(path: str, engines: Engines) -> None:
    ample, little = engines(path)
    lines = [line | {"session": f"s{n}"} for n, line in enumerate(lines_of("static", "greedy", 5))]
    aside, events = until_one_is_aside(little, lines)
    found = {e["id"]: e["result"] for e in events if e["event"] == "end"} | the_rest(little)
    number = int(aside[1:])
    again = {**lines[number], "prompt_ids": [*lines[number]["prompt_ids"], *found[aside]["token_ids"], 301, 302]}
    again["max_tokens"] = 20
    (result,), (alone,) = little.run([again]), ample.run([{**again, "session": None}])
    assert result["token_ids"] == alone["token_ids"]
    # Others' answers may have needed the room; the one that ended last is still there.
    assert result["usage"]["cached_tokens"] in (0, len(again["prompt_ids"]) - 3)
