"""The experts' launches against their reference: rows of an expert, tiles, roundings, clamps, independence of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.agreement import assert_same_sums
from sparkchat.kernels.experts import ExpertBuffers, TiledBank, TiledExperts, add_parts, plan, run_experts
from sparkchat.kernels.experts.kernel import launch_add_parts, launch_down, launch_gate_up
from sparkchat.kernels.experts.plan import ExpertPlan, WholePlan
from sparkchat.kernels.experts.reference import dense_fp4, run_experts_reference
from sparkchat.kernels.experts.weights import takes
from sparkchat.kernels.experts.whole import launch_mix_experts
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.reference import list_choices
from sparkchat.kernels.launch import started_by
from sparkchat.kernels.tiles.packing import taken_apart
from sparkchat.models.deepseek_v4.formats import ScaledWeight

NAN = float("nan")
LIMIT = 2.0
IN_PARTS, ONE_PAIR = ExpertPlan(4, 1, 4, 2), ExpertPlan(1, 1, 1, 2)


def codes_of(experts: int, out: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.randint(-128, 128, (experts, out, size // 2), dtype=torch.int8, device=device)
    return codes, torch.randint(120, 125, (experts, out, size // 32), device=device).to(torch.uint8)


def fp8_of(out: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.randn(out, size, device=device).to(torch.float8_e4m3fn)
    return codes, torch.rand(-(-out // 128), size // 128, device=device) * 0.2


def experts_of(count: int, size: int, width: int, device: torch.device) -> TiledExperts:
    return TiledExperts(
        TiledBank.of_two(codes_of(count, width, size, device), codes_of(count, width, size, device)),
        TiledBank.in_place(*codes_of(count, size, width, device)),
        TiledFp8.of_two(fp8_of(width, size, device), fp8_of(width, size, device)),
        TiledFp8.of(*fp8_of(size, width, device)),
    )


def routing_of(chosen: list[list[int]], experts: int, device: torch.device) -> Routing:
    routing = Routing.empty(len(chosen), len(chosen[0]), experts, device)
    routing.chosen.copy_(torch.tensor(chosen))
    routing.weights.copy_(torch.rand(routing.weights.shape, device=device) + 0.2)
    list_choices(routing)
    return routing


def rows_of(count: int, size: int, device: torch.device) -> Tensor:
    return torch.randn(count, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float16)


@contextmanager
def first_programs(count: int, device: torch.device) -> Iterator[None]:
    """Run the programs of the first outputs alone where the interpreter runs them: all take half a second each."""

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        kernel[(min(count, grid[0]), *grid[1:])](*arguments, **options)

    if device.type == "cuda":
        yield
        return
    with started_by(start):
        yield


def both(
    x: Tensor, weights: TiledExperts, routing: Routing, is_rounded: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first 32 numbers of inner and of parts, by the kernels and by the reference."""
    got, want = (ExpertBuffers.empty(*routing.weights.shape, weights, x.dtype) for _ in range(2))
    run_experts_reference(x, weights, routing, want.inner, want.parts, LIMIT, is_rounded)
    got.inner.fill_(NAN)
    got.parts.fill_(NAN)
    # Of few rows a program of gate and up has one pair of tiles, one of down has two.
    with first_programs(2, x.device):
        launch_gate_up(x, weights, routing, got.inner, LIMIT, is_rounded)
    with first_programs(1, x.device):
        launch_down(want.inner, weights, routing, got.parts, is_rounded)
    return (got.inner[:, :32], got.parts[..., :32]), (want.inner[:, :32], want.parts[..., :32])


@pytest.mark.parametrize("is_rounded", [False, True])
def test_against_the_reference(is_rounded: bool, device: torch.device) -> None:
    weights, x = experts_of(4, 128, 128, device), rows_of(3, 128, device)
    # Expert 0 has no row, 1 has one, 2 two, 3 all.
    routing = routing_of([[2, 3], [1, 3], [2, 3]], 4, device)
    got, want = both(x, weights, routing, is_rounded)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2 if is_rounded else 5e-3)


