"""Parts of captured steps: tiers, allocation, lagged budgets, laws, room."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch

from engine.test_captured import open_one
from sparkchat.engine.cache_plan import plan_caches
from sparkchat.engine.captured.allocation import allocate, survival_of
from sparkchat.engine.captured.laws import Draws, row_laws
from sparkchat.engine.captured.memory import GRAPHS_BYTES, fitting_cache, fitting_context
from sparkchat.engine.captured.tiers import request_tiers, round_up, row_tiers
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.lagged_plan import LAG, PAST_BLOCKS, StaleSurvival, admit, choose_budget
from sparkchat.engine.sampling import probabilities
from sparkchat.errors import NotEnoughMemory, UsageError
from sparkchat.params import CostTable, LoadSpec


def test_rows_are_exact_up_to_four_windows() -> None:
    tiers = row_tiers(7, 32)
    assert tiers[:32] == tuple(range(1, 33))
    assert tiers[-1] == 8 * 32
    assert list(tiers) == sorted(set(tiers))
    assert all(tier % 8 == 0 for tier in tiers[32:])
    assert row_tiers(7, 1) == tuple(range(1, 9))
    assert row_tiers(0, 3) == (1, 2, 3)
    assert request_tiers(1) == (1,)
    assert request_tiers(34)[-1] == 34
    assert round_up(33, tiers) == 40
    with pytest.raises(ValueError, match="largest"):
        round_up(257, tiers)


@pytest.mark.parametrize("seed", range(8))
def test_the_device_admits_what_the_host_would(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, width = 1 + seed, 5
    confidence = torch.randn(count, width, generator=generator) * 3
    confidence[torch.rand(count, width, generator=generator) < 0.2] = torch.inf  # ties
    survival = survival_of(confidence, torch.ones(width, dtype=torch.float64))
    limits = torch.randint(0, width + 1, (count,), generator=generator)
    sharing = torch.rand(count, generator=generator) < 0.8
    shared = [i for i in range(count) if sharing[i]]
    for budget in range(count * width + 1):
        found = allocate(survival, limits, sharing, torch.tensor([budget]))
        expected = admit([survival[i].tolist() for i in shared], [int(limits[i]) for i in shared], budget)
        assert [int(found[i]) for i in shared] == expected
        assert all(int(found[i]) == 0 for i in range(count) if i not in shared)


def test_what_is_no_number_survives_nothing() -> None:
    survival = survival_of(torch.tensor([[2.0, torch.nan, 2.0]]), torch.ones(3, dtype=torch.float64))
    assert survival[0, 0] > 0.8
    assert survival[0, 1:].tolist() == [0.0, 0.0]


def test_a_budget_is_the_best_of_all() -> None:
    """Against trying every budget, over jagged costs."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        count = int(torch.randint(1, 4, (1,), generator=generator))
        stale = torch.rand(count, 4, generator=generator).cumprod(dim=1).tolist()
        costs = (1.0 + torch.rand(20, generator=generator)).tolist()
        cost = CostLookup(CostTable(tuple(range(1, 21)), tuple(itertools.accumulate(costs, max))))
        pooled = sorted((v for row in stale for v in row), reverse=True)
        thetas = [(count + sum(pooled[:b])) / cost.step_ms(count + b) for b in range(len(pooled) + 1)]
        budget = choose_budget(stale, cost)
        assert thetas[budget.drafts] == pytest.approx(max(thetas))
        assert budget.predicted_theta == pytest.approx(1000.0 * max(thetas))
    assert choose_budget([[0.5, 0.2]], None).drafts == 2


def test_budgets_look_two_rounds_back() -> None:
    stale = StaleSurvival()
    assert stale.before(1, 3) == (1.0, 1.0, 1.0)
    for round_ in range(1, 9):
        stale.keep(round_, [round_ / 10.0, round_ / 20.0])
        assert len(stale.by_round) <= LAG + PAST_BLOCKS
    assert stale.before(9, 2) == (0.7, 0.35)
    assert stale.before(9, 3) == (0.7, 0.35, 0.35)
    assert stale.before(30, 2) == (1.0, 1.0)


@pytest.mark.parametrize("draws", [Draws.SAMPLED, Draws.FILTERED])
def test_laws_are_those_of_the_loop(draws: Draws) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 300, generator=generator) * 3
    logits[1] = logits[1].round()  # ties
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0, 0.5, 1.0])
    top_k = torch.tensor([0, 7, 40, 0, 300, 1], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.8, 0.95, 1.0, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.1, 0.0])
    if draws is Draws.SAMPLED:
        top_k, top_p, min_p = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p)
    found = row_laws(logits, temperature, top_k, top_p, min_p, draws)
    assert found is not None
    expected = probabilities(logits, temperature, top_k, top_p, min_p)
    for row in (0, 1, 2, 4, 5):
        assert torch.equal(found[row] > 0, expected[row] > 0)
        assert torch.allclose(found[row], expected[row], rtol=1e-5, atol=1e-8)
    assert row_laws(logits, temperature, top_k, top_p, min_p, Draws.GREEDY) is None


