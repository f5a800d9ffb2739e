"""The router of few rows in one launch: against product and route by themselves, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.gate.quick import MOST_ROWS, launch_gate_rows
from sparkchat.kernels.gate.reference import route_reference
from sparkchat.kernels.gemm import gemm_splits
from sparkchat.kernels.gemm.kernel import launch_small_gemm

SIZE = 2048
OF_THE_MODEL = [(rows, 256, 6) for rows in (1, 6, 8)] if torch.cuda.is_available() else []


def choice_of(device: torch.device, rows: int, experts: int, per_row: int, is_hashed: bool) -> dict[str, Any]:
    if not is_hashed:
        return {"bias": torch.randn(experts, device=device) * 0.1, "table": None, "token_ids": None}
    table = torch.stack([torch.randperm(experts)[:per_row] for _ in range(9)]).to(device)
    return {"bias": None, "table": table, "token_ids": torch.randint(-3, 12, (rows,), device=device)}


def lists_of(routing: Routing) -> list[list[int]]:
    return [routing.lists[e, : int(routing.counts[1 + e])].tolist() for e in range(routing.lists.shape[0])]


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize(("rows", "experts", "per_row"), [(1, 16, 2), (6, 72, 6), (8, 16, 3), *OF_THE_MODEL])
def test_gives_what_two_launches_give(
    rows: int, experts: int, per_row: int, is_hashed: bool, device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = (torch.randn(n, SIZE, device=device).to(dtype) for n in (rows, experts))
    weight[7] = weight[3]  # equal scores
    splits = gemm_splits(weight)
    assert splits > 1
    logits: list[Tensor] = [torch.full((splits, rows, experts), float("nan"), device=device) for _ in range(2)]
    got, apart = (Routing.empty(rows, per_row, experts, device) for _ in range(2))
    for made in (got.weights, got.chosen, got.lists, got.counts, got.items):
        made.fill_(-1)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    choice = choice_of(device, rows, experts, per_row, is_hashed)
    for _ in range(2):
        launch_gate_rows(x, weight, logits[0], got, 1.5, **choice, arrived=arrived)
    assert arrived.item() == 0
    launch_small_gemm(x, weight, logits[1], None, None, "partials")
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    # More rows take two launches, and a row may not follow from how many there are.
    assert device.type != "cuda" or torch.equal(logits[0], logits[1])
    launch_route(logits[0], apart, 1.5, **choice)
    cpu = {name: None if t is None else t.cpu() for name, t in choice.items()}
    held = Routing.empty(rows, per_row, experts, torch.device("cpu"))
    route_reference(logits[0].cpu(), **cpu, scale=1.5, routing=held)
    torch.testing.assert_close(got.weights.cpu(), held.weights, atol=1e-5, rtol=1e-5)
    assert torch.equal(got.weights, apart.weights) and torch.equal(got.chosen, apart.chosen)
    assert torch.equal(got.counts, apart.counts) and lists_of(got) == lists_of(apart)
    count = int(got.counts[0])
    assert torch.equal(got.items[:count], apart.items[:count])


def test_more_rows_are_refused(device: torch.device) -> None:
    rows = MOST_ROWS + 1
    logits, one = torch.zeros(4, rows, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="one launch routes up to"):
        launch_gate_rows(
            torch.zeros(rows, SIZE, device=device), torch.zeros(16, SIZE, device=device), logits,
            Routing.empty(rows, 2, 16, device), 1.0, torch.zeros(16, device=device), None, None, one,
        )  # fmt: skip
