"""Elementwise functions built from exp and log1p alone.

torch computes the end of an array with other instructions than its body. For exp and log1p the bits are the same; for
its sigmoid, silu and softplus they are not, and a row would depend on how many rows are beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SOFTPLUS_LINEAR = 20.0
"""Above this, log(1 + exp(x)) is x in float32."""


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x)))"""
    soft = torch.log1p(torch.exp(x.clamp(max=_SOFTPLUS_LINEAR)))
    return torch.where(x > _SOFTPLUS_LINEAR, x, soft).sqrt()
