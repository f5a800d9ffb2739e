"""The tensors of one module by their published names, and how its projections are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.formats import Stored, dense
from sparkchat.models.deepseek_v4.rounding import FP8_ROW_BLOCK, round_e4m3
from sparkchat.models.layers import RMSNorm
from sparkchat.models.linear import Linear, make_linear


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
        self._inner = inner
        self.dtype, self.kernel = inner.dtype, inner.kernel

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        return self._inner(round_e4m3(x, FP8_ROW_BLOCK), is_long)


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Scope:
    """The tensors under one prefix, and what all modules of a model share."""

    reader: TensorReader
    device: torch.device
    dtype: torch.dtype
    """Of activations and projections."""
    has_roundings: bool = False
    """Whether activations, latents and index keys are rounded as the published model was trained."""
    reduce: Callable[[Tensor], Tensor] = _alone
    """Sums [N, d] over the ranks that hold slices of the heads and of every expert's width."""
    prefix: str = ""

    def within(self, name: str) -> Scope:
        """The tensors under ``name.``"""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is no projection, on the device."""
        return dense(self.reader.take(self.prefix + name), dtype).to(self.device)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), eps, self.device)

    def linear(self, name: str, *, dtype: torch.dtype | None = None, has_fp8_input: bool = False) -> Linear:
        """The projection ``name.weight``; ``dtype`` None is that of the activations.

        ``has_fp8_input``: the published product rounds its input.
        """
        return self._packed(self._weight(name, dtype), has_fp8_input)

    def linears(self, name: str, rows_each: int) -> list[Linear]:
        """The projection ``name.weight`` cut into groups of ``rows_each`` outputs."""
        return [self._packed(rows, False) for rows in self._weight(name, None).split(rows_each)]

    def _weight(self, name: str, dtype: torch.dtype | None) -> Tensor:
        return dense(self.reader.take(f"{self.prefix}{name}.weight"), dtype or self.dtype)

    def _packed(self, weight: Tensor, has_fp8_input: bool) -> Linear:
        linear = make_linear(weight, None, device=self.device, dtype=weight.dtype)
        return RoundedLinear(linear) if has_fp8_input and self.has_roundings else linear
