"""The router's program against the model's gate and its reference: ties, tables, lists, numbers that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparkchat.kernels.experts.plan import most_items, row_tile
from sparkchat.kernels.gate import Routing, route
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.gate.plan import PLAN
from sparkchat.kernels.gate.reference import list_choices, route_reference

NAN = float("nan")


def both(logits: Tensor, per_row: int, **choice: Tensor | None) -> list[Routing]:
    """By the kernel and by the reference."""
    given = {"bias": None, "table": None, "token_ids": None, **choice}
    rows, experts = logits.shape[-2:]
    *got, apart = [Routing.empty(rows, per_row, experts, logits.device) for _ in range(3)]
    arrived = torch.zeros(1, dtype=torch.int32, device=logits.device)
    launch_route(logits, got[0], 1.5, **given, arrived=arrived)
    assert arrived.tolist() == [0]
    launch_route(logits, apart, 1.5, **given, plan=replace(PLAN, is_one=False))
    assert_same(got[0], apart)
    route_reference(logits, given["bias"], given["table"], given["token_ids"], 1.5, got[1])
    return got


def assert_same(got: Routing, want: Routing) -> None:
    assert torch.equal(got.chosen, want.chosen)
    torch.testing.assert_close(got.weights, want.weights, atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.items[: got.counts[0]], want.items[: want.counts[0]])
    for expert, count in enumerate(want.counts[1:].tolist()):
        assert torch.equal(got.lists[expert, :count], want.lists[expert, :count]), expert


@pytest.mark.parametrize(("rows", "experts", "per_row"), [(1, 8, 2), (6, 16, 6), (20, 12, 3), (3, 5, 5)])
def test_against_the_reference(rows: int, experts: int, per_row: int, device: torch.device) -> None:
    logits = torch.randn(rows, experts, device=device) * 8
    assert_same(*both(logits, per_row, bias=torch.randn(experts, device=device)))
    parts = torch.randn(3, rows, experts, device=device)
    assert_same(*both(parts, per_row, bias=torch.randn(experts, device=device)))


def test_equal_scores_go_to_the_lower_expert(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0], [3.0] * 6, [-200.0] * 6], device=device)
    got, want = both(logits, 2, bias=torch.zeros(6, device=device))
    assert got.chosen.tolist()[:2] == [[1, 2], [0, 1]]
    assert torch.equal(got.chosen, want.chosen)
    # Scores of 0 have no sum to be divided by, here as in the model's gate.
    assert got.weights[2].isnan().all() and want.weights[2].isnan().all()


def test_scores_are_exact_where_exponentials_are_small_or_large(device: torch.device) -> None:
    logits = torch.tensor([[-30.0, -12.0, -3.0, -1e-3, 0.0, 0.5, 5.0, 19.9, 20.1, 90.0]], device=device).T.contiguous()
    logits = torch.cat([logits, torch.zeros_like(logits)], dim=1)
    got, want = both(logits, 2, bias=torch.zeros(2, device=device))
    torch.testing.assert_close(got.weights, want.weights, atol=0.0, rtol=2e-6)


def test_a_table_names_experts_also_one_twice(device: torch.device) -> None:
    table = torch.tensor([[3, 1, 0], [2, 2, 4], [4, 3, 2]], device=device)
    tokens = torch.tensor([1, 0, 2, 1, 77, -5], device=device)
    got, want = both(torch.randn(6, 5, device=device), 3, table=table, token_ids=tokens)
    assert_same(got, want)
    # Ids outside of the table read its ends.
    assert got.chosen.tolist() == [[2, 2, 4], [0, 1, 3], [2, 3, 4], [2, 2, 4], [2, 3, 4], [0, 1, 3]]


def test_logits_that_are_no_numbers_show_in_their_row_alone(device: torch.device) -> None:
    logits = torch.randn(3, 8, device=device)
    logits[1, 6] = NAN
    got, want = both(logits, 2, bias=torch.zeros(8, device=device))
    assert_same(got, want)
    assert got.weights[1].isnan().all() and not got.weights[[0, 2]].isnan().any()


def test_all_rows_to_one_expert_and_a_list_of_several_tiles(device: torch.device) -> None:
    rows = 35
    logits = torch.zeros(rows, 4, device=device)
    logits[:, 2] = 9.0
    got, want = both(logits, 1, bias=torch.zeros(4, device=device))
    assert_same(got, want)
    assert got.counts.tolist() == [5, 0, 0, rows, 0]
    assert got.items[:5].tolist() == [2 + 65536 * first for first in range(0, rows, 8)]


def test_there_is_room_for_the_items_of_any_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, per_row, experts in ((1, 6, 32), (6, 6, 64), (17, 2, 4), (40, 3, 3)):
        for spread in (1, experts):
            routing = Routing.empty(rows, per_row, experts, torch.device("cpu"))
            scores = torch.rand(rows, experts, generator=generator)
            scores[:, :spread] += 1
            routing.chosen.copy_(scores.argsort(dim=1)[:, :per_row].sort(dim=1).values)
            list_choices(routing)
            assert routing.counts[0] <= most_items(rows, per_row, experts)
    assert most_items(6, 6, 256) == 36 and row_tile(128) == 8 and row_tile(129) == 16


def test_what_does_not_fit_is_refused() -> None:
    routing = Routing.empty(2, 2, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="do not fit"):
        route(torch.zeros(3, 4), routing, 1.0, bias=torch.zeros(4))
    with pytest.raises(ValueError, match="by a bias, or"):
        route(torch.zeros(2, 4), routing, 1.0)
    with pytest.raises(ValueError, match="names 3 experts"):
        route(
            torch.zeros(2, 4), routing, 1.0, table=torch.zeros(5, 3, dtype=torch.int64),
            token_ids=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip
