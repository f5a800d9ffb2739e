"""Residual streams between two sub-blocks, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.norm.reference import sum_of_parts

if TYPE_CHECKING:
    from sparkchat.kernels.hyper import PartList, StreamWeights


def connect_streams_reference(
    streams: Tensor,
    weights: StreamWeights,
    output: Tensor | PartList | None,
    mix: Tensor | None,
    merged: Tensor | None,
    next_mix: Tensor | None,
    norm: Tensor | None,
    norm_eps: float,
    out: Tensor | None,
    taken: Tensor | None,
    tap: Tensor | None,
) -> None:
    """See ``connect_streams``."""
    size = weights.streams
    if output is not None:
        assert mix is not None and merged is not None
        post, combination = settled(mix, weights).split([size, size * size], dim=-1)
        brought = post.unsqueeze(-1) * _whole(output).unsqueeze(1)
        # Transposed: summed over the first index of the combination.
        kept = combination.unflatten(-1, (size, size)).transpose(1, 2)
        merged.copy_(torch.baddbmm(brought, kept, streams.float()))
        streams = merged
    flat = streams.flatten(1).float()
    if tap is not None:
        tap.copy_(streams.float().mean(dim=1))
    numbers = flat @ weights.fn.T * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + weights.rms_eps)
    numbers = numbers * weights.scale + weights.base
    read = (torch.sigmoid(numbers[:, :size]) + weights.eps).unsqueeze(-1)
    x = (read * streams.float()).sum(dim=1).to(streams.dtype)
    if not weights.is_head and next_mix is not None:
        next_mix.copy_(numbers[:, size:])
    if taken is not None:
        taken.copy_(x)
    if out is not None:
        assert norm is not None
        x = x.float()
        out.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm_eps) * norm)


def _whole(output: Tensor | PartList) -> Tensor:
    return sum_of_parts(output if isinstance(output, Tensor) else torch.stack(output.tensors))


def settled(numbers: Tensor, weights: StreamWeights) -> Tensor:
    """numbers [N, S + S^2] of a connection -> the mix [N, S + S^2] that a sub-block's output is merged by."""
    size = weights.streams
    combination = balanced(numbers[:, size:].unflatten(-1, (size, size)), weights.eps, weights.iterations)
    return torch.cat([2.0 * torch.sigmoid(numbers[:, :size]), combination.flatten(1)], dim=1)


def balanced(combination: Tensor, eps: float, iterations: int) -> Tensor:
    """Softmax of each row, then rows and columns scaled in turn, columns last (Sinkhorn and Knopp)."""
    c = combination.softmax(dim=-1) + eps
    c = c / (c.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(dim=2, keepdim=True) + eps)
        c = c / (c.sum(dim=1, keepdim=True) + eps)
    return c
