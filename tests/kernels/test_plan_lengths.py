"""The planner on a device against the engine's, and its budgeted form by hand."""

from __future__ import annotations

import random

import pytest
import torch

from sparkchat.engine.calibration import survival
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.planner import plan
from sparkchat.kernels.planner import plan_lengths
from sparkchat.kernels.planner.kernel import launch_plan_lengths
from sparkchat.params import CostTable


def table(seed: int) -> CostLookup:
    """A staircase with cliffs."""
    rng = random.Random(seed)
    rows = sorted(rng.sample(range(1, 300), 12))
    costs = [1.0]
    for _ in rows[1:]:
        costs.append(costs[-1] + rng.choice([0.01, 0.02, 0.2]))
    return CostLookup(CostTable(tuple(rows), tuple(costs), "measured", None))


def on_device(cost: CostLookup, device: torch.device) -> torch.Tensor:
    return torch.tensor([0.0] + [cost.step_ms(n) for n in range(1, 2100)], dtype=torch.float64, device=device)


def flat(device: torch.device) -> torch.Tensor:
    return torch.ones(9, dtype=torch.float64, device=device)


@pytest.mark.parametrize(
    ("requests", "width", "seed"),
    [(1, 7, 0), (1, 7, 1), (3, 5, 2), (16, 7, 0), (16, 7, 1), pytest.param(256, 8, 2, marks=pytest.mark.slow)],
)
def test_early_stop(requests: int, width: int, seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    confidence = torch.randn(requests, width, device=device) * 2 + 1
    confidence[0, 0] = torch.inf
    temperatures = torch.rand(width, device=device) + 0.5
    limits = torch.randint(0, width + 1, (requests,), dtype=torch.int32, device=device)
    cost = table(seed)
    alive = survival(confidence.cpu(), temperatures.tolist())
    want = plan(alive.tolist(), limits.tolist(), cost, 2, 1.5).verify_lens
    for run in (launch_plan_lengths, None):
        lens = torch.full((requests,), -1, dtype=torch.int32, device=device)
        if run is None:
            plan_lengths(
                confidence, temperatures, limits, on_device(cost, device), lens, extra_rows=2, extra_tokens=1.5
            )
        else:
            run(confidence, temperatures, limits, on_device(cost, device), lens, 2, 1.5, None)
        assert lens.tolist() == list(want)


def test_equal_survivals_go_by_position_then_request(device: torch.device) -> None:
    confidence = torch.full((3, 4), torch.inf, device=device)
    limits = torch.tensor([4, -1, 4], dtype=torch.int32, device=device)
    for budget, want in ((0, [0, 0, 0]), (1, [1, 0, 0]), (3, [2, 0, 1]), (99, [4, 0, 4])):
        lens = torch.full((3,), -1, dtype=torch.int32, device=device)
        count = torch.tensor([budget], dtype=torch.int32, device=device)
        launch_plan_lengths(confidence, torch.ones(4, device=device), limits, flat(device), lens, 0, 0.0, count)
        assert lens.tolist() == want


def test_a_confidence_that_is_no_number_admits_nothing(device: torch.device) -> None:
    confidence = torch.tensor([[3.0, float("nan"), 9.0], [float("nan"), 9.0, 9.0]], device=device)
    limits = torch.tensor([3, 3], dtype=torch.int32, device=device)
    lens = torch.full((2,), -1, dtype=torch.int32, device=device)
    launch_plan_lengths(confidence, torch.ones(3, device=device), limits, flat(device), lens, 0, 0.0, None)
    assert lens.tolist() == [1, 0]


def test_too_many_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        plan_lengths(torch.zeros(600, 7), torch.ones(7), torch.zeros(600), torch.ones(2), torch.zeros(600))
