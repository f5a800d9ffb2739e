"""Simulated acceptance: the chances are the profile's, the confidences know them, and every record says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, random_prompts, to_request
from fixtures.shapes import write_shapes
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.engine import Engine
from sparkchat.engine.simulated import spread_chances
from sparkchat.errors import UsageError
from sparkchat.params import CostTable, LoadSpec
from sparkchat.simulation import BUILT_IN, acceptance_of_length, exponent_of, parse_simulation


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = write_shapes(tmp_path_factory.mktemp("shapes"))
    spec = LoadSpec(
        "shapes",
        str(folder),
        str(folder / "drafter"),
        device="cpu",
        dtype="float32",
        context=700,
        concurrency=8,
        dummy_weights=True,
        simulate_acceptance="chat",
    )
    return Runner(Engine(spec))


def test_acceptance_by_position_is_the_profiles(simulated: Runner) -> None:
    lines = [
        {"prompt_ids": prompt, "mode": "static", "max_tokens": 600, "ignore_eos": True, "temperature": n % 2, "seed": n}
        for n, prompt in enumerate(random_prompts(8, 20))
    ]
    outcomes = simulated.watch(lines)
    steps = [step for outcome in outcomes for step in outcome.steps[:-1]]
    assert len(steps) > 1000
    for k, mean in enumerate(BUILT_IN["chat"]):
        tested = [s for s in steps if s["correct_drafts"] >= k]
        passed = sum(s["correct_drafts"] > k for s in tested) / len(tested)
        assert abs(passed - mean) < 4.5 * (mean * (1 - mean) / len(tested)) ** 0.5
        sure, unsure = ([s for s in tested if (s["confidence"][k] > mean) == above] for above in (True, False))
        assert sum(s["correct_drafts"] > k for s in sure) / len(sure) > sum(
            s["correct_drafts"] > k for s in unsure
        ) / len(unsure)


@pytest.mark.parametrize("mean", [0.02, 0.3, 0.735, 0.9, 0.99])
def test_chances_of_a_position_have_the_profiles_mean(mean: float) -> None:
    middles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    drawn = spread_chances(torch.tensor([exponent_of(mean)], dtype=torch.float64), middles[:, None])
    assert float(drawn.mean()) == pytest.approx(mean, abs=2e-5)
    assert float(drawn.min()) >= 0.0 and float(drawn.max()) <= 1.0


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_chances_that_are_certain_stay_certain(mean: float) -> None:
    drawn = spread_chances(torch.tensor([exponent_of(mean)], dtype=torch.float64), torch.tensor([[0.0], [0.3], [0.9]]))
    assert drawn[1:, 0].tolist() == pytest.approx([mean, mean])


def test_confidences_tell_as_much_as_those_that_were_published() -> None:
    """arXiv 2607.05147, figure 6: 0.85 in the mean of positions 1, 3, 5, 7, of which this law has 0.82."""
    generator = torch.Generator().manual_seed(5)
    size = (40_000, 7)
    exponents = torch.tensor([exponent_of(mean) for mean in BUILT_IN["chat"]], dtype=torch.float64)
    drawn = spread_chances(exponents, torch.rand(size, generator=generator, dtype=torch.float64))
    survives = (torch.rand(size, generator=generator, dtype=torch.float64) < drawn).cumprod(dim=1).bool()
    areas = []
    for k in (0, 2, 4, 6):
        ranks = drawn.cumprod(dim=1)[:, k].argsort().argsort().double()
        num = int(survives[:, k].sum())
        areas.append(float((ranks[survives[:, k]].sum() - num * (num - 1) / 2) / (num * (size[0] - num))))
    assert areas == pytest.approx([0.862, 0.806, 0.801, 0.806], abs=0.015)
    # Figure 5, chat: cut at the first draft below a threshold, where 5.1 rows of 8 are left, so are 91 % of the tokens.
    kept = (drawn >= 0.4).cumprod(dim=1)
    assert 1.0 + float(kept.sum(dim=1).double().mean()) == pytest.approx(5.13, abs=0.05)
    tokens = 1.0 + float((survives & kept.bool()).sum(dim=1).double().mean())
    assert tokens / (1.0 + float(survives.sum(dim=1).double().mean())) == pytest.approx(0.91, abs=0.01)


def test_every_record_says_that_it_is_simulated(simulated: Runner) -> None:
    (outcome,) = simulated.watch([{"prompt_ids": [301], "max_tokens": 9, "ignore_eos": True}])
    assert {step["simulated"] for step in outcome.steps} == {"chat"}
    assert outcome.result["speculation"]["simulated"] == "chat"
    assert simulated.engine.info["simulated"]["profile"] == "chat"
    assert any("simulated" in sentence for sentence in simulated.engine.info["notices"])
    assert any("random" in sentence for sentence in simulated.engine.info["notices"])


def batch_steps(engine: Engine, lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps of all requests as wholes, and request by request."""
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        events += engine.submit(to_request(line, number))
    while engine.has_work:
        events += engine.step()
    return [[event for event in events if event["event"] == kind] for kind in ("batch_step", "step")]  # type: ignore[return-value]


