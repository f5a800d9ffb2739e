"""Weights as they are stored: plain tensors, or codes of 4 or 8 bits with a scale (and shift) for each group of inputs.

The functions below take either kind, so that loading can reorder heads and fuse projections without unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale in GGUF's Q4_0, Q4_1 and Q8_0."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] as codes * scale + shift, scale and shift by output and group of inputs."""

    codes: Tensor
    """[out, in] uint8 0..15 of 4 bits, int8, or float8_e4m3fn"""
    scale: Tensor
    """[out, in/group] float32"""
    shift: Tensor | None
    """[out, in/group] float32; None is 0."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale: 32 in GGUF, 128 in published FP8 checkpoints."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def is_4bit(self) -> bool:
        return self.codes.dtype == torch.uint8

    def dense(self) -> Tensor:
        """[out, in] float32"""
        groups = self.codes.float().view(self.codes.shape[0], -1, self.group)
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
    size = weight.group
    groups = index.view(-1, size) if index.numel() % size == 0 else None
    if groups is None or bool((groups != groups[:, :1] + torch.arange(size)).any() | (groups[:, 0] % size != 0).any()):
        return weight.dense()[:, index]
    block = groups[:, 0] // size
    shift = None if weight.shift is None else weight.shift[:, block]
    return GroupedWeight(weight.codes[:, index], weight.scale[:, block], shift)


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """One weight with the outputs of all, in order; codes stay codes when all are of one kind."""
    grouped = [w for w in weights if isinstance(w, GroupedWeight)]
    if len(grouped) < len(weights) or len({(w.codes.dtype, w.group) for w in grouped}) > 1:
        plain = [dense(w) for w in weights]
        widest = max((w.dtype for w in plain), key=lambda d: d.itemsize)
        return torch.cat([w.to(widest) for w in plain])
    shifts = [torch.zeros_like(w.scale) if w.shift is None else w.shift for w in grouped]
    shift = None if all(w.shift is None for w in grouped) else torch.cat(shifts)
    return GroupedWeight(torch.cat([w.codes for w in grouped]), torch.cat([w.scale for w in grouped]), shift)


def block_scaled(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Weight:
    """A weight [out, in] in float8_e4m3fn with one scale for each block of ``block`` outputs and inputs.

    scale [ceil(out/rows), ceil(in/columns)]: value = code * scale in float32, as DeepSeek and Qwen publish FP8. The
    scales are repeated for every output, so that outputs can be put in another order; where the inputs do not divide
    into blocks the weight is unpacked.
    """
    rows, columns = block
    by_output = scale.float().repeat_interleave(rows, dim=0)[: codes.shape[0]]
    if codes.shape[1] % columns == 0:
        return GroupedWeight(codes, by_output.contiguous(), None)
    return codes.float() * by_output.repeat_interleave(columns, dim=1)[:, : codes.shape[1]]
