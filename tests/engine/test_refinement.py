"""Refinement by finished steps: drifts are followed within bounds, tokens and laws stay what they were."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.harness import Runner, open_runner, random_prompts, varied_cost
from engine.chains import VOCAB, WIDTH, Chain, cliffed_cost
from sparkchat.engine.correction import learn, planning_costs
from sparkchat.engine.cost_table import CostLookup, table_of
from sparkchat.engine.planner import plan
from sparkchat.engine.refinement import (
    MOST_FACTOR,
    MOST_SHIFT,
    JudgedBlock,
    RefinedConfidences,
    RefinedCosts,
    Refinement,
)
from sparkchat.engine.request import RequestState
from sparkchat.params import BatchCosts, ContextCosts, Correction, CostTable, GenerateRequest, SamplingParams

NOTHING = Correction((1.0, 1.0), (0.0, 0.0))


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def block(logits: list[float], accepted: int, judged: int = 2, before: Correction = NOTHING) -> JudgedBlock:
    return JudgedBlock("warm", before, logits, judged, accepted)


def drawn_block(source: random.Random, off_by: tuple[float, float]) -> JudgedBlock:
    """Confidences that are too low by ``off_by``, position by position."""
    logits = [source.gauss(0.0, 1.5) for _ in off_by]
    passes = [source.random() < sigmoid(z + shift) for z, shift in zip(logits, off_by, strict=True)]
    return block(logits, next((k for k, passed in enumerate(passes) if not passed), len(passes)))


# Confidences


def test_a_drift_of_the_confidences_is_followed_and_left_again() -> None:
    source, found = random.Random(3), RefinedConfidences()
    for _ in range(3000):
        found.observe(drawn_block(source, (0.6, -0.5)))
    assert found.shifts("warm", 2) == pytest.approx((0.6, -0.5), abs=0.25)
    assert found.shifts("hot", 2) == (0.0, 0.0)
    for _ in range(5000):
        found.observe(drawn_block(source, (-0.4, 0.0)))
    assert found.shifts("warm", 3) == pytest.approx((-0.4, 0.0, 0.0), abs=0.25)


def test_refined_confidences_come_nearer_to_what_is_accepted() -> None:
    source, found = random.Random(5), RefinedConfidences()
    errors = {"raw": 0.0, "refined": 0.0}
    for n in range(6000):
        one = drawn_block(source, (0.7, 0.7))
        if n >= 2000:
            shift = found.shifts("warm", 2)[0]
            errors["raw"] += (one.accepted > 0) - sigmoid(one.logits[0])
            errors["refined"] += (one.accepted > 0) - sigmoid(one.logits[0] + shift)
        found.observe(one)
    assert abs(errors["refined"]) < 0.35 * abs(errors["raw"])


def test_a_shift_has_bounds_and_needs_evidence() -> None:
    found = RefinedConfidences()
    found.observe(block([-3.0, -3.0], 2))
    assert 0.0 < found.shifts("warm", 1)[0] < 0.1
    for _ in range(5000):
        found.observe(block([-3.0, -3.0], 2))
    assert found.shifts("warm", 2) == (MOST_SHIFT, MOST_SHIFT)
    for _ in range(20000):
        found.observe(block([3.0, 3.0], 0))
    assert found.shifts("warm", 1) == (-MOST_SHIFT,)


def test_only_what_was_judged_counts() -> None:
    found = RefinedConfidences()
    for _ in range(400):
        found.observe(block([1.0, 1.0], 0, judged=0))
    assert found.shifts("warm", 2) == (0.0, 0.0)
    for _ in range(400):
        found.observe(block([1.0, 1.0], 0, judged=2))  # the second draft was never reached
    assert found.shifts("warm", 2)[0] < -0.5
    assert found.shifts("warm", 2)[1] == 0.0
    found.observe(block([math.nan, 1.0], 0))
    found.observe(block([math.inf, 1.0], 1))
    assert all(map(math.isfinite, found.shifts("warm", 2)))


def test_a_shift_is_on_top_of_what_was_fitted() -> None:
    source, found, fitted = random.Random(8), RefinedConfidences(), Correction((2.0, 1.0), (0.3, -0.2))
    for _ in range(4000):
        z = source.gauss(0.0, 2.0)
        found.observe(block([z, 0.0], int(source.random() < sigmoid(z / 2.0 + 0.3 + 0.5)), judged=1, before=fitted))
    corrected = found.corrected("warm", fitted)
    assert corrected.temperatures == fitted.temperatures
    assert corrected.shifts[0] == pytest.approx(0.8, abs=0.2)
    assert corrected.shifts[1] == -0.2


# Costs


def measured() -> CostLookup:
    batches = [
        BatchCosts(1, (1, 2, 3, 4), (10.0, 11.0, 12.0, 13.0), plain_ms=9.0),
        BatchCosts(2, (2, 4, 6, 8), (14.0, 16.0, 18.0, 20.0), plain_ms=13.0),
    ]
    return CostLookup(table_of(batches, pads_up=False, context=ContextCosts(0, 0.01)))


def test_a_drift_of_the_costs_is_followed() -> None:
    """A second process takes half of the machine: rows beyond the second cost twice as much."""
    table = measured()
    costs = RefinedCosts(table)
    for n in range(600):
        rows = 1 + n % 4
        costs.observe(1, rows, 0, table.step_ms(rows) * (1.0 if rows <= 2 else 1.6))
    now = costs.now.at(1)
    assert now.step_ms(2) == pytest.approx(11.0, rel=0.05)
    assert now.step_ms(4) == pytest.approx(13.0 * 1.6, rel=0.05)
    assert costs.now.table.source == "refined"
    # What is planned changes with it.
    alive = [[0.9, 0.5, 0.4]]
    assert plan(alive, [3], table.at(1)).verify_lens[0] > plan(alive, [3], now).verify_lens[0]
    # And comes back with the machine.
    for n in range(3000):
        costs.observe(1, 1 + n % 4, 0, table.step_ms(1 + n % 4))
    assert costs.now.step_ms(4) == pytest.approx(13.0, rel=0.05)


def test_rows_and_requests_that_no_step_met_go_with_the_others() -> None:
    table = measured()
    costs = RefinedCosts(table)
    for _ in range(300):
        costs.observe(1, 2, 0, 11.0 * 1.5)
    assert costs.now.at(1).step_ms(4) == pytest.approx(13.0 * 1.5, rel=0.06)
    assert costs.now.at(1).plain_ms == pytest.approx(9.0 * 1.5, rel=0.06)
    assert costs.now.at(2).step_ms(8) == pytest.approx(20.0 * 1.5, rel=0.06)
    assert costs.factor(1) == pytest.approx(1.5, rel=0.06)
    for _ in range(600):
        costs.observe(1, None, 0, 9.0)
    assert costs.now.at(1).plain_ms == pytest.approx(9.0, rel=0.03)


def test_lengths_that_no_plan_chose_lie_on_the_line_of_the_others() -> None:
    table = measured()
    costs = RefinedCosts(table)
    for n in range(600):
        costs.observe(1, 1 + n % 2, 0, (10.0, 11.0 * 1.25)[n % 2])
    now = costs.now.at(1)
    assert now.step_ms(1) == pytest.approx(10.0, rel=0.03)
    assert 13.0 * 1.25 < now.step_ms(4) <= 13.0 * MOST_FACTOR


def test_costs_have_bounds_and_one_slow_step_says_little() -> None:
    table = measured()
    costs = RefinedCosts(table)
    for n in range(64):
        costs.observe(1, 2, 0, 11.0 if n else 1e6)
    assert costs.now.step_ms(2) == pytest.approx(11.0, rel=0.05)
    for _ in range(2000):
        costs.observe(1, 2, 0, 1e6)
    assert costs.now.step_ms(2) == pytest.approx(11.0 * MOST_FACTOR, rel=0.01)
    for _ in range(4000):
        costs.observe(1, 2, 0, 1e-6)
    assert costs.now.step_ms(2) >= 11.0 / MOST_FACTOR
    costs.observe(1, 2, 0, 0.0)  # a clock that did not move


def test_context_is_no_drift() -> None:
    table = measured()
    costs = RefinedCosts(table)
    for _ in range(200):
        costs.observe(1, 2, 500, table.at(1, 500).step_ms(2))
    assert costs.now.at(1, 500).step_ms(2) == pytest.approx(16.0)


def test_what_filters_take_is_no_drift() -> None:
    """Plans add it to the refined times, as to the measured ones."""
    batch = BatchCosts(1, (1, 2, 4), (10.0, 11.0, 14.0), 9.0, filtered_ms=3.0)
    table = CostLookup(table_of([batch], pads_up=False))
    pair = SimpleNamespace(refinement=Refinement(), cost=table, calibration={}, temperatures=None, block_size=2)
    request = GenerateRequest("r", prompt_ids=(1,), sampling=SamplingParams(temperature=1.0, top_p=0.9))
    state = RequestState(request, (1,), 2, 100, 0, output=None, history=None, tokens=[1, 2])
    for _ in range(200):
        learn(pair, [state], [2], [1], [[]], [0], 11.0 + 3.0)  # type: ignore[arg-type]
    found = planning_costs(pair, False)  # type: ignore[arg-type]
    assert found is not None and found is not table
    assert found.at(1, is_filtered=True).step_ms(2) == pytest.approx(14.0)


def test_a_profiles_table_stays_as_the_user_wrote_it() -> None:
    table = CostLookup(CostTable((1, 2), (1.0, 2.0)))
    costs = RefinedCosts(table)
    for _ in range(200):
        costs.observe(1, 2, 0, 9.0)
    assert costs.now is table


def test_another_table_begins_anew() -> None:
    refinement, table = Refinement(), measured()
    for _ in range(64):
        refinement.observe([], table, 1, 2, 0, 22.0)
    assert refinement.costs_for(table).now.step_ms(2) > 15.0
    again = measured()
    assert refinement.costs_for(again).now is again


# The output law


def law_of_two_rounds(chains: tuple[Chain, Chain], cost: CostLookup, is_late: bool) -> torch.Tensor:
    """Joint law of two tokens each of two rounds, by enumeration; the second is planned by what the first showed.

    ``is_late`` False: each round is refined by its own outcome before it is planned, the mistake.
    """
    joint = torch.zeros((VOCAB,) * 4, dtype=torch.float64)
    blocks = list(itertools.product(range(VOCAB), repeat=WIDTH))
    first, second = chains

    def length(chain: Chain, drawn: tuple[int, int], refinement: RefinedConfidences) -> int:
        logits = confidence(chain, drawn)
        shifts = refinement.shifts("warm", WIDTH)
        alive = list(itertools.accumulate((sigmoid(z + s) for z, s in zip(logits, shifts, strict=True)), _times))
        return plan([alive], [WIDTH], cost).verify_lens[0]

    for drawn in blocks:
        judged = length(first, drawn, RefinedConfidences())
        for accepted in range(judged + 1):
            outcome = outcome_law(first, drawn, judged, accepted)
            if float(outcome.sum()) == 0.0:
                continue
            shown = RefinedConfidences()
            for _ in range(60):
                shown.observe(block(confidence(first, drawn), accepted, judged))
            for other in blocks:
                known = shown
                if not is_late:
                    known = RefinedConfidences()
                    for _ in range(60):
                        known.observe(block([0.0, 0.0], int(other[0] == 0) * WIDTH))
                after = second.output_law(other, length(second, other, known))
                joint += first.block_law(drawn) * second.block_law(other) * outcome[..., None, None] * after
    return joint


def _times(a: float, b: float) -> float:
    return a * b


def confidence(chain: Chain, drawn: tuple[int, int]) -> list[float]:
    overlaps = [sum(map(min, chain.p[drawn[:k]], chain.q[drawn[:k]])) for k in range(WIDTH)]
    return [math.log(c / max(1e-9, 1.0 - c)) for c in overlaps]


def outcome_law(chain: Chain, drawn: tuple[int, int], length: int, accepted: int) -> torch.Tensor:
    """Law of two tokens together with exactly ``accepted`` of ``length`` verified drafts being kept."""
    rates = [min(1.0, chain.p[drawn[:k]][drawn[k]] / chain.q[drawn[:k]][drawn[k]]) for k in range(length)]
    weight = math.prod(rates[:accepted])
    out = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    if accepted == length:
        chain._finish(out, drawn[:length], weight)
        return out
    p, q = chain.p[drawn[:accepted]], chain.q[drawn[:accepted]]
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    if rates[accepted] < 1.0:
        for token in range(VOCAB):
            chain._finish(out, (*drawn[:accepted], token), weight * (1 - rates[accepted]) * rest[token] / sum(rest))
    return out


def distance(seed: int, is_late: bool) -> float:
    source = random.Random(seed)
    chains, cost = (Chain(source), Chain(source)), cliffed_cost(source, 1)
    wanted = torch.einsum("ab,cd->abcd", chains[0].target_law(), chains[1].target_law())
    return float((law_of_two_rounds(chains, cost, is_late) - wanted).abs().sum()) / 2


def test_the_law_of_two_rounds_is_the_targets_by_enumeration() -> None:
    assert max(distance(seed, is_late=True) for seed in range(25)) < 1e-12


def test_refining_by_the_drafts_being_planned_would_be_noticed() -> None:
    assert max(distance(seed, is_late=False) for seed in range(25)) > 0.01


# In the engine


@pytest.fixture(scope="module")
def refined(tiny_pair: Any) -> Runner:
    table = varied_cost()
    batches = [BatchCosts(1, table.rows, table.step_ms, plain_ms=table.step_ms[0])]
    cost = table_of(batches, pads_up=True)
    return open_runner(tiny_pair.target, tiny_pair.drafter, cost=cost, concurrency=4, context=512, refine=True)


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    given = {"mode": "compact", "max_tokens": 40, "ignore_eos": True, **more}
    return [{"prompt_ids": prompt, **given} for prompt in random_prompts(count, 24, seed=9)]


def test_greedy_tokens_are_those_of_plain_decoding_and_the_trace_tells_of_it(refined: Runner) -> None:
    assert refined.engine.info["refine"] is True
    plain = refined.ids(lines(4, mode="off"))
    outcomes = refined.watch(lines(4))
    assert [outcome.ids for outcome in outcomes] == plain
    told = [step["refined"] for outcome in outcomes for step in outcome.steps if step["draft_ids"]]
    assert all(len(one["shifts"]) == 5 for one in told)
    # Nearly every draft of this pair is refused, so confidences go down; its steps are nothing like the table's.
    assert told[-1]["shifts"][0] < 0.0
    assert told[-1]["cost_factor"] != 1.0
    pair = refined.engine.pair
    assert planning_costs(pair, is_reproducible=False) is not pair.cost


def test_a_seed_gives_the_same_tokens_whatever_was_learned(refined: Runner, tiny: Runner) -> None:
    mine = lines(1, temperature=0.9, seed=5)
    first = refined.watch(mine)[0]
    refined.run(lines(4, temperature=0.9))
    second = refined.watch([*lines(3, temperature=0.9, max_tokens=20)[1:], *mine])[2]
    assert second.ids == first.ids
    assert [s["verify_len"] for s in second.steps] == [s["verify_len"] for s in first.steps]
    assert [s["refined"] for s in second.steps] == [None] * len(second.steps)
    assert all(s["refined"] is None for s in tiny.watch(lines(1))[0].steps)  # off unless asked for


def test_corrections_of_a_kind_come_before_temperatures(tiny_pair: Any) -> None:
    own = Correction((2.0,) * 5, (0.5,) * 5)
    opened = open_runner(
        tiny_pair.target, tiny_pair.drafter, context=300, temperatures=(1.5,) * 5, calibration={"warm": own}
    )
    step = opened.watch(lines(1, temperature=0.7))[0].steps[0]
    raw = step["confidence_logit"]
    assert step["confidence"] == pytest.approx([sigmoid(z / 2.0 + 0.5) for z in raw])
    assert step["survival"] == pytest.approx(list(itertools.accumulate(step["confidence"], _times)))
    other = opened.watch(lines(1, temperature=1.0))[0].steps[0]
    assert other["confidence"] == pytest.approx([sigmoid(z / 1.5) for z in other["confidence_logit"]])
    assert opened.engine.info["calibration"] == {"warm": {"temperatures": (2.0,) * 5, "shifts": (0.5,) * 5}}
    assert opened.engine.info["refine"] is False