@pytest.mark.parametrize("is_captured", [False, True])
def test_whole_steps_are_told_with_what_their_chances_promise(simulated: Runner, is_captured: bool) -> None:
    cost = CostTable((8, 24, 64), (10.0, 12.0, 30.0))
    engine = simulated.engine if not is_captured else Engine(replace(simulated.engine.spec, graphs=True))
    engine.pair.cost = CostLookup(cost)
    engine.measure_together(True)
    try:
        for mode in ("off", "static", "compact", "cap-accept"):
            lines = [
                {"prompt_ids": prompt, "mode": mode, "max_tokens": 32, "ignore_eos": True, "temperature": 0.0}
                for prompt in random_prompts(8, 20)
            ]
            wholes, steps = batch_steps(engine, lines)
            assert wholes[0]["requests"] == 8, "nobody decodes while prompts are read"
            assert sum(whole["requests"] for whole in wholes) == len(steps)
            for name, field in (("verified", "verify_len"), ("accepted", "correct_drafts")):
                assert sum(whole[name] for whole in wholes) == sum(step[field] for step in steps)
            assert sum(whole["tokens"] for whole in wholes) == 8 * 31
            assert (wholes[0]["predicted_step_ms"] is None) == (mode != "compact")
            kept = [whole for whole in wholes if not whole["limited"]]
            assert kept and (len(kept) < len(wholes)) == (mode != "off")
            accepted = sum(whole["accepted"] for whole in kept)
            expected, of_block, of_profile = map(sum, zip(*(whole["expected"] for whole in kept), strict=True))
            drafted = sum(whole["proposed"] for whole in kept) / 7
            assert of_profile == pytest.approx(drafted * (parse_simulation("chat").acceptance_length - 1.0))
            assert abs(of_block - of_profile) < 0.25 * of_profile or mode == "off"
            # A step's drafts pass with a spread of 2.3 at most.
            assert abs(accepted - expected) < 4 * 2.3 * max(1.0, drafted) ** 0.5
            if mode == "cap-accept":
                assert expected < 0.9 * of_block, "the plan capped what may be taken"
                assert sum(whole["verified"] for whole in kept) == 7 * drafted
            elif mode == "compact":
                assert sum(whole["verified"] for whole in kept) < 7 * drafted
            else:
                assert expected == pytest.approx(of_block)
    finally:
        engine.measure_together(False)
    assert batch_steps(engine, lines[:1])[0] == []


def test_the_same_seed_gives_the_same_run(simulated: Runner) -> None:
    line: dict[str, Any] = {"prompt_ids": [301, 302], "max_tokens": 60, "temperature": 1.0, "seed": 5}
    assert simulated.ids([line]) == simulated.ids([line])


def test_profiles_are_read_from_lists_and_files(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"survivals": [0.8, 0.4]}))
    for text in ("0.8,0.4", "[0.8, 0.4]", str(path)):
        assert parse_simulation(text).conditional == pytest.approx((0.8, 0.5))
    assert parse_simulation("math").acceptance_length == pytest.approx(5.56, abs=0.02)
    assert acceptance_of_length(3.72, 7).acceptance_length == pytest.approx(3.72)


@pytest.mark.parametrize("text", ["nothing", "", "0.5,0.6", "1.5", "0.5,nan"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--simulate-acceptance"):
        parse_simulation(text)


def test_a_profile_shorter_than_the_block_is_refused(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path)
    settings = {"device": "cpu", "dtype": "float32", "dummy_weights": True, "simulate_acceptance": "0.9,0.8"}
    with pytest.raises(UsageError, match="2 survivals for blocks of 7"):
        Engine(LoadSpec("shapes", str(folder), str(folder / "drafter"), **settings))  # type: ignore[arg-type]
