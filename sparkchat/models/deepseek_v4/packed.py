"""Projections that stay in memory as they are stored, and how they are multiplied.

This is the one place where it is decided what multiplies a stored weight. The reference unpacks it for every use, which
gives bit for bit what unpacking once gives; a kernel that reads the codes themselves takes its place in ``keep``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.formats import ScaledWeight, Stored, dense
from sparkchat.models.linear import Linear, make_linear


class StoredLinear:
    """The reference: unpack the weight, multiply, forget what was unpacked."""

    kernel = "unpacked-each-use"

    def __init__(self, weight: Stored, dtype: torch.dtype) -> None:
        """``weight`` [out, in] on the device; ``dtype`` of inputs and outputs."""
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        plain = dense(self.weight, self.dtype)
        return make_linear(plain, None, device=plain.device, dtype=self.dtype)(x, is_long)


class WeightBank:
    """Weights of one shape side by side in memory, as a product over several of them wants them: those of experts."""

    def __init__(self, codes: Tensor, scales: Tensor | None, block: tuple[int, int]) -> None:
        self.codes, self.scales, self.block = codes, scales, block
        """[E, ...] each: as those of ``ScaledWeight``; ``scales`` None where the codes are plain numbers."""

    @classmethod
    def fill(cls, count: int, take: Callable[[int], Stored], device: torch.device) -> WeightBank:
        """Take ``count`` weights one after the other into one piece of memory of the device."""
        bank: WeightBank | None = None
        for index in range(count):
            weight = take(index)
            codes, scales = (weight.codes, weight.scales) if isinstance(weight, ScaledWeight) else (weight, None)
            if bank is None:
                block = weight.block if isinstance(weight, ScaledWeight) else (1, 1)
                room = [None if t is None else t.new_empty((count, *t.shape), device=device) for t in (codes, scales)]
                assert room[0] is not None
                bank = cls(room[0], room[1], block)
            bank.codes[index] = codes
            if bank.scales is not None:
                bank.scales[index] = scales
        if bank is None:
            raise ValueError("a bank needs a weight")
        return bank

    def __getitem__(self, index: int) -> Stored:
        """A view of one weight."""
        if self.scales is None:
            return self.codes[index]
        return ScaledWeight(self.codes[index], self.scales[index], self.block)


def keep(weight: Stored, dtype: torch.dtype, device: torch.device) -> Linear:
    """A projection by a weight that stays as it is stored; one of plain numbers in ``dtype`` needs no unpacking."""
    weight = weight.to(device)
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        return make_linear(weight, None, device=device, dtype=dtype)
    return StoredLinear(weight, dtype)


def unpack(weight: Stored, dtype: torch.dtype, device: torch.device) -> Linear:
    """A projection by a weight that is unpacked once and for all: faster, and larger in memory."""
    return make_linear(dense(weight, dtype), None, device=device, dtype=dtype)
