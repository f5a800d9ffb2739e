"""What a layer makes of its input in one launch, against the launches by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.latent_rows import FIRST_SLOT, NAN, rope_of, rows_of
from kernels.test_fp8_linear import half, weight_of
from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.input import InputPlan, InputRows
from sparkchat.kernels.compressor.input_kernel import launch_keep_and_project
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.latent_attention import LatentRows, LatentShape

SIZE, LATENT, LOW, ROPE, RING, OUTS = 256, 32, 128, 16, 16, 64


def inputs(device: torch.device, ratio: int, count: int) -> tuple[InputRows, Tensor]:
    """Rows of one request, the first of which lies at position 6, and where their queries go."""
    overlaps = ratio == 4
    width, kind = LATENT * (2 if overlaps else 1), half(device)
    rows = rows_of([(1, 6, count)], 8, device)
    product = JointProduct(
        weight_of(LOW + LATENT, SIZE, device), torch.randn(2 * width + 64, SIZE, device=device).to(kind) * 0.05,
        2 * width if width == 64 else None,
    )  # fmt: skip
    plan, plain = product.plan, product.plain.shape[0]
    parts = torch.full((plan.codes.splits, count, LOW + LATENT), NAN, device=device)
    pooled = torch.full((plan.plain_splits, count, plain), NAN, device=device)
    cache = torch.full((2, FIRST_SLOT + RING + 8, LATENT), NAN, device=device, dtype=kind)
    shape = LatentShape(FIRST_SLOT, RING, ratio, ROPE, 1e-6)
    low = torch.full((count, LOW), NAN, device=device, dtype=kind)
    written = LatentRows(
        parts[..., LOW:], torch.rand(LATENT, device=device), cache, shape, parts[..., :LOW],
        torch.rand(LOW, device=device), low,
    )  # fmt: skip
    pool = Pool(
        pooled[..., :width], pooled[..., width : 2 * width], torch.randn(ratio, width, device=device),
        torch.rand(LATENT, device=device), torch.randn(2, 32, 2 * width, device=device), cache, FIRST_SLOT + RING,
    )  # fmt: skip
    weight = weight_of(OUTS, LOW, device)
    given = InputRows(
        torch.randn(count, SIZE, device=device).to(kind), product, parts, pooled,
        torch.full((count, plain - product.whole_from), NAN, device=device), [pool], written, rows.positions, rows.rows,
        rows.starts, rows.span_starts, rope_of(64, ROPE, device), PoolShape(ratio, overlaps, ROPE, 1e-6),
        TiledFp8(weight.tiles, weight.scales * 0.05), torch.zeros(1, dtype=torch.int64, device=device),
    )  # fmt: skip
    return given, torch.full((count, OUTS), NAN, device=device, dtype=kind)


def left(given: InputRows, out: Tensor) -> list[Tensor]:
    assert given.written.out is not None
    return [given.whole, given.written.cache, given.pools[0].raw, given.written.out, out]


@pytest.mark.parametrize("ratio", [4, 8])
def test_as_the_launches_by_themselves(ratio: int, device: torch.device) -> None:
    torch.manual_seed(1)
    given, out = inputs(device, ratio, 3)
    torch.manual_seed(1)
    apart, want = inputs(device, ratio, 3)
    launch_keep_and_project(given, out, InputPlan())
    launch_joint(apart.x, apart.product, apart.parts, apart.plain, apart.whole, False, apart.product.plan)
    rest = (apart.positions, apart.rows, apart.starts, apart.span_starts, apart.rope, apart.shape)
    launch_compress_rows(apart.pools, *rest, apart.written)
    assert apart.written.out is not None
    launch_fp8_linear(apart.written.out, apart.queries, want, 1, False)
    for got, wanted in zip(left(given, out), left(apart, want), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3, equal_nan=True)
    assert not out.isnan().any() and not given.product.arrived.any()