def test_more_rows_than_a_tile_and_the_same_expert_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_IN_FEW", 8)
    weights, x = experts_of(2, 128, 128, device), rows_of(18, 128, device)
    routing = routing_of([[1, 1], *[[1] * 2] * 8, *[[0, 1]] * 9], 2, device)
    assert routing.counts.tolist() == [3, 9, 27]
    torch.testing.assert_close(*both(x, weights, routing), atol=2e-2, rtol=5e-3)


def test_all_codes_and_scales_keep_their_value(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the identity through down: what comes out is the weight."""
    monkeypatch.setattr(plan, "MOST_IN_FEW", 8)
    size, width = 128, 128
    codes = torch.arange(size * width // 2, device=device).to(torch.uint8).view(torch.int8).view(1, size, width // 2)
    scales = torch.arange(size * width // 32, device=device).view(1, size, width // 32) % 40 + 89
    published = ScaledWeight(codes[0].clone(), scales[0].to(torch.uint8), (1, 32)).dense()
    bank = TiledBank.in_place(codes.clone(), scales.to(torch.uint8))
    weights = replace(experts_of(1, size, width, device), down=bank)
    assert torch.equal(dense_fp4(bank, 0), published)
    routing = routing_of([[0]] * width, 1, device)
    inner = torch.zeros((2 * width, width), device=device)
    inner[:width] = torch.eye(width)
    # In float32 where the interpreter runs: the smallest scales are too small for float16.
    inner = inner.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    parts = torch.full((2, width, size), NAN, device=device)
    with first_programs(1, device):
        launch_down(inner, weights, routing, parts, False, ONE_PAIR)
    assert torch.equal(parts[0, :, :32].T, published[:32])


def test_two_banks_in_turn_are_pairs_of_tiles(device: torch.device) -> None:
    banks = [codes_of(3, 32, 128, device) for _ in range(2)]
    both = TiledBank.of_two(*banks)
    assert both.shape == (3, 64, 128)
    for bank, weight in zip(banks, taken_apart(dense_fp4(both, 2)), strict=True):
        assert torch.equal(weight, ScaledWeight(bank[0][2], bank[1][2], (1, 32)).dense())


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_IN_FEW", 8)
    weights, x = experts_of(2, 512, 128, device), rows_of(10, 512, device)
    routing, alone = routing_of([[0, 1], *[[0, 0]] * 9], 2, device), routing_of([[0, 1]], 2, device)
    alone.weights.copy_(routing.weights[:1])
    inner = [ExpertBuffers.empty(count, 2, weights, x.dtype).inner for count in (10, 1)]
    with first_programs(1, device):
        launch_gate_up(x, weights, routing, inner[0], LIMIT, False, IN_PARTS)
        launch_gate_up(x[:1].clone(), weights, alone, inner[1], LIMIT, False, IN_PARTS)
    # In sixteen rows beside others, and in a tile of eight alone; the shared expert's row is the last.
    assert_same_sums(inner[1][:, :16].float(), inner[0][[0, 1, 20], :16].float())


def test_numbers_that_are_none_show_in_their_row_alone(device: torch.device) -> None:
    weights, x = experts_of(2, 128, 128, device), rows_of(3, 128, device)
    x[1, 5] = NAN
    routing = routing_of([[1], [1], [1]], 2, device)
    for is_rounded in (False, True):
        (inner, parts), _ = both(x, weights, routing, is_rounded)
        # A choice and the shared expert's row of each row.
        assert inner[[1, 4]].isnan().all() and parts[:, 1].isnan().all()
        assert not inner[[0, 2, 3, 5]].isnan().any() and not parts[:, [0, 2]].isnan().any()


def test_steps_that_do_not_divide_among_the_warps(device: torch.device) -> None:
    weights, x = experts_of(2, 384, 128, device), rows_of(2, 384, device)
    routing = routing_of([[0, 1], [0, 1]], 2, device)
    got, want = (ExpertBuffers.empty(2, 2, weights, x.dtype) for _ in range(2))
    with first_programs(1, device):
        launch_gate_up(x, weights, routing, got.inner, LIMIT, False, ExpertPlan(2, 1, 2, 2))
    run_experts_reference(x, weights, routing, want.inner, want.parts, LIMIT, False)
    torch.testing.assert_close(got.inner[:, :16], want.inner[:, :16], atol=2e-2, rtol=5e-3)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_program_of_several_pairs_and_parts(is_late: bool, device: torch.device) -> None:
    weights, x = experts_of(2, 256, 128, device), rows_of(2, 256, device)
    routing = routing_of([[0, 1], [0, 1]], 2, device)
    got, want = (ExpertBuffers.empty(2, 2, weights, x.dtype) for _ in range(2))
    cut = ExpertPlan(2, 2, 4, 2, is_late=is_late)
    with first_programs(1, device):
        launch_gate_up(x, weights, routing, got.inner, LIMIT, False, cut)
    run_experts_reference(x, weights, routing, want.inner, want.parts, LIMIT, False)
    torch.testing.assert_close(got.inner[:, :32], want.inner[:, :32], atol=2e-2, rtol=5e-3)
    with first_programs(1, device):
        launch_down(want.inner, weights, routing, got.parts, False, replace(cut, split=1))
    torch.testing.assert_close(got.parts[..., :64], want.parts[..., :64], atol=2e-2, rtol=5e-3)


WHOLE = WholePlan(ExpertPlan(1, 2, 2, 2), ExpertPlan(1, 2, 2, 2), 2)


def whole_of(
    x: Tensor, weights: TiledExperts, routing: Routing, state: Tensor, cut: WholePlan = WHOLE, is_rounded: bool = False
) -> ExpertBuffers:
    made = ExpertBuffers.empty(*routing.weights.shape, weights, x.dtype)
    made.inner.fill_(NAN)
    made.parts.fill_(NAN)
    launch_mix_experts(x, weights, routing, made.inner, made.parts, state, LIMIT, is_rounded, cut)
    return made


def test_one_launch_against_the_reference(device: torch.device) -> None:
    weights, x = experts_of(3, 128, 128, device), rows_of(2, 128, device)
    state, want = torch.zeros(20, dtype=torch.int32, device=device), ExpertBuffers.empty(2, 1, weights, x.dtype)
    # Expert 0 has no row, 1 has both; then 2 has one. The numbers are left as they were found.
    for chosen, is_rounded in (([[1], [1]], False), ([[2], [1]], True)):
        routing = routing_of(chosen, 3, device)
        run_experts_reference(x, weights, routing, want.inner, want.parts, LIMIT, is_rounded)
        got = whole_of(x, weights, routing, state, is_rounded=is_rounded)
        assert not state.any()
        for ours, theirs in ((got.inner, want.inner), (got.parts, want.parts)):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2 if is_rounded else 5e-3)


def test_parts_are_added_in_order(device: torch.device) -> None:
    parts = torch.randn(4, 3, 100, device=device)
    parts[0] *= 1e7
    out = torch.full((3, 100), NAN, device=device)
    launch_add_parts(parts, out)
    assert torch.equal(out, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    if device.type == "cpu":
        again = torch.empty_like(out)
        add_parts(parts, again)
        assert torch.equal(again, out)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weights = experts_of(2, 256, 128, device)
    routing = routing_of([[0, 1]], 2, device)
    buffers = ExpertBuffers.empty(1, 2, weights, torch.float16)
    with pytest.raises(ValueError, match="x is"):
        run_experts(torch.zeros(1, 128), weights, routing, buffers, limit=LIMIT)
    with pytest.raises(ValueError, match="down of the experts"):
        replace(weights, down=weights.gate_up)
    codes, scales = torch.zeros(2, 32, 64, dtype=torch.int8), torch.full((2, 32, 4), 128, dtype=torch.uint8)
    assert takes(codes, scales, (1, 32))
    assert not takes(codes, scales + 1, (1, 32)) and not takes(codes, scales, (1, 16))
    assert not takes(codes[:, :16], scales[:, :16], (1, 32))
