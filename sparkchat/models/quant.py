"""Weights as they are stored: plain tensors, or 4 and 8 bit codes with a scale (and shift) for each group of 32 inputs.

The functions below take either kind, so that loading can reorder heads and fuse projections without unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale: the block size of GGUF's Q4_0, Q4_1 and Q8_0."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] as codes * scale + shift, scale and shift by output and group of inputs."""

    codes: Tensor
    """[out, in] uint8 0..15 of 4 bits, or int8"""
    scale: Tensor
    """[out, in/32] float32"""
    shift: Tensor | None
    """[out, in/32] float32; None is 0."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def is_4bit(self) -> bool:
        return self.codes.dtype == torch.uint8

    def dense(self) -> Tensor:
        """[out, in] float32"""
        groups = self.codes.float().view(self.codes.shape[0], -1, GROUP)
        values = groups.mul_(self.scale.unsqueeze(-1))
        if self.shift is not None:
            values.add_(self.shift.unsqueeze(-1))
        return values.view(self.codes.shape)

    def rows(self, index: Tensor) -> GroupedWeight:
        shift = None if self.shift is None else self.shift[index]
        return GroupedWeight(self.codes[index], self.scale[index], shift)


Weight = Tensor | GroupedWeight


def dense(weight: Weight) -> Tensor:
    """Return [out, in] as a plain tensor; codes become float32."""
    return weight.dense() if isinstance(weight, GroupedWeight) else weight


def take_rows(weight: Weight, index: Tensor) -> Weight:
    """Outputs in another order."""
    return weight.rows(index) if isinstance(weight, GroupedWeight) else weight[index]


def take_columns(weight: Weight, index: Tensor) -> Weight:
    """Inputs in another order; codes stay codes when whole groups move."""
    if not isinstance(weight, GroupedWeight):
        return weight[:, index]
    groups = index.view(-1, GROUP) if index.numel() % GROUP == 0 else None
    if groups is None or bool(
        (groups != groups[:, :1] + torch.arange(GROUP)).any() | (groups[:, 0] % GROUP != 0).any()
    ):
        return weight.dense()[:, index]
    block = groups[:, 0] // GROUP
    shift = None if weight.shift is None else weight.shift[:, block]
    return GroupedWeight(weight.codes[:, index], weight.scale[:, block], shift)


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all, in order; codes stay codes when all are of one kind."""
    grouped = [w for w in weights if isinstance(w, GroupedWeight)]
    if len(grouped) < len(weights) or len({w.codes.dtype for w in grouped}) > 1:
        plain = [dense(w) for w in weights]
        widest = max((w.dtype for w in plain), key=lambda d: d.itemsize)
        return torch.cat([w.to(widest) for w in plain])
    shifts = [torch.zeros_like(w.scale) if w.shift is None else w.shift for w in grouped]
    shift = None if all(w.shift is None for w in grouped) else torch.cat(shifts)
    return GroupedWeight(torch.cat([w.codes for w in grouped]), torch.cat([w.scale for w in grouped]), shift)