def test_a_row_without_filters_keeps_its_bits_beside_filtered_ones() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(2))
    settings = [torch.tensor(v) for v in ([0.8, 0.8], [0, 5], [1.0, 0.9], [0.0, 0.0])]
    plain = row_laws(logits, *settings, Draws.SAMPLED)
    mixed = row_laws(logits, *settings, Draws.FILTERED)
    assert plain is not None
    assert mixed is not None
    assert torch.equal(plain[0], mixed[0])
    assert int((mixed[1] > 0).sum()) <= 5


def test_a_context_is_cut_to_the_room_there_is() -> None:
    settings = {"rows": 4, "bytes_per_position": 1000, "law_bytes": 0, "name": "model"}
    free = GRAPHS_BYTES + 4 * 1000 * 5000
    assert fitting_context(None, 4096, free_bytes=free, **settings) == (4096, None)  # type: ignore[arg-type]
    context, notice = fitting_context(None, 40960, free_bytes=free, **settings)  # type: ignore[arg-type]
    assert context == 4864
    assert "40960" in str(notice)
    with pytest.raises(NotEnoughMemory, match="--context 4864"):
        fitting_context(6000, 40960, free_bytes=free, **settings)  # type: ignore[arg-type]
    with pytest.raises(NotEnoughMemory, match="no room"):
        fitting_context(None, 40960, free_bytes=0, **settings)  # type: ignore[arg-type]


def shared(asked: int | None, longest: int, limit: int | None, free: int | None) -> tuple[int, int, str | None]:
    sizes = {"sharers": 4, "behind": 24, "bytes_per_token": 1000, "fixed_bytes": 5000, "name": "model"}
    return fitting_cache(
        asked, longest, limit, free_bytes=None if free is None else GRAPHS_BYTES + 5000 + free, **sizes
    )


def test_more_requests_share_what_there_is_and_one_has_its_whole_context() -> None:
    whole = 4096 + 64
    assert shared(None, 4096, None, None) == shared(None, 4096, None, 10**9) == (4096, 4 * whole, None)
    assert shared(None, 4096, None, 1000 * (whole + 640)) == (4096, whole + 640, None)
    assert shared(None, 4096, None, 1000 * whole) == (4096, whole, None)
    # Only where one context does not fit does it give way.
    context, tokens, notice = shared(None, 40960, None, 1000 * whole)
    assert (context, tokens) == (4096, whole) and "40960" in str(notice)
    assert shared(None, 4096, 1000, 10**9) == (1000, 1024, None)
    assert shared(500, 4096, 1000, 10**9) == (500, 1024, None)
    with pytest.raises(UsageError, match="give --context 400 or less, or --cache-tokens 500 or more"):
        shared(500, 4096, 400, None)
    with pytest.raises(NotEnoughMemory, match="--context 4096 or less"):
        shared(6000, 40960, None, 1000 * whole)
    with pytest.raises(NotEnoughMemory, match="no room"):
        shared(None, 40960, None, 0)


def test_a_limit_of_what_nobody_shares_is_refused() -> None:
    spec = LoadSpec("model", "folder", cache_tokens=100)
    with pytest.raises(UsageError, match="requests of model share no cache"):
        plan_caches(spec, torch.device("cpu"), object(), None, 4096, False, print)


def test_steps_are_timed_by_rows_that_differ(tiny_pair: Any) -> None:
    """And by as many as asked for; what sits in the seats comes back as it was."""
    runner = open_one(tiny_pair.target, tiny_pair.drafter, True)
    decoder = runner.engine._captured
    assert decoder is not None
    step, seen, places = decoder._step, [], []
    with torch.inference_mode():
        step.seats.put(0, anchor=7, kv_len=3, seeds=5, temperature=0.5)
    before = {field.name: getattr(step.seats, field.name).clone() for field in fields(step.seats)}
    decode = step.pair.target.decode_rows

    def watch(rows: Any, *rest: Any) -> Any:
        seen.append((rows.token_ids.clone(), int(rows.starts[-1])))
        places.append(rows.positions.clone())
        return decode(rows, *rest)

    step.pair.target.decode_rows = watch  # type: ignore[method-assign]
    for count, is_drafting, num_rows in ((1, True, 4), (3, True, 7), (3, False, 3), (5, True, 30)):
        decoder.time_stages(count, is_drafting, num_rows, Draws.SAMPLED, 1)
        tokens, real = seen.pop()
        assert real == len(tokens) == num_rows
        assert is_drafting or len(set(tokens.tolist())) == count
    decoder.time_stages(2, True, 7, Draws.FILTERED, 1, context=65)
    assert places.pop().tolist() == [65, 66, 67, 68, 65, 66, 67]
    assert all(torch.equal(getattr(step.seats, name), value) for name, value in before.items())
