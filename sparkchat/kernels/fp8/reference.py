"""The product with a weight of 8 bits in torch, with the same parts of the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.fp8.plan import Fp8Plan, plan_of
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.tiles.packing import STEP

_LEAST, _MOST = 1e-4, 448.0


def fp8_linear_reference(
    x: Tensor, weight: TiledFp8, out: Tensor, groups: int, is_rounded: bool, plan: Fp8Plan | None = None
) -> None:
    """See ``fp8_linear``. Computes in float32. ``plan`` stands in for the usual one."""
    (outs, size), values = weight.shape, weight.dense()
    plan = plan or plan_of(outs, size, out.dim() == 3 and out.shape[0] > 1)
    width = plan.part(size) * STEP
    rows = (rounded_e4m3(x) if is_rounded else x).float().unflatten(1, (groups, size))
    weights = values.unflatten(0, (groups, -1))
    sums = [
        torch.einsum("ngk,gok->ngo", rows[..., at : at + width], weights[..., at : at + width]).flatten(1)
        for at in range(0, size, width)
    ]
    if out.dim() == 3:
        sums += [torch.zeros_like(sums[0])] * (plan.splits - len(sums))
        out.copy_(torch.stack(sums))
    else:
        out.copy_(sum(sums))


def rounded_e4m3(x: Tensor) -> Tensor:
    """x [N, n] rounded to e4m3 with the smallest power of two for each 128 of a row that brings it into range."""
    blocks = x.float().unflatten(-1, (-1, STEP))
    fraction, power = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / _MOST)
    scale = torch.ldexp(torch.ones_like(fraction), torch.where(fraction == 0.5, power - 1, power))
    values = (blocks / scale).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(-2).to(x.dtype)
