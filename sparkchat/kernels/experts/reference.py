"""The experts of a layer in torch: float32 products, activations rounded where the kernels round them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.experts.weights import TiledBank, TiledExperts
from sparkchat.kernels.fp8.reference import rounded_e4m3
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.norm.reference import sum_of_parts
from sparkchat.kernels.tiles.packing import taken_apart

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def run_experts_reference(
    x: Tensor,
    weights: TiledExperts,
    routing: Routing,
    inner: Tensor,
    parts: Tensor,
    limit: float,
    is_rounded: bool,
    has_shared: bool = True,
) -> None:
    """See ``run_experts``."""
    per_row = routing.weights.shape[1]
    for expert in routing.chosen.unique().tolist():
        choices = (routing.chosen.flatten() == expert).nonzero().flatten()
        value = _activated(x[choices // per_row], dense_fp4(weights.gate_up, expert), limit, is_rounded)
        inner[choices] = (value * routing.weights.flatten()[choices, None]).to(inner.dtype)
        product = _product(inner[choices], dense_fp4(weights.down, expert), is_rounded)
        parts[choices % per_row, choices // per_row] = product
    if has_shared:
        run_shared_reference(x, weights, inner, parts, limit, is_rounded)


def run_shared_reference(
    x: Tensor, weights: TiledExperts, inner: Tensor, parts: Tensor, limit: float, is_rounded: bool
) -> None:
    """See ``run_shared``."""
    mine = inner[-x.shape[0] :]
    mine.copy_(_activated(x, weights.shared_gate_up.dense(), limit, is_rounded))
    parts[-1] = _product(mine, weights.shared_down.dense(), is_rounded)


def _product(a: Tensor, weight: Tensor, is_rounded: bool) -> Tensor:
    return (rounded_e4m3(a) if is_rounded else a).float() @ weight.T


def _activated(a: Tensor, both: Tensor, limit: float, is_rounded: bool) -> Tensor:
    """``both``: gate and up, their tiles in turn."""
    gate, up = (_product(a, weight, is_rounded) for weight in taken_apart(both))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1.0 + torch.exp(-gate)) * up


def add_parts_reference(parts: Tensor, out: Tensor) -> None:
    """See ``add_parts``."""
    out.copy_(sum_of_parts(parts))


def dense_fp4(bank: TiledBank, expert: int) -> Tensor:
    """[out, in] float32"""
    raw = bank.codes(expert).view(torch.uint8).long()
    values = torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)], device=raw.device)
    codes = torch.stack([values[raw & 15], values[raw >> 4]], dim=-1).flatten(-2)
    scales = torch.exp2(bank.block_scales(expert).float() - 127)
    return (codes.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)
