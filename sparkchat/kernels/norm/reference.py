"""Residual addition and RMSNorm in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm_reference(
    x: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, tap: Tensor | None
) -> None:
    """See ``add_rms_norm``."""
    if delta is None:
        assert x is not None
        total = x
    else:
        total = sum_of_parts(delta)
        if x is not None:
            total = x.add_(total)
    if tap is not None:
        tap.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_(total * scale * weight)


def sum_of_parts(values: Tensor) -> Tensor:
    """[N, ...] or partial sums [S, N, ...] -> [N, ...] float32, parts added in order."""
    if values.dim() == 2:
        return values.float()
    total = values[0].float()
    for part in values[1:]:
        total = total + part
    return total
