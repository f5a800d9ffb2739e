"""The small product against its reference: odd shapes, every epilogue, 8 bit weights, independence of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.agreement import assert_same_sums
from sparkchat.kernels.gemm import EPILOGUES, gemm_splits, small_gemm
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import plan, plan_of
from sparkchat.kernels.gemm.reference import dequantise, small_gemm_reference
from sparkchat.kernels.launch import Overlap, overlap, started_by
from sparkchat.kernels.norm.kernel import launch_add_rms_norm

NAN = float("nan")


def out_shape(rows: int, weight: torch.Tensor, epilogue: str) -> tuple[int, ...]:
    n = weight.shape[0]
    if epilogue == "partials":
        return gemm_splits(weight), rows, n
    return rows, n // 2 if epilogue == "silu_mul" else n


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 64), (7, 130, 200), (16, 64, 1024), (33, 70, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_the_reference(
    rows: int, n: int, k: int, dtype: torch.dtype, epilogue: str, device: torch.device
) -> None:
    x, weight = torch.randn(rows, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    bias = torch.randn(n, device=device, dtype=dtype) if n != 64 else None
    out = torch.randn(out_shape(rows, weight, epilogue), device=device)
    if epilogue != "add":
        out.fill_(NAN)
    outs = [out, out.clone()]
    launch_small_gemm(x, weight, outs[0], None, bias, epilogue)
    small_gemm_reference(x, weight, outs[1], None, bias, epilogue)
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)


def test_the_bulk_copy_engine_reads_the_same(device: torch.device) -> None:
    x, weight = torch.randn(5, 512, device=device), torch.randn(200, 512, device=device)
    used = plan_of(weight, "partials")
    outs = torch.full((2, used.splits, 5, 200), NAN, device=device)
    launch_small_gemm(x, weight, outs[0], None, None, "partials")
    launch_small_gemm(x, weight, outs[1], None, None, "partials", replace(used, is_bulk=True))
    assert_same_sums(outs[0], outs[1])


@pytest.mark.parametrize(("n", "k"), [(256, 384), (130, 200), (64, 2048)])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "partials"])
def test_8_bit_weights(n: int, k: int, epilogue: str, device: torch.device) -> None:
    x = torch.randn(3, k, device=device, dtype=torch.float16)
    weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128), device=device) + 0.5
    outs = torch.full((2, *out_shape(3, weight, epilogue)), NAN, device=device)
    launch_small_gemm(x, weight, outs[0], scales, None, epilogue)
    small_gemm_reference(x, weight, outs[1], scales, None, epilogue)
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2, rtol=2e-3)


def test_scales_belong_to_blocks_of_128() -> None:
    weight = torch.ones(130, 200, dtype=torch.float8_e4m3fn)
    values = dequantise(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [values[0, 0], values[127, 128], values[128, 127], values[129, 199]] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("epilogue", ["none", "partials"])
def test_a_row_does_not_depend_on_how_many_there_are(epilogue: str, device: torch.device) -> None:
    x, weight = torch.randn(40, 1024, device=device), torch.randn(128, 1024, device=device)
    together = torch.full(out_shape(40, weight, epilogue), NAN, device=device)
    launch_small_gemm(x, weight, together, None, None, epilogue)
    for count in (1, 17):
        some = torch.full(out_shape(count, weight, epilogue), NAN, device=device)
        launch_small_gemm(x[:count].clone(), weight, some, None, None, epilogue)
        assert_same_sums(some, together[..., :count, :])


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (4096, 12288), (960, 576), (576, 1536), (100, 90)])
def test_the_parts_cover_k(n: int, k: int) -> None:
    for size in (1, 2, 4):
        cut = plan(n, k, size, "partials")
        assert cut.part_k % cut.block_k == 0
        assert cut.part_k * (cut.splits - 1) < k <= cut.part_k * cut.splits
        assert plan(n, k, size, "none").splits == 1


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (576, 1536)])
def test_sums_are_cut_alike_whatever_is_beside_a_row_and_however_it_is_launched(n: int, k: int) -> None:
    for size in (1, 2, 4):
        for epilogue in ("none", "silu_mul", "partials"):
            plans = [plan(n, k, size, epilogue, rows, overlaps) for rows in (16, 32, 64) for overlaps in (False, True)]
            assert len({(p.block_k, p.splits, p.part_k) for p in plans}) == 1


def test_pipelines_are_deeper_with_overlap() -> None:
    depths = []

    def note(kernel: object, grid: tuple[int, ...], *arguments: object, **options: int) -> None:
        depths.append(options["num_stages"])

    x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(512, 4096, dtype=torch.bfloat16)
    with started_by(note):
        for is_on in (False, True):
            with overlap(is_on):
                launch_small_gemm(x, weight, torch.zeros(1, 512), None, None, "none")
    assert depths == [3, 5]


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="epilogue"):
        small_gemm(x, weight, torch.zeros(2, 6), epilogue="gelu")
    with pytest.raises(ValueError, match="give"):
        small_gemm(x, weight, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="scales"):
        small_gemm(x, weight.to(torch.float8_e4m3fn), torch.zeros(2, 6))


def test_only_small_kernels_start_early_where_that_is_asked_for() -> None:
    """A product then lets the kernel behind it start, but neither starts early itself nor calls weights into L2."""
    noted = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
        early = options.get("launch_pdl", False)
        noted.append((kernel.fn.__name__, options["PDL"], early, options.get("PREFETCH_BYTES", 0) > 0))

    x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(512, 4096, dtype=torch.bfloat16)
    out = torch.zeros(1, 512)
    with started_by(note):
        for which in Overlap:
            with overlap(which):
                launch_small_gemm(x, weight, out, None, None, "none")
                launch_add_rms_norm(None, out, torch.ones(512), 1e-6, out, None)
    product, norm = "_small_gemm", "_add_rms_norm"
    assert noted == [
        (product, False, False, False), (norm, False, False, False),
        (product, True, False, False), (norm, True, True, False),
        (product, True, True, True), (norm, True, True, False),
        (product, 3, True, False), (norm, 2, True, False),
    ]  # fmt: skip
