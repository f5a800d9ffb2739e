"""The tensors of one module by their published names, and how its projections are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.formats import ScaledWeight, Stored, dense
from sparkchat.models.deepseek_v4.packed import keep, unpack
from sparkchat.models.deepseek_v4.rounding import FP8_ROW_BLOCK, round_e4m3
from sparkchat.models.layers import RMSNorm
from sparkchat.models.linear import Linear
from sparkchat.models.parallel import ALONE, Group


class TensorReader(Protocol):
    """Where stored tensors come from, by whole name: ``layers.0.attn.wq_a.weight``."""

    def take(self, name: str) -> Stored:
        """Each tensor is asked for once."""
        ...


class TensorTable:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def take(self, name: str) -> Stored:
        return self._tensors[name]


class RoundedLinear:
    """A projection whose input is first rounded as fp8 products round it: e4m3, 128 inputs of a row to a scale."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner
        self.dtype, self.kernel = inner.dtype, inner.kernel

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        return self.inner(round_e4m3(x, FP8_ROW_BLOCK), is_long)


@dataclass(frozen=True)
class Scope:
    """The tensors under one prefix, and what all modules of a model share."""

    reader: TensorReader
    device: torch.device
    dtype: torch.dtype
    """Of activations and projections."""
    has_roundings: bool = False
    """Whether activations, latents and index keys are rounded as the published model was trained."""
    is_packed: bool = False
    """Whether weights stay in memory as they are stored, or are unpacked when they are taken."""
    group: Group = ALONE
    """The ranks that share the heads, the width of every expert and the vocabulary; the reader gives this one's."""
    prefix: str = ""

    def within(self, name: str) -> Scope:
        """The tensors under ``name.``"""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is no projection, on the device."""
        return dense(self.reader.take(self.prefix + name), dtype).to(self.device)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), eps, self.device)

    def table(self, name: str, dtype: torch.dtype) -> Tensor:
        """Rows to be looked up, on the device: as stored where weights are packed, else in ``dtype``."""
        weight = self.reader.take(self.prefix + name)
        if self.is_packed and isinstance(weight, Tensor):
            return weight.to(self.device)
        return dense(weight, dtype).to(self.device)

    def linear(self, name: str, *, dtype: torch.dtype | None = None, has_fp8_input: bool = False) -> Linear:
        """The projection ``name.weight``; ``dtype`` None is that of the activations.

        ``has_fp8_input``: the published product rounds its input.
        """
        return self.multiply_by(self.weight(name), dtype, has_fp8_input)

    def cut(self, weight: Stored, rows_each: int) -> list[Linear]:
        """A projection cut into groups of ``rows_each`` outputs."""
        if self.is_packed:
            weight = weight.to(self.device)
        parts = [_outputs(weight, first, first + rows_each) for first in range(0, weight.shape[0], rows_each)]
        return [self.multiply_by(part, None, False) for part in parts]

    def weight(self, name: str) -> Stored:
        """``name.weight`` as it is stored, wherever that is."""
        return self.reader.take(f"{self.prefix}{name}.weight")

    def multiply_by(self, weight: Stored, dtype: torch.dtype | None, has_fp8_input: bool) -> Linear:
        """The projection by a weight."""
        make = keep if self.is_packed else unpack
        linear = make(weight, dtype or self.dtype, self.device)
        return RoundedLinear(linear) if has_fp8_input and self.has_roundings else linear


def _outputs(weight: Stored, first: int, last: int) -> Stored:
    return weight.part(0, first, last) if isinstance(weight, ScaledWeight) else weight[first:last]
