"""The small product in torch, with the same parts of k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.kernels.gemm.plan import plan_of

SCALE_BLOCK = 128


def small_gemm_reference(
    x: Tensor, weight: Tensor, out: Tensor, scales: Tensor | None, bias: Tensor | None, epilogue: str
) -> None:
    """See ``small_gemm``. Computes in float32."""
    values = dequantise(weight, scales)
    plan = plan_of(weight, epilogue)
    parts = []
    for part in range(plan.splits):
        at = slice(part * plan.part_k, (part + 1) * plan.part_k)
        parts.append(x[:, at].float() @ values[:, at].T)
    if bias is not None:
        parts[0] += bias.float()
    if epilogue == "partials":
        out.copy_(torch.stack(parts))
    elif epilogue == "add":
        out.add_(parts[0])
    elif epilogue == "silu_mul":
        gate, up = parts[0].chunk(2, dim=1)
        out.copy_(F.silu(gate) * up)
    else:
        out.copy_(parts[0])


def dequantise(weight: Tensor, scales: Tensor | None) -> Tensor:
    """weight [n, k] in float32; scales [ceil(n/128), ceil(k/128)] multiply its blocks."""
    if scales is None:
        return weight.float()
    n, k = weight.shape
    spread = scales.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return weight.float() * spread
