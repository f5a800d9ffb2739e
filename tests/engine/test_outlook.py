"""Whether drafting pays is settled for all requests of a step by what was seen lately; finding out costs little."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cases.harness import open_runner, random_prompts, to_request
from engine.chains import VOCAB, WIDTH, Chain, cliffed_cost
from engine.many_requests import BLOCK, Served, h200_costs, pair_of, profile, state_of
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.drafters import intend_all, learn_blocks
from sparkchat.engine.drafting_forecast import forecast_theta
from sparkchat.engine.lagged_lengths import choose_budgets
from sparkchat.engine.lagged_plan import admit, choose_budget
from sparkchat.engine.outlook import ENOUGH, FEW, LONGEST_PAUSE, PAUSE, Company, Outlook
from sparkchat.engine.planner import plan
from sparkchat.engine.recent_blocks import RecentBlocks
from sparkchat.engine.step_plan import REASON_DOES_NOT_PAY
from sparkchat.params import BatchCosts, CostTable

COSTS = h200_costs()


def survivals(chance: float, block: int = BLOCK) -> list[float]:
    return [chance ** (k + 1) for k in range(block)]


def step(pair: Any, states: Sequence[Any], chance: float) -> list[int]:
    """Which requests drafted; their blocks are told at once, as the reference loop does."""
    intents = intend_all(states, "compact", pair)
    learn_blocks(pair, states, [survivals(chance)[: intent.draft_len] for intent in intents])
    for state in states:
        state.round += 1
    return [i for i, intent in enumerate(intents) if intent.draft_len]


# Worth


@pytest.mark.parametrize("requests", [1, 8, 32, 64, 112, 128, 256])
def test_compact_is_worth_the_best_fixed_length_by_costs_measured_on_an_h200(requests: int) -> None:
    """Of chats with answers of 64 tokens, plain decoding among the lengths; from a start where nothing is known."""
    count = max(100, 400 // requests)
    served = [
        Served(pair_of(COSTS), profile("chat"), requests, answer=64, fixed=length).steps(count).speed
        for length in (0, 3, 4, 5, 6, 7)
    ]
    compact = Served(pair_of(COSTS), profile("chat"), requests, answer=64).steps(count)
    assert compact.speed >= 0.99 * max(served)
    if requests >= 128:
        # One trial at the start, one or two more behind longer and longer pauses.
        assert sum(compact.drafting) <= 4 * ENOUGH
    if requests == 64:
        assert compact.speed >= 1.05 * max(served)


def test_fewer_requests_draft_again_at_once() -> None:
    served = Served(pair_of(COSTS), profile("chat"), 256, answer=400).steps(60)
    assert served.drafting[-1] == 0
    served.requests = 16
    served.steps(4)
    assert served.drafting[-1] == 16


def test_easier_text_is_noticed_by_a_trial_of_few() -> None:
    served = Served(pair_of(COSTS), profile(0.4), 128, answer=400).steps(300)
    assert set(served.drafting) == {0, FEW}
    longest = 150  # a thousandth of the time: see TRIAL_SHARE
    served.acceptance = profile("math")
    served.steps(longest + 20)
    assert served.drafting[-1] > 120  # not those with one token left


# Which requests draft


def test_a_request_begins_as_those_before_it_went_on() -> None:
    pair = pair_of(COSTS)
    crowd = [state_of(64) for _ in range(256)]
    assert step(pair, crowd, 0.7) == list(range(FEW))  # nothing is known: eight of them find out
    for _ in range(10):
        assert step(pair, crowd, 0.7) == []
    fresh = [state_of(64) for _ in range(256)]
    intents = intend_all(fresh, "compact", pair)
    assert {(intent.draft_len, intent.fallback) for intent in intents} == {(0, REASON_DOES_NOT_PAY)}
    assert step(pair, fresh[:8], 0.7) == list(range(8))


def test_a_block_of_which_nothing_is_known_is_planned_as_those_of_others() -> None:
    pair = pair_of(COSTS)
    learn_blocks(pair, [state_of(64) for _ in range(64)], [survivals(0.3)] * 64)
    states = [state_of(64) for _ in range(64)]
    intents = intend_all(states, "compact", pair_of(COSTS))
    known = choose_budgets(states, intents, [0] * 64, pair).shared
    unknown = choose_budgets(states, intents, [0] * 64, pair_of(COSTS)).shared
    assert known is not None and unknown is not None
    assert known.drafts < unknown.drafts < 64 * BLOCK


def test_requests_with_a_seed_of_their_own_neither_look_nor_tell() -> None:
    pair = pair_of(COSTS)
    crowd = [state_of(64) for _ in range(255)]
    mine = state_of(64, seed=3, temperature=1.0)
    assert step(pair, [mine, *crowd], 0.5) == list(range(1 + FEW))
    assert step(pair, [mine, *crowd], 0.5) == [0]  # the trial is over, and known
    recent = pair.outlook.recent
    before = recent.expected("greedy", BLOCK), set(recent._steps)
    for _ in range(10):
        assert step(pair, [mine, *crowd], 0.5) == [0]
    assert (recent.expected("greedy", BLOCK), set(recent._steps)) == before
    assert before[1] == {"greedy"}
    # Its budget is that of a request alone, which counts drafts of which nothing is known as certain.
    intents = intend_all([mine, *crowd], "compact", pair)
    among = choose_budgets([mine, *crowd], intents, [0] * 256, pair).own[0]
    assert among == choose_budgets([mine], intents[:1], [0], pair_of(COSTS)).own[0]


def test_requests_beside_those_that_are_asked_about_count_in_the_costs() -> None:
    """Drafting pays for thirty-two, but not in steps of all."""
    pair = pair_of(COSTS)
    learn_blocks(pair, [state_of(64) for _ in range(256)], [survivals(0.6)] * 256)
    mine = [state_of(64) for _ in range(32)]
    assert step(pair, mine, 0.6) == list(range(32))
    others = [state_of(64) for _ in range(200)]
    for other in others:
        other.mode_override = "off"
    assert step(pair, [*mine, *others], 0.6) == []


def test_where_plain_steps_were_not_measured_all_draft() -> None:
    table = CostLookup(CostTable((1, 2, 300), (1.0, 2.0, 300.0)))
    for cost in (table, None):
        pair = pair_of(cost)
        for _ in range(30):
            assert step(pair, [state_of(64)] * 3, 0.01) == [0, 1, 2]


# Trials


def test_trials_are_rarer_the_more_they_cost() -> None:
    def pauses(requests: int) -> list[int]:
        pair, found, plain = pair_of(COSTS), [], 0
        states = [state_of(1 << 19) for _ in range(requests)]
        for _ in range(3000 if requests == 1 else 500):
            if step(pair, states, 0.01):
                found += [plain] if plain else []
                plain = 0
            else:
                plain += 1
        return found

    alone, among = pauses(1), pauses(256)
    assert alone[:4] == [48, 96, 192, 384]
    assert max(alone) == LONGEST_PAUSE
    assert PAUSE < max(among) < 200


def test_a_request_alone_waits_for_a_trial_no_longer_than_the_first_one_did() -> None:
    """A hard answer made the pauses long; the next question may be another."""
    pair, hard = pair_of(COSTS), [state_of(1 << 19)]
    while pair.outlook._pause < 8 * PAUSE:
        step(pair, hard, 0.01)
    for _ in range(10):
        assert step(pair, hard, 0.9) == []
    easy = [state_of(1 << 19)]
    plain = [step(pair, easy, 0.9) for _ in range(PAUSE + ENOUGH + 8)].count([])
    assert plain == PAUSE
    # What decodes on waits as long as it is to.
    while pair.outlook.is_open:
        step(pair, easy, 0.01)
    # The step that closed it was the first plain one.
    paused = [step(pair, easy, 0.01) for _ in range(PAUSE - 1 + FEW + 2 * PAUSE)]
    assert paused == [[]] * (PAUSE - 1) + [[0]] * FEW + [[]] * 2 * PAUSE


def test_a_kind_that_was_never_seen_does_not_wait_for_the_pause_of_another() -> None:
    """What sampled text showed says little of greedy one: it is tried at once, once."""
    pair, hot = pair_of(COSTS), [state_of(1 << 19, temperature=1.0)]
    while pair.outlook._pause < 8 * PAUSE:
        step(pair, hot, 0.01)
    greedy = [state_of(1 << 19)]
    assert [step(pair, greedy, 0.9) for _ in range(ENOUGH + 4)] == [[0]] * (ENOUGH + 4)
    # One that loses as well pauses as any other does.
    warm = [state_of(1 << 19, temperature=0.7)]
    while pair.outlook.is_open:
        step(pair, hot, 0.01)
    drafting = [len(step(pair, warm, 0.01)) for _ in range(FEW + PAUSE)]
    assert drafting == [1] * FEW + [0] * PAUSE


def test_a_kind_that_was_never_seen_is_tried_among_others_once() -> None:
    pair, crowd = pair_of(COSTS), [state_of(1 << 18, temperature=1.0) for _ in range(200)]
    for _ in range(8 * PAUSE):
        step(pair, crowd, 0.3)
    while pair.outlook._idle > 4:  # a pause has just begun
        step(pair, crowd, 0.3)
    drafting = [len(step(pair, [*crowd, state_of(1 << 18)], 0.3)) for _ in range(PAUSE)]
    assert drafting == [FEW] + [0] * (PAUSE - 1)


def test_a_trial_that_waits_in_vain_goes_on() -> None:
    """Those who tried ended before their blocks were read."""
    outlook, asked = Outlook(), []
    company = Company({"greedy": 256}, BLOCK, COSTS.at(256), 1e9, True)
    for _ in range(12):
        asked.append(outlook.admit((), 256, lambda: company))
    assert asked.count(FEW) >= 2
    assert sum(asked) <= 12 * FEW // 3


@pytest.mark.parametrize("requests", [1, 64])
def test_one_good_block_does_not_end_a_pause(requests: int) -> None:
    pair = pair_of(COSTS)
    states = [state_of(1 << 19) for _ in range(requests)]
    source = random.Random(1)
    while step(pair, states, 0.02):
        pass
    seen = 0
    for _ in range(1000):
        seen += len(step(pair, states, 0.9 if requests == 1 and source.random() < 0.04 else 0.02))
        assert not pair.outlook.is_open
    assert seen


def test_requests_that_decode_apart_leave_the_others_their_pauses_and_trials() -> None:
    """One that takes no captured steps drafts all the time; the crowd still finds out that its text got easier."""
    pair = pair_of(COSTS)
    crowd = [state_of(1 << 18) for _ in range(200)]
    alone = [state_of(1 << 18, temperature=1.0)]
    drafting = []
    for number in range(300):
        apart = intend_all(alone, "compact", pair, "logprobs")
        learn_blocks(pair, alone, [survivals(0.9)[: intent.draft_len] for intent in apart], "logprobs")
        drafting.append(len(step(pair, crowd, 0.3 if number < 150 else 0.95)))
        assert apart[0].draft_len == BLOCK
    assert set(drafting[:150]) == {0, FEW}
    assert drafting[0] == drafting[1 + 2 * PAUSE] == FEW
    assert drafting[-1] == 200


# What was seen


def test_a_sample_follows_what_is_drafted_and_fades_by_blocks() -> None:
    recent = RecentBlocks()
    before = recent.expected("warm", 3)
    recent.add("warm", [[0.1, 0.0, 0.0]])
    assert 0.5 * before[0] < recent.expected("warm", 3)[0] < before[0]  # one block says little
    for _ in range(100):
        recent.add("warm", [[0.1, 0.05, 0.0]])
    assert recent.expected("warm", 3) == pytest.approx((0.1, 0.05, 0.0), abs=0.03)
    recent.add("warm", [[0.9, 0.8, 0.7]] * 256)
    assert recent.expected("warm", 3) == pytest.approx((0.9, 0.8, 0.7), abs=0.01)
    # Another kind is not this one, until it is known itself.
    assert recent.expected("hot", 3) == recent.expected("warm", 3)
    recent.add("hot", [[0.2, 0.1, 0.1]] * 256)
    assert recent.expected("hot", 1)[0] < 0.3 < recent.expected("warm", 1)[0]
    mixed = recent.sample({"hot": 1, "warm": 1}, 3, 100).mean(axis=0)
    assert mixed[0] == pytest.approx(0.55, abs=0.05)


def test_blocks_of_different_lengths_make_one_sample() -> None:
    recent = RecentBlocks()
    recent.replace("greedy", [[0.8], [0.8, 0.6, 0.4]])
    found = recent.sample({"greedy": 1}, 5, 2)
    assert found.shape[1] == 5
    assert (found[:, 1:] <= found[:, :-1]).all()
    assert recent.expected("greedy", 1) == pytest.approx((0.8,))


def test_short_blocks_say_nothing_of_what_lies_behind_them() -> None:
    """Requests that verify one draft each, as an arm of a bench: for the others drafting still pays."""
    pair, crowd = pair_of(COSTS), [state_of(1 << 19) for _ in range(128)]
    for length in (BLOCK, 1, 1, 1):
        learn_blocks(pair, crowd, [survivals(0.9, length)] * 128)
    assert pair.outlook.recent.expected("greedy", BLOCK) == pytest.approx(survivals(0.9), rel=0.03)
    assert len(step(pair, crowd, 0.9)) == 128
    hopeless = RecentBlocks()
    for rows in ([[0.0] * 3] * 300, [[0.5], [0.0]], [[0.5, 0.4], [0.9, 0.8, 0.7]]):
        hopeless.add("greedy", rows)
    assert hopeless.sample({"greedy": 1}, 5, 4).shape == (32, 5)


@pytest.mark.parametrize("requests", [1, 4, 32])
def test_a_forecast_is_what_the_planner_will_choose(requests: int) -> None:
    recent, source = RecentBlocks(), random.Random(4)
    rows = [[a * b for b in survivals(0.9)] for a in (source.random() for _ in range(32))]
    recent.replace("greedy", rows)
    blocks, cost = recent.sample({"greedy": requests}, BLOCK, requests), COSTS.at(requests)
    groups = [blocks[i :: 32 // requests].tolist() for i in range(32 // requests)]
    lagged = choose_budget(groups[0], cost, older=groups[1:]).predicted_theta
    assert forecast_theta(blocks, requests, cost, is_lagged=True) == pytest.approx(lagged)
    plans = [plan(group, [BLOCK] * requests, cost) for group in groups]
    tokens = sum(p.predicted_theta * p.predicted_ms for p in plans)  # type: ignore[operator]
    early = tokens / sum(p.predicted_ms for p in plans)  # type: ignore[misc]
    assert forecast_theta(blocks, requests, cost, is_lagged=False) == pytest.approx(early)


@pytest.mark.parametrize("requests", [12, 17, 20, 31, 40])
def test_a_forecast_looks_at_all_of_a_sample_whatever_its_order(requests: int) -> None:
    """Old blocks come first in it, and one kind before the other: no end of it may be left out."""
    cost, size = COSTS.at(requests), max(32, requests)
    poor, rich = [survivals(0.3)] * (size // 2), [survivals(0.9)] * (size // 2)
    blocks = torch.tensor([*poor, *rich], dtype=torch.float64).numpy()
    before = blocks.copy()
    found = [forecast_theta(order, requests, cost, is_lagged=True) for order in (blocks, blocks[::-1])]
    assert found[0] == pytest.approx(found[1], rel=0.15)  # one block more of either
    assert (blocks == before).all()


# The law


def law_of_two_rounds(source: random.Random, is_late: bool) -> float:
    """Distance of the joint law of two rounds from the targets', by enumeration: whether the second round drafts, and
    by which budget, follows from the first. ``is_late`` False: from its own drafts, the mistake."""
    first, second, cost = Chain(source), Chain(source), cliffed_cost(source, 1)
    blocks = list(itertools.product(range(VOCAB), repeat=WIDTH))
    plain_theta = source.uniform(0.9, 1.3) * 1000.0 / cost.step_ms(1)

    def length(chain: Chain, drawn: tuple[int, int], shown: Sequence[float]) -> int:
        recent = RecentBlocks()
        recent.replace("hot", [shown])
        if forecast_theta(recent.sample({"hot": 1}, WIDTH, 1), 1, cost.at(1), is_lagged=True) < plain_theta:
            return 0
        budget = choose_budget([recent.expected("hot", WIDTH)], cost.at(1))
        return admit([chain.survival(drawn)], [WIDTH], budget.drafts)[0]

    joint = torch.zeros((VOCAB,) * 4, dtype=torch.float64)
    for drawn in blocks:
        shown = first.survival(drawn)
        before = first.block_law(drawn) * first.output_law(drawn, WIDTH)
        for other in blocks:
            after = second.output_law(other, length(second, other, shown if is_late else second.survival(other)))
            joint += torch.einsum("ab,cd->abcd", before, second.block_law(other) * after)
    wanted = torch.einsum("ab,cd->abcd", first.target_law(), second.target_law())
    return float((joint - wanted).abs().sum()) / 2


def test_pausing_by_blocks_of_the_past_keeps_the_law_by_enumeration() -> None:
    source = random.Random(6)
    assert max(law_of_two_rounds(source, is_late=True) for _ in range(25)) < 1e-12


def test_pausing_by_the_block_itself_would_be_noticed() -> None:
    source = random.Random(6)
    assert max(law_of_two_rounds(source, is_late=False) for _ in range(25)) > 0.01


# In the engine


CROWD = 12
BY_CROWD = CostTable(
    (1, 6),
    (1.0, 1.01),
    "measured",
    1.0,
    (
        BatchCosts(1, (1, 6), (1.0, 1.01), 1.0),
        BatchCosts(2, (2, 12), (1.0, 1.02), 1.0),
        BatchCosts(CROWD, (CROWD, 6 * CROWD), (20.0, 60.0), 1.5),
    ),
    False,
)
"""Alone drafting costs nothing; among twelve it takes more than it can bring."""


@pytest.mark.parametrize("graphs", [None, True])
def test_requests_of_an_engine_begin_paused_among_many_and_draft_alone(graphs: bool | None, tiny_pair: Any) -> None:
    runner = open_runner(
        tiny_pair.target, tiny_pair.drafter, cost=BY_CROWD, concurrency=CROWD, context=200, graphs=graphs
    )
    prompts = random_prompts(CROWD, 20, seed=3)
    shared: dict[str, Any] = {"mode": "compact", "max_tokens": 12, "ignore_eos": True}
    lines = [{"prompt_ids": prompt, **shared} for prompt in prompts]
    plain = runner.ids([{**line, "mode": "off"} for line in lines])
    for _ in range(2):
        outcomes = runner.watch(lines)
        assert [outcome.ids for outcome in outcomes] == plain
    # The second crowd knows what the first found out: nobody drafts, from the first step on, while all decode.
    together = [outcome.steps[0] for outcome in outcomes]
    assert {(step["fallback"], len(step["draft_ids"])) for step in together} == {(REASON_DOES_NOT_PAY, 0)}
    (alone,) = runner.watch(lines[:1])
    assert alone.ids == plain[0]
    assert all(step["draft_ids"] for step in alone.steps[:-1])
    # A seed of one's own is a plan of one's own, whatever the crowd does.
    mine = {**lines[0], "temperature": 1.0, "seed": 5}
    (before,) = runner.watch([mine])
    among = runner.watch([mine, *lines[1:]])[0]
    for name in ("committed_ids", "draft_ids", "verify_len", "fallback"):
        assert [step[name] for step in among.steps] == [step[name] for step in before.steps]


def test_captured_steps_try_drafting_again_beside_a_request_that_drafts_apart(tiny_pair: Any) -> None:
    batches = BatchCosts(1, (1, 6), (1.0, 1.01), 1.0), BatchCosts(2, (2, 12), (20.0, 60.0), 1.5)
    cost = CostTable((1, 6), (1.0, 1.01), "measured", 1.0, batches, False)
    runner = open_runner(tiny_pair.target, tiny_pair.drafter, cost=cost, concurrency=3, context=200, graphs=True)
    asked = {"mode": "compact", "max_tokens": 2 * PAUSE + 16, "ignore_eos": True}
    lines = [{"prompt_ids": prompt, **asked} for prompt in random_prompts(3, 20, seed=3)]
    apart, *captured = runner.watch([{**lines[0], "max_tokens": 180, "repetition_penalty": 1.1}, *lines[1:]])
    assert all(step["draft_ids"] for step in apart.steps[:30])
    # Of their kind nothing is known: the first trial is due at once, the next behind a pause twice as long.
    for outcome in captured:
        drafting = [step["i"] for step in outcome.steps if step["draft_ids"]]
        assert drafting and 2 * PAUSE - 5 < drafting[-1] < 2 * PAUSE + 16
        assert len(drafting) < 14


def test_steps_that_are_waited_for_try_drafting_again(tiny_pair: Any) -> None:
    """Where somebody is set aside before every step, no step is launched behind another."""
    runner = open_runner(tiny_pair.target, tiny_pair.drafter, cost=ALONE, concurrency=1, context=200, graphs=True)
    engine = runner.engine
    line: dict[str, Any] = {"prompt_ids": [301, 302], "mode": "compact", "ignore_eos": True}
    engine.submit(to_request({**line, "max_tokens": 2 * FEW + 2 * PAUSE + 8}, 0))
    events: list[dict[str, Any]] = []
    while engine.has_work:
        events += engine.step()
        events += engine._captured.settle(engine.mode)  # type: ignore[union-attr]
        engine._retire()
    drafting = [event["i"] for event in events if event["event"] == "step" and event["draft_ids"]]
    assert len([i for i in drafting if i < FEW + 4]) >= FEW
    assert len([i for i in drafting if i > 2 * PAUSE]) >= FEW - 2


ALONE = CostTable((1, 6), (10.0, 60.0), "measured", 1.0, (BatchCosts(1, (1, 6), (10.0, 60.0), 1.0),), False)
"""Drafting is never worth it."""


@pytest.mark.parametrize("graphs", [None, True])
def test_the_next_answer_of_an_engine_waits_no_longer_than_for_a_first_trial(
    graphs: bool | None, tiny_pair: Any
) -> None:
    runner = open_runner(tiny_pair.target, tiny_pair.drafter, cost=ALONE, concurrency=1, context=200, graphs=graphs)
    line: dict[str, Any] = {"prompt_ids": [301, 302], "mode": "compact", "ignore_eos": True}
    (first,) = runner.watch([{**line, "max_tokens": FEW + 12}])
    tried = [bool(step["draft_ids"]) for step in first.steps]
    assert tried[0] and not tried[-1]
    assert runner.engine.pair.outlook._pause > PAUSE
    (second,) = runner.watch([{**line, "max_tokens": PAUSE + 8}])
    assert [bool(step["draft_ids"]) for step in second.steps].index(True) == PAUSE
