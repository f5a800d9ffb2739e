"""The product with tiles of 8 bit codes against its reference: parts, groups, roundings, independence of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.agreement import assert_same_sums
from sparkchat.kernels.fp8 import TiledFp8, fp8_linear, takes
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.fp8.plan import plan_for_rows, plan_of, tried
from sparkchat.kernels.fp8.reference import fp8_linear_reference, rounded_e4m3
from sparkchat.kernels.gemm.reference import dequantise
from sparkchat.kernels.tiles.packing import taken_apart
from sparkchat.models.deepseek_v4.rounding import round_e4m3

NAN = float("nan")


def half(device: torch.device) -> torch.dtype:
    """The interpreter multiplies no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def weight_of(out: int, size: int, device: torch.device) -> TiledFp8:
    codes = torch.randn(out, size, device=device).to(torch.float8_e4m3fn)
    return TiledFp8.of(codes, torch.rand(-(-out // 128), size // 128, device=device) + 0.5)


@pytest.mark.parametrize(("rows", "out", "size"), [(1, 160, 128), (9, 64, 256), (17, 32, 1152), (40, 32, 128)])
@pytest.mark.parametrize("has_parts", [False, True])
def test_against_the_reference(rows: int, out: int, size: int, has_parts: bool, device: torch.device) -> None:
    weight, x = weight_of(out, size, device), torch.randn(rows, size, device=device, dtype=half(device))
    parts = (weight.splits(rows),) if has_parts else ()
    outs = torch.full((2, *parts, rows, out), NAN, device=device)
    launch_fp8_linear(x, weight, outs[0], 1, False)
    fp8_linear_reference(x, weight, outs[1], 1, False)
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)


def test_two_weights_in_turn_are_pairs_of_tiles(device: torch.device) -> None:
    codes = [torch.randn(160, 256, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(2)]
    both = TiledFp8.of_two(*zip(codes, scales, strict=True))
    assert both.shape == (320, 256)
    for weight, code, scale in zip(taken_apart(both.dense()), codes, scales, strict=True):
        assert torch.equal(weight, dequantise(code, scale))
        assert torch.equal(TiledFp8.of(code, scale).dense(), weight)


def test_all_codes_keep_their_value(device: torch.device) -> None:
    raw = torch.arange(256, dtype=torch.uint8, device=device)
    codes = raw[(raw & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    weight = torch.zeros(32, 256, device=device).to(torch.float8_e4m3fn)
    weight[3, : len(codes)] = codes
    # A row of x for every input: what comes out is the weight itself.
    tiled, x = TiledFp8.of(weight, torch.ones(1, 2, device=device)), torch.eye(256, device=device, dtype=half(device))
    out = torch.full((256, 32), NAN, device=device)
    launch_fp8_linear(x, tiled, out, 1, False)
    assert torch.equal(out.T, weight.float())


def test_output_groups_read_groups_of_inputs(device: torch.device) -> None:
    weight, x = weight_of(128, 256, device), torch.randn(3, 512, device=device, dtype=half(device))
    out = torch.full((3, 128), NAN, device=device)
    launch_fp8_linear(x, weight, out, 2, False)
    want = torch.empty_like(out)
    fp8_linear_reference(x, weight, want, 2, False)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    alone = torch.empty(3, 128, device=device)
    fp8_linear_reference(x[:, :256], weight, alone, 1, False)
    torch.testing.assert_close(want[:, :64], alone[:, :64])


def test_inputs_are_rounded_as_published(device: torch.device) -> None:
    weight = weight_of(32, 512, device)
    x = (torch.randn(5, 512, device=device) * torch.logspace(-6, 4, 5, device=device)[:, None]).to(half(device))
    x[0], x[1, :128], x[2, 7] = 0.0, 448.0, 1e-6
    out, want = torch.full((5, 32), NAN, device=device), torch.empty(5, 32, device=device)
    launch_fp8_linear(x, weight, out, 1, True)
    fp8_linear_reference(round_e4m3(x, 128), weight, want, 1, False)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-4)
    assert torch.equal(rounded_e4m3(x), round_e4m3(x, 128))


def test_a_number_that_is_none_shows_in_its_row_alone(device: torch.device) -> None:
    weight, x = weight_of(32, 512, device), torch.randn(4, 512, device=device, dtype=half(device))
    x[2, 300] = NAN
    for is_rounded in (False, True):
        out = torch.zeros(4, 32, device=device)
        launch_fp8_linear(x, weight, out, 1, is_rounded)
        assert out[2].isnan().all()
        assert not out[[0, 1, 3]].isnan().any()


def test_a_row_does_not_depend_on_how_many_there_are(device: torch.device) -> None:
    weight, x = weight_of(32, 1024, device), torch.randn(33, 1024, device=device, dtype=half(device))
    together = torch.full((weight.splits(33), 33, 32), NAN, device=device)
    launch_fp8_linear(x, weight, together, 1, False)
    for count in (1, 9):
        some = torch.full((weight.splits(count), count, 32), NAN, device=device)
        launch_fp8_linear(x[:count].clone(), weight, some, 1, False)
        assert_same_sums(some, together[:, :count])


@pytest.mark.parametrize(("out", "size"), [(1536, 4096), (16384, 1024), (4096, 4096), (4096, 12288), (32, 128)])
def test_plans_cover_the_inputs(out: int, size: int) -> None:
    for has_parts in (False, True):
        for plan in (plan_of(out, size, has_parts), *tried(out, size, 6, has_parts)):
            assert plan.part(size) * plan.splits * 128 >= size > plan.part(size) * (plan.splits - 1) * 128
            assert has_parts or plan.splits == 1


def test_plans_that_share_the_inputs_otherwise_give_the_same(device: torch.device) -> None:
    weight, x = weight_of(32, 1280, device), torch.randn(2, 1280, device=device, dtype=half(device))
    plan, outs = plan_of(32, 1280, False), []
    for warps, stages in ((4, 3), (8, 2), (1, 2)):
        outs.append(torch.full((2, 32), NAN, device=device))
        tried_plan = replace(plan, warps=warps, stages=stages)
        launch_fp8_linear(x, weight, outs[-1], 1, False, tried_plan)
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outs[0], outs[2], atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    codes = torch.zeros(48, 256).to(torch.float8_e4m3fn)
    assert not takes(codes, (128, 128)) and not takes(codes[:32, :64], (128, 128))
    assert not takes(codes[:32], (32, 128)) and not takes(codes[:32].float(), (128, 128))
    assert takes(codes[:32], (128, 128))
    with pytest.raises(ValueError, match="pairs"):
        TiledFp8.of(codes, torch.ones(1, 2))
    weight = TiledFp8.of(codes[:32], torch.ones(1, 2))
    with pytest.raises(ValueError, match="do not give"):
        fp8_linear(torch.zeros(2, 128), weight, torch.zeros(2, 32))
    with pytest.raises(ValueError, match="side by side"):
        fp8_linear(torch.zeros(256, 2).T, weight, torch.zeros(2, 32))


@pytest.mark.parametrize(("pairs", "most_rows", "groups"), [(2, 32, 2), (4, 64, 1)])
def test_programs_of_several_pairs_give_the_same_bits(
    pairs: int, most_rows: int, groups: int, device: torch.device
) -> None:
    weight, x = weight_of(128, 512, device), torch.randn(70, 512 * groups, device=device, dtype=half(device))
    plan = plan_of(128, 512, False)
    outs = torch.full((2, 70, 128), NAN, device=device)
    launch_fp8_linear(x, weight, outs[0], groups, False, plan)
    launch_fp8_linear(x, weight, outs[1], groups, False, replace(plan, pairs=pairs, most_rows=most_rows, stages=3))
    assert_same_sums(outs[0], outs[1])


def test_many_rows_leave_the_order_of_sums() -> None:
    for out, size, has_parts in ((24576, 1024, False), (4096, 4096, False), (4096, 4096, True), (96, 256, False)):
        plan = plan_of(out, size, has_parts)
        for rows in (17, 96, 384):
            many = plan_for_rows(out, size, has_parts, rows, outs_of_group=out // 2)
            assert (many.warps, many.splits) == (plan.warps, plan.splits)
            assert (out // 2) % (32 * many.pairs) == 0 or many.pairs == 1
    assert plan_for_rows(24576, 1024, False, 384).pairs == 4 and plan_for_rows(24576, 1024, False, 6).pairs == 1
