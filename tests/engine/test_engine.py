"""The engine as a whole: modes side by side and in turn, seeds, refusals, damage, results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Outcome, Runner, chi_square_p, open_runner, random_prompts, to_request
from engine.conftest import NAN_TOKEN, P, edited
from fixtures.bigram import VOCAB
from sparkchat.engine import loop, prefill, shortlist
from sparkchat.engine.step_plan import REASON_BAD_CONFIDENCE, REASON_DOES_NOT_PAY, REASON_NO_CONFIDENCE
from sparkchat.errors import UsageError
from sparkchat.params import CostTable, GenerateRequest

OpenRunner = Callable[..., Runner]
Record = dict[str, Any]
ALL_MODES = ("off", *MODES)
CLOSING = CostTable(tuple(range(1, 65)), tuple(1.0 + 0.1 * r for r in range(1, 65)), plain_ms=0.55)
"""Under this table drafting is predicted to lose about as often as to win, so gates close and open."""


def drive(opened: Runner, lines: list[dict[str, Any]], before_step: Callable[[int], Any]) -> list[Outcome]:
    """As ``Runner.watch``, with something to do before every step."""
    engine = opened.engine
    events = [e for n, line in enumerate(lines) for e in engine.submit(to_request(line, n))]
    turn = 0
    while engine.has_work:
        events += before_step(turn) or []
        events += engine.step()
        turn += 1
    mine = [[e for e in events if e.get("id") == f"r{n}"] for n in range(len(lines))]
    return [Outcome(found[-1]["result"], found) for found in mine]


# Exactness


def test_every_mode_and_block_size_side_by_side_gives_the_plain_tokens(
    mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    opened = runner(mix_folders["target"], mix_folders["half"], concurrency=8)
    prompts = random_prompts(6, 40, seed=12)
    lines = [
        {"prompt_ids": prompt, "mode": ALL_MODES[n % 4], "max_tokens": 10 + 5 * n, "block_size": 1 + n % 5}
        for n, prompt in enumerate(prompts)
    ]
    plain = runner(mix_folders["target"]).ids({**line, "mode": "off", "block_size": None} for line in lines)
    together = opened.watch(lines)
    assert [o.ids for o in together] == plain
    for outcome, line in zip(together, lines, strict=True):
        assert all(len(s["draft_ids"]) in (0, line["block_size"]) for s in outcome.steps)
        assert outcome.of_kind("start")[0]["block_size"] == line["block_size"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_seeded_answer_does_not_depend_on_its_batch_mates(mode: str, tiny_pair: Any, runner: OpenRunner) -> None:
    """Also where gates close and open, and among mates of every other mode, block size and temperature."""
    options = {"cost": CLOSING, "concurrency": 6}
    mine = {"prompt_ids": [301, 302, 303], "mode": mode, "temperature": 0.9, "seed": 77, "max_tokens": 75}
    mine["ignore_eos"] = True
    alone = runner(tiny_pair.target, tiny_pair.drafter, **options).watch([mine])[0]
    mates = [
        {
            "prompt_ids": prompt,
            "mode": ALL_MODES[n % 4],
            "temperature": (0.0, 1.0, 1.4)[n % 3],
            "block_size": 1 + n % 5,
            "max_tokens": 20 + 9 * n,
            "ignore_eos": True,
        }
        for n, prompt in enumerate(random_prompts(4, 30, seed=4))
    ]
    among = runner(tiny_pair.target, tiny_pair.drafter, **options).watch([*mates[:2], mine, *mates[2:]])[2]
    assert among.ids == alone.ids
    for name in ("draft_ids", "verify_len", "fallback", "committed_ids"):
        assert [s[name] for s in among.steps] == [s[name] for s in alone.steps]
    if mode == "compact":
        reasons = Counter(s["fallback"] for s in alone.steps)
        assert reasons[REASON_DOES_NOT_PAY] > 0
        assert reasons[None] > 16


SETTINGS: list[Record] = [
    {"logit_bias": ((300, 4.0), (301, -float("inf")), (500, 3.0)), "temperature": 0.8},
    {"min_tokens": 30, "temperature": 1.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.7},
    {"top_k": 5, "top_p": 0.9, "temperature": 1.3},
    {"temperature": 0.0, "logit_bias": ((222, 2.0),), "min_tokens": 12},
]


def test_drafting_from_shortlists_keeps_seeds_apart_and_greedy_tokens(
    tiny: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever settings the mates have, a request drafts what it drafts alone, and greedy tokens are the plain ones."""
    monkeypatch.setattr(shortlist, "SMALLEST_VOCABULARY", 512)
    shared = {"mode": "static", "max_tokens": 30}
    lines = [
        {"prompt_ids": [301, 302 + n], "seed": n, **shared, **s}
        for n, s in enumerate([{"temperature": 1.0}, *SETTINGS])
    ]
    together = tiny.watch(lines)
    for line, among in zip(lines, together, strict=True):
        (alone,) = tiny.watch([line])
        assert among.ids == alone.ids
        assert [s["draft_ids"] for s in among.steps] == [s["draft_ids"] for s in alone.steps]
    greedy = [{**line, "temperature": 0.0} for line in lines]
    assert tiny.ids(greedy) == tiny.ids({**line, "mode": "off"} for line in greedy)
    # What must not be said is not drafted either.
    assert 301 not in {token for s in together[1].steps for token in s["draft_ids"]}


