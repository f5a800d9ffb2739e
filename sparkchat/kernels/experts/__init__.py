"""The experts of a layer for a few rows: codes of 4 bits stay so in memory, an expert is read once for all its rows.

The expert that every row goes to is part of the same launches. Deterministic: every choice writes to a place of its
own, and the places are added in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.experts.plan import whole_plan
from sparkchat.kernels.experts.reference import add_parts_reference, run_experts_reference
from sparkchat.kernels.experts.weights import TiledBank, TiledExperts
from sparkchat.kernels.gate.routing import Routing

__all__ = ["COUNTERS", "ExpertBuffers", "TiledBank", "TiledExperts", "add_parts", "run_experts"]

COUNTERS = 1024
"""Numbers that programs of one launch meet at: enough for all items of as many rows as take one."""


@dataclass(frozen=True)
class ExpertBuffers:
    """What lies between the launches, for N rows with k choices each."""

    inner: Tensor
    """[N * k + N, width] half: gate times up of every choice, then of the shared expert"""
    parts: Tensor
    """[k + 1, N, d] float32: the outputs of a row's choices, experts ascending, then the shared one's: partial sums"""

    @classmethod
    def empty(cls, rows: int, per_row: int, weights: TiledExperts, dtype: torch.dtype) -> ExpertBuffers:
        device, size, width = weights.down.tiles.device, weights.size, weights.width
        inner = torch.empty((rows * (per_row + 1), width), dtype=dtype, device=device)
        return cls(inner, torch.empty((per_row + 1, rows, size), device=device))


def run_experts(
    x: Tensor,
    weights: TiledExperts,
    routing: Routing,
    buffers: ExpertBuffers,
    *,
    limit: float,
    is_rounded: bool = False,
    state: Tensor | None = None,
) -> None:
    """Fill ``buffers.parts`` from x [N, d] half.

    An expert is w2(silu(w1 x) * w3 x * weight): w1 x clamped above by ``limit``, w3 x on both sides, the product
    rounded to x's dtype; the shared one has weight 1. ``is_rounded``: inputs of products are first rounded as fp8
    products round theirs, e4m3 with a power of two for each row's 128 inputs. ``state``
    [COUNTERS] int32, 0 before and behind each call, belongs to a stream of launches; with it few rows take one launch.
    Raises ValueError for wrong shapes.
    """
    size, width = weights.size, weights.width
    rows, per_row = routing.weights.shape
    wanted = {"x": (x, (rows, size)), "inner": (buffers.inner, (rows * (per_row + 1), width)),
              "parts": (buffers.parts, (per_row + 1, rows, size))}  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.stride(-1) != 1 or (name != "x" and not tensor.is_contiguous()):
            raise ValueError(f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}; it must be {shape}")
    if not x.is_cuda:
        run_experts_reference(x, weights, routing, buffers.inner, buffers.parts, limit, is_rounded)
        return
    whole = None if state is None else whole_plan(rows)
    if whole is not None:
        from sparkchat.kernels.experts.whole import launch_mix_experts

        assert state is not None
        launch_mix_experts(x, weights, routing, buffers.inner, buffers.parts, state, limit, is_rounded, whole)
        return
    from sparkchat.kernels.experts.kernel import launch_down, launch_gate_up

    launch_gate_up(x, weights, routing, buffers.inner, limit, is_rounded)
    launch_down(buffers.inner, weights, routing, buffers.parts, is_rounded)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """out [N, d] half or float32 = the sum of parts [P, N, d] float32, in order."""
    if not parts.is_cuda:
        add_parts_reference(parts, out)
        return
    from sparkchat.kernels.experts.kernel import launch_add_parts

    launch_add_parts(parts, out)
