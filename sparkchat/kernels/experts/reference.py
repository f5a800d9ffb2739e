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
    x: Tensor, weights: TiledExperts, routing: Routing, inner: Tensor, parts: Tensor, limit: float, is_rounded: bool
) -> None:
    """See ``run_experts``."""
    rows, per_row = routing.weights.shape

    def product(a: Tensor, weight: Tensor) -> Tensor:
        return (rounded_e4m3(a) if is_rounded else a).float() @ weight.T

    def activated(a: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        g, u = product(a, gate).clamp(max=limit), product(a, up).clamp(-limit, limit)
        return g / (1.0 + torch.exp(-g)) * u

    for expert in routing.chosen.unique().tolist():
        choices = (routing.chosen.flatten() == expert).nonzero().flatten()
        value = activated(x[choices // per_row], *taken_apart(dense_fp4(weights.gate_up, expert)))
        inner[choices] = (value * routing.weights.flatten()[choices, None]).to(inner.dtype)
        parts[choices % per_row, choices // per_row] = product(inner[choices], dense_fp4(weights.down, expert))
    inner[rows * per_row :] = activated(x, *taken_apart(weights.shared_gate_up.dense())).to(inner.dtype)
    parts[per_row] = product(inner[rows * per_row :], weights.shared_down.dense())


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