@pytest.mark.parametrize("size", [2, VOCAB - 1])
def test_drafting_from_shortlists_keeps_the_law(
    size: int, three_tokens: tuple[Path, Path], runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens but one hold every likely one; the two of the other list never come up and are all turned down."""
    monkeypatch.setattr(shortlist, "SMALLEST_VOCABULARY", VOCAB)
    monkeypatch.setattr(shortlist, "SIZE", size)
    opened = runner(*three_tokens, concurrency=12)
    line = {"prompt_ids": [65], "mode": "static", "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    for options, law in (({}, list(P)), ({"top_k": 2}, [0.0, 0.625, 0.375])):
        outcomes = opened.watch({**line, **options, "seed": n} for n in range(12))
        counts = Counter(token for o in outcomes for token in o.ids)
        assert chi_square_p([counts[300 + i] for i in range(3)], law) > 1e-4
        accepted = sum(o.result["speculation"]["num_accepted_draft_tokens"] for o in outcomes)
        assert (accepted > 0) == (size == VOCAB - 1)


def test_a_gate_that_closes_and_opens_keeps_the_law(three_tokens: tuple[Path, Path], runner: OpenRunner) -> None:
    table = CostTable((1, 2, 3, 4), (1.0, 1.15, 1.3, 1.45), plain_ms=0.7)
    opened = runner(*three_tokens, cost=table, concurrency=12)
    lines = [
        {"prompt_ids": [65], "mode": "compact", "temperature": 1.0, "max_tokens": 200, "seed": n, "ignore_eos": True}
        for n in range(12)
    ]
    outcomes = opened.watch(lines)
    fallbacks = Counter(s["fallback"] for o in outcomes for s in o.steps)
    assert fallbacks[REASON_DOES_NOT_PAY] > 100
    assert fallbacks[None] > 100
    counts = Counter(token for o in outcomes for token in o.ids)
    assert chi_square_p([counts[300 + i] for i in range(3)], P) > 1e-4
    pairs = Counter(p for o in outcomes for p in zip(o.ids[::2], o.ids[1::2], strict=False))
    law = [a * b for a in P for b in P]
    assert chi_square_p([pairs[300 + i, 300 + j] for i in range(3) for j in range(3)], law) > 1e-4


def test_the_budget_and_the_context_are_exact_in_every_mode(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"], context=24, concurrency=8)
    plain = opened.ids([{"prompt_ids": [301] * 3, "mode": "off"}])[0]
    assert len(plain) == 21
    lines = [
        {"prompt_ids": [301] * 3, "mode": mode, "max_tokens": limit}
        for mode in MODES
        for limit in (1, 2, 5, 6, 7, 20, 21, 22, None)
    ]
    for outcome, line in zip(opened.watch(lines), lines, strict=True):
        assert outcome.ids == plain[: line["max_tokens"]]
        assert outcome.result["finish_reason"] == "length"
        # A first token takes no step, and one token has no speed.
        if line["max_tokens"] == 1:
            assert outcome.result["speculation"]["num_steps"] == 0
            assert outcome.result["timing"]["tokens_per_second"] is None


def test_tokens_of_deltas_say_where_they_come_from(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"])
    lines = [{"prompt_ids": [301], "mode": mode, "max_tokens": 30} for mode in ALL_MODES]
    for outcome, mode in zip(opened.watch(lines), ALL_MODES, strict=True):
        origins = [o for e in outcome.of_kind("delta") for o in e["origins"]]
        assert origins[0] == "prefill"
        counts = Counter(origins[1:])
        assert len(origins) == 30
        if mode == "off":
            assert counts == {"plain": 29}
        else:
            assert counts["draft"] == outcome.result["speculation"]["num_accepted_draft_tokens"] > 0
            assert counts["draft"] + counts["bonus"] + counts["plain"] == 29


def test_a_rejection_is_told_only_where_it_ended_the_run(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["half"])
    found = []
    for outcome in opened.watch({"prompt_ids": [301 + n], "mode": "static", "max_tokens": 17} for n in range(4)):
        for step in outcome.steps:
            reject, correct = step["reject"], step["correct_drafts"]
            if reject is None:
                continue
            found.append(reject)
            assert reject["pos"] == correct
            assert reject["draft_id"] == step["draft_ids"][correct]
            assert reject["target_rank"] > 1
            if len(step["committed_ids"]) == correct + 1:
                assert reject["target_id"] == step["committed_ids"][-1] == step["bonus_token"]
    assert found


# Changing the mode


def test_drafts_after_a_change_of_mode_are_those_of_an_unbroken_run(tiny: Runner) -> None:
    """Features that piled up in mode off reach the drafter in full and in order."""
    prompts = random_prompts(3, 40, seed=3)
    lines = [{"prompt_ids": prompt, "max_tokens": 60, "ignore_eos": True} for prompt in prompts]
    before = tiny.engine.mode
    unbroken = tiny.watch({**line, "mode": "static"} for line in lines)
    modes = ("off", "off", "off", "static", "cap-accept", "off", "compact")
    broken = drive(tiny, lines, lambda turn: tiny.engine.set_mode(modes[turn // 4 % len(modes)]))  # type: ignore[arg-type]
    tiny.engine.set_mode(before)
    for whole, parts in zip(unbroken, broken, strict=True):
        assert parts.ids == whole.ids
        expected = {s["prefix_len"]: s["draft_ids"] for s in whole.steps}
        compared = [(s["draft_ids"], expected.get(s["prefix_len"])) for s in parts.steps if s["draft_ids"]]
        assert len(compared) > 15
        assert all(ours == wanted for ours, wanted in compared if wanted is not None)
        assert {s["mode_requested"] for s in parts.steps} == {*ALL_MODES}


def test_a_change_of_mode_is_an_event_and_shows_in_the_result(tiny: Runner) -> None:
    engine = tiny.engine
    before = engine.mode
    assert engine.set_mode(before) == []
    line = {"prompt_ids": [301], "max_tokens": 20, "ignore_eos": True}
    events: list[Any] = []

    def change(turn: int) -> Any:
        mode = {3: "off", 6: "cap-accept"}.get(turn)
        events.extend(engine.set_mode(mode) if mode else [])  # type: ignore[arg-type]

    follows, locked = drive(tiny, [line, {**line, "mode": "off"}], change)
    assert [(e["from"], e["to"], e["id"]) for e in events] == [(before, "off", None), ("off", "cap-accept", None)]
    assert [s["mode_requested"] for s in follows.steps][:8] == [before] * 3 + ["off"] * 3 + ["cap-accept"] * 2
    assert {s["mode_requested"] for s in locked.steps} == {"off"}
    assert (follows.result["mode"], locked.result["mode"]) == ("cap-accept", "off")
    assert (follows.result["speculation"]["reason_off"], locked.result["speculation"]["reason_off"]) == (
        None,
        "mode is off",
    )
    with pytest.raises(UsageError, match="unknown"):
        engine.set_mode("fast")  # type: ignore[arg-type]
    engine.set_mode(before)


def test_features_wait_in_bounded_memory_while_nothing_is_drafted(
    tiny: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FLUSH_ROWS", 16)
    monkeypatch.setattr(prefill, "FLUSH_ROWS", 16)
    line = {"prompt_ids": [301, 302] * 10, "max_tokens": 60, "ignore_eos": True}
    waiting: list[int] = []

    def look(turn: int) -> None:
        waiting.extend(s.slot.draft.num_pending for s in tiny.engine._scheduler.decoding)
        if turn == 50:
            tiny.engine.set_mode("static")

    before = tiny.engine.mode
    tiny.engine.set_mode("off")
    (outcome,) = drive(tiny, [line], look)
    tiny.engine.set_mode(before)
    assert max(waiting) == 15
    (whole,) = tiny.watch([{**line, "mode": "static"}])
    assert outcome.ids == whole.ids
    drafts = {s["prefix_len"]: s["draft_ids"] for s in whole.steps}
    late = [s for s in outcome.steps if s["draft_ids"]]
    assert len(late) > 5
    assert all(s["draft_ids"] == drafts[s["prefix_len"]] for s in late if s["prefix_len"] in drafts)


# What a pair cannot do


def test_without_a_drafter_every_mode_is_off_and_says_why(tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(tiny_pair.target, mode="static")
    engine = opened.engine
    assert (engine.mode, engine.info["mode"], engine.info["reason_off"]) == ("off", "off", "fixture has no drafter")
    (outcome,) = opened.watch([{"prompt_ids": [301], "max_tokens": 5, "ignore_eos": True}])
    assert (outcome.result["mode"], outcome.of_kind("start")[0]["mode"]) == ("off", "off")
    assert outcome.result["speculation"]["reason_off"] == "fixture has no drafter"
    assert {s["mode"] for s in outcome.steps} == {"off"}
    (refused,) = opened.run([{"prompt_ids": [301], "mode": "static"}])
    assert (refused["finish_reason"], refused["mode"]) == ("error", "off")
    assert "has no drafter" in refused["error"]
    with pytest.raises(UsageError, match="has no drafter"):
        engine.set_mode("compact")
    assert engine.set_mode("off") == []


def test_without_a_confidence_head_planning_modes_verify_everything_and_say_so(
    tiny_pair: Any, headless_drafter: Path, runner: OpenRunner
) -> None:
    opened = runner(tiny_pair.target, headless_drafter)
    lines = [{"prompt_ids": [301], "mode": mode, "max_tokens": 20, "ignore_eos": True} for mode in ALL_MODES]
    off, *others = opened.watch(lines)
    for outcome, mode in zip(others, MODES, strict=True):
        assert outcome.ids == off.ids
        assert outcome.result["mode"] == "static"
        assert {(s["mode"], s["mode_requested"]) for s in outcome.steps} == {("static", mode)}
        reason = None if mode == "static" else REASON_NO_CONFIDENCE
        assert {s["fallback"] for s in outcome.steps} == {reason}
        assert all(s["verify_len"] == 5 and s["survival"] == s["confidence"] == [] for s in outcome.steps)


@pytest.mark.parametrize(
    "spec",
    [{"mode": "fast"}, {"concurrency": 0}, {"threads": -1}, {"block_size": 0}, {"block_size": 6},
     {"temperatures": (1.0,) * 4}, {"temperatures": (1.0,) * 4 + (0.0,)}, {"temperatures": (float("nan"),) * 5},
     {"context": 1}, {"context": 10**9}, {"device": "cuda:99"}],
    ids=str,
)  # fmt: skip
def test_a_load_that_cannot_work_is_refused_at_the_start(spec: dict[str, Any], tiny_pair: Any) -> None:
    from sparkchat.engine.engine import Engine
    from sparkchat.params import LoadSpec

    paths = {"model_path": str(tiny_pair.target), "drafter_path": str(tiny_pair.drafter)}
    with pytest.raises(UsageError) as caught:
        Engine(LoadSpec(name="fixture", **{"device": "cpu", **paths, **spec}))  # type: ignore[arg-type]
    assert "\n" not in caught.value.message


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": ()}, "no tokens"),
    ({"prompt_ids": (1, 512)}, "512"),
    ({"prompt_ids": (1, -1)}, "-1"),
    ({"prompt_ids": (1, "a")}, "whole numbers"),
    ({"prompt_ids": (1, True)}, "whole numbers"),
    ({"prompt_ids": (1.5,)}, "whole numbers"),
    ({"prompt_ids": (1,) * 512}, "512"),
    ({"prompt_ids": (1,), "session": ["s"]}, "session"),
    ({"prompt_ids": (1,), "system": "be brief"}, "system"),
    ({"prompt_ids": (1,), "think": True}, "thinking"),
    ({"prompt_ids": (1,), "block_size": 6}, "trained with 5"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "x", "raw": "yes"}, "raw"),
    ({"prompt": "", "raw": True}, "no tokens"),
    ({"messages": ("hello",)}, "messages"),
    ({"messages": ({"role": "user"},)}, "message 1"),
    ({"messages": ()}, "message"),
    ({"messages": ({"role": "oracle", "content": "x"},)}, "oracle"),
]


@pytest.mark.parametrize(("fields", "word"), BAD_REQUESTS, ids=[str(f)[:50] for f, _ in BAD_REQUESTS])
def test_a_bad_request_is_refused_with_a_reason(fields: dict[str, Any], word: str, tiny: Runner) -> None:
    (event,) = tiny.engine.submit(GenerateRequest(id="bad", **fields))
    result = event["result"]
    assert (event["event"], event["id"], result["finish_reason"]) == ("end", "bad", "error")
    assert word in result["error"]
    assert (result["token_ids"], result["text"], result["usage"]["completion_tokens"]) == ([], "", 0)
    assert result["mode"] == tiny.engine.mode
    json.dumps(event, allow_nan=False)
    assert not tiny.engine.has_work


def test_a_second_request_with_the_id_of_one_under_way_is_refused(tiny: Runner) -> None:
    first = to_request({"prompt_ids": [301, 302], "max_tokens": 12, "ignore_eos": True}, 0)
    (alone,) = tiny.engine.generate([first])
    events = tiny.engine.submit(first)
    (refused,) = tiny.engine.submit(first)  # while it waits
    events += tiny.engine.step()
    (again,) = tiny.engine.submit(first)  # while it runs
    for event in (refused, again):
        assert (event["event"], event["id"], event["error"]) == ("end", None, "UsageError")
        assert event["result"]["finish_reason"] == "error"
        assert "'r0' is under way" in event["result"]["error"]
    while tiny.engine.has_work:
        events += tiny.engine.step()
    (end,) = [event for event in events if event["event"] == "end"]
    assert end["result"]["token_ids"] == alone["token_ids"]
    assert tiny.engine.generate([first])[0]["token_ids"] == alone["token_ids"]  # the id is free again
    with pytest.raises(UsageError, match="one id"):
        tiny.engine.generate([first, first])


# Damage


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1e-39}, {"presence_penalty": -1e39}, {"frequency_penalty": -3e38}], ids=str
)
def test_penalties_without_measure_end_their_own_request(mode: str, penalty: dict[str, float], tiny: Runner) -> None:
    line = {"prompt_ids": [301, 302], "mode": mode, "max_tokens": 12, "ignore_eos": True}
    for temperature in (0.0, 1.0):
        wild, tame = tiny.run([{**line, **penalty, "temperature": temperature, "seed": 1}, line])
        assert tame["error"] is None
        assert len(tame["token_ids"]) == 12
        if wild["finish_reason"] == "error":
            assert "penalty" in wild["error"]


def test_only_the_damaged_request_ends(damaged_target: Path, tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(damaged_target, tiny_pair.drafter)
    plain = runner(tiny_pair.target, tiny_pair.drafter)
    for mode in ALL_MODES:
        good = {"prompt_ids": [301, 302], "mode": mode, "max_tokens": 12, "ignore_eos": True}
        bad = {**good, "prompt_ids": [301, NAN_TOKEN], "session": "s"}
        first, second, third = opened.watch([good, bad, {**good, "prompt_ids": [303]}])
        assert second.result["finish_reason"] == "error"
        assert "not numbers" in second.result["error"]
        assert second.ids == []
        expected = plain.ids([good, {**good, "prompt_ids": [303]}])
        assert [first.ids, third.ids] == expected
        # Nothing of it is used again.
        (again,) = opened.watch([{**good, "session": "s"}])
        assert (again.ids, again.result["usage"]["cached_tokens"]) == (expected[0], 0)
        for outcome in (first, second, third):
            json.dumps(outcome.events, allow_nan=False)


def test_a_confidence_that_is_no_number_is_not_trusted(tiny_pair: Any, tmp_path: Path) -> None:
    def spoil(held: dict[str, Any]) -> None:
        held["confidence_head.proj.bias"][:] = float("nan")

    drafter = edited(tiny_pair.drafter, tmp_path / "drafter", spoil)
    opened = open_runner(tiny_pair.target, drafter)
    lines = [{"prompt_ids": [301], "mode": mode, "max_tokens": 20, "ignore_eos": True} for mode in ALL_MODES]
    off, static, compact, cap = opened.watch(lines)
    assert off.ids == static.ids == compact.ids == cap.ids
    assert {s["fallback"] for s in static.steps} == {None}
    assert {s["fallback"] for s in compact.steps[:-1]} == {REASON_BAD_CONFIDENCE}
    assert {s["verify_len"] for s in compact.steps} == {0}
    json.dumps([o.events for o in (static, compact, cap)], allow_nan=False)


@pytest.mark.parametrize("smallest", [512, 4096])
def test_a_damaged_sequential_head_is_reported(
    smallest: int, tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting from shortlists (512) and from the whole vocabulary."""
    monkeypatch.setattr(shortlist, "SMALLEST_VOCABULARY", smallest)

    def spoil(held: dict[str, Any]) -> None:
        for name in ("markov_w1", "markov_w2"):
            held[f"markov_head.{name}.weight"] *= 1e20

    opened = open_runner(tiny_pair.target, edited(tiny_pair.drafter, tmp_path / "drafter", spoil))
    (result,) = opened.run([{"prompt_ids": [301], "mode": "static", "max_tokens": 20, "ignore_eos": True}])
    assert result["finish_reason"] == "error"
    assert "--drafter none" in result["error"]


# Results


def test_generate_gives_results_in_order_of_the_requests(tiny: Runner) -> None:
    requests = [
        to_request({"prompt_ids": [301 + n], "max_tokens": 9 - n, "ignore_eos": True, "temperature": 1.0}, n)
        for n in range(8)
    ]
    requests.insert(3, to_request({"prompt_ids": [9999]}, 99))
    results = tiny.engine.generate(requests)
    assert [r["usage"]["completion_tokens"] for r in results] == [9, 8, 7, 0, 6, 5, 4, 3, 2]
    for result, request in zip(results, requests, strict=True):
        assert result["schema"] == "sparkchat.result/1"
        if result["error"] is None:
            assert result["prompt_token_ids"] == list(request.prompt_ids or ())
            assert result["timing"]["ttft_ms"] >= 0
            assert result["timing"]["tokens_per_second"] > 0


def test_the_info_names_the_table_as_the_lookup_does(tiny: Runner) -> None:
    assert tiny.engine.info["cost_table"]["id"] == tiny.engine.pair.cost.id
    json.dumps(tiny.engine.info, allow_nan=False)
