"""A weight of 8 bits in the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8.plan import is_expanded, plan_of
from sparkchat.kernels.tiles.packing import (
    FP8_BLOCK,
    OUTS,
    STEP,
    fits,
    interleaved,
    pack_fp8,
    pack_fp8_scales,
    unpack_fp8,
)


@dataclass(frozen=True)
class TiledFp8:
    """A weight [out, in] of 8 bits a code (kernels/tiles/packing.py)."""

    tiles: Tensor
    """[out/32, in/128, 2, 2048] int8"""
    scales: Tensor
    """[out/32, in/128, 2] float32"""

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> TiledFp8:
        """codes [out, in] float8_e4m3fn, scales [ceil(out/128), ceil(in/128)] float32.

        Raises ValueError where the weight does not lie in tiles (``takes``).
        """
        return cls(pack_fp8(codes), pack_fp8_scales(scales.float(), codes.shape[0]))

    @classmethod
    def of_two(cls, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> TiledFp8:
        """Codes and scales of two weights of one shape, whose tiles come in pairs: those of gate and up."""
        outs = first[0].shape[0]
        one, two = (
            pack_fp8_scales(scales.float(), outs).transpose(1, 2).flatten(0, 1) for _, scales in (first, second)
        )
        codes = interleaved(first[0].view(torch.int8), second[0].view(torch.int8)).view(torch.float8_e4m3fn)
        return cls(pack_fp8(codes), torch.stack([one, two], dim=-1).contiguous())

    @property
    def shape(self) -> tuple[int, int]:
        pairs, steps = self.scales.shape[:2]
        return pairs * 2 * OUTS, steps * STEP

    def codes(self) -> Tensor:
        """[out, in] float8_e4m3fn as they are stored"""
        return unpack_fp8(self.tiles)

    def dense(self) -> Tensor:
        """[out, in] float32"""
        outs, size = self.shape
        scales = self.scales.transpose(1, 2).reshape(outs // OUTS, 1, size // STEP, 1)
        return (self.codes().float().view(outs // OUTS, OUTS, size // STEP, STEP) * scales).view(outs, size)

    def outs(self, first: int, last: int) -> TiledFp8:
        """The outputs from ``first`` to ``last``, multiples of 32, in the same memory."""
        cut = slice(first // (2 * OUTS), last // (2 * OUTS))
        return TiledFp8(self.tiles[cut], self.scales[cut])

    def splits(self, rows: int, is_rounded: bool = False) -> int:
        """Parts of the inputs that ``fp8_linear`` sums apart of so many rows where it may."""
        return 1 if is_expanded(*self.shape, rows, is_rounded) else plan_of(*self.shape).splits


def takes(codes: Tensor, block: tuple[int, int]) -> bool:
    """Whether ``TiledFp8`` can hold a weight of these codes, with a scale to each ``block`` of outputs and inputs."""
    return codes.dtype == torch.float8_e4m3fn and codes.dim() == 2 and block == FP8_BLOCK and fits(*codes.shape)
