"""Projections that stay in memory as they are stored, and how they are multiplied.

This is the one place where it is decided what multiplies a stored weight. The reference unpacks it for every use, which
gives bit for bit what unpacking once gives; on a GPU kernels that read the codes themselves take its place where a
weight lies in their tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkchat.kernels.cards import card_of
from sparkchat.kernels.experts import weights as expert_weights
from sparkchat.kernels.fp8 import TiledFp8, fp8_linear, make_room, takes
from sparkchat.kernels.gemm import small_gemm
from sparkchat.models.deepseek_v4.formats import ScaledWeight, Stored, decode_scales, dense
from sparkchat.models.linear import Linear, PlainLinear, make_linear

MOST_ROWS = 512
"""Rows that kernels of a captured step take; a long prompt has more."""
FEW_ROWS = 64
"""Rows of one tile: of more, a plain weight is read again for each tile, or multiplied by the library."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply stored weights there by inputs of ``dtype``, in the shapes that they take."""
    return device.type == "cuda" and dtype == torch.bfloat16 and card_of(device).reads_tiles


class StoredLinear:
    """The reference: unpack the weight, multiply, forget what was unpacked."""

    kernel = "unpacked-each-use"

    def __init__(self, weight: Stored, dtype: torch.dtype) -> None:
        """``weight`` [out, in] on the device; ``dtype`` of inputs and outputs."""
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        plain = dense(self.weight, self.dtype)
        return make_linear(plain, None, device=plain.device, dtype=self.dtype)(x, is_long)


class TiledLinear:
    """Codes of 8 bits multiplied as they are, or of many rows by the library once they are expanded: by
    ``sparkchat.kernels.fp8``."""

    kernel = "fp8-tiles"

    def __init__(self, weight: TiledFp8, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """``dtype`` of inputs, and of outputs where ``out_dtype`` is None."""
        self.weight, self.dtype, self._out_dtype = weight, dtype, out_dtype or dtype
        if weight.tiles.is_cuda:
            # When weights are loaded, so that what memory is left for caches is known without it.
            make_room(weight.tiles.device)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=self._out_dtype, device=x.device)
        fp8_linear(x if x.stride(-1) == 1 else x.contiguous(), self.weight, out)
        return out


def multiply_into(linear: Linear, x: Tensor, out: Tensor) -> None:
    """out [N, outs] = the product of x [N, in], written where ``out`` lies."""
    if isinstance(linear, TiledLinear):
        fp8_linear(x, linear.weight, out)
    elif isinstance(linear, PlainLinear) and linear.bias is None and linear.weight.dtype == out.dtype:
        if has_kernels(x.device, x.dtype) and x.shape[0] <= FEW_ROWS:
            small_gemm(x, linear.weight, out)
        else:
            torch.mm(x, linear.weight.T, out=out)
    else:
        out.copy_(linear(x))


def lies_in_tiles(weight: Stored) -> bool:
    """Whether kernels take a weight: one of 8 bits whose shape and blocks are those of tiles."""
    return isinstance(weight, ScaledWeight) and takes(weight.codes, weight.block)


def fp8_parts(weight: Stored, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [out, in], and float32 scales of blocks of 128 x 128, on the device."""
    assert isinstance(weight, ScaledWeight)
    return weight.codes.to(device), decode_scales(weight.scales).to(device)


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

    def has_tiles(self) -> bool:
        """Whether kernels take it."""
        return self.scales is not None and expert_weights.takes(self.codes, self.scales, self.block)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of a bank that has some."""
        assert self.scales is not None
        return self.codes, self.scales


def keep(weight: Stored, dtype: torch.dtype, device: torch.device) -> Linear:
    """A projection by a weight that stays as it is stored; one of plain numbers in ``dtype`` needs no unpacking."""
    weight = weight.to(device)
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        return make_linear(weight, None, device=device, dtype=dtype)
    if has_kernels(device, dtype) and lies_in_tiles(weight):
        return TiledLinear(TiledFp8.of(*fp8_parts(weight, device)), dtype)
    return StoredLinear(weight, dtype)


def unpack(weight: Stored, dtype: torch.dtype, device: torch.device) -> Linear:
    """A projection by a weight that is unpacked once and for all: faster, and larger in memory."""
    return make_linear(dense(weight, dtype), None, device=device, dtype=dtype)
