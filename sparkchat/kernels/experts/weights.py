"""The weights of a layer's experts in the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.tiles.packing import (
    FP4_BLOCK,
    MOST_FP4_SCALE,
    STEP,
    fits,
    interleaved,
    pack_fp4,
    pack_fp4_scales,
    unpack_fp4,
    unpack_fp4_scales,
)

_AT_ONCE = 16


@dataclass(frozen=True)
class TiledBank:
    """The same projection of all experts, 4 bits a code (kernels/tiles/packing.py)."""

    tiles: Tensor
    """[E, out/32, in/128, 2, 1024] int8"""
    scales: Tensor
    """[E, out/32, in/128, 2, 16, 4] uint8"""

    @classmethod
    def in_place(cls, codes: Tensor, scales: Tensor) -> TiledBank:
        """codes [E, out, in/2] int8 and scales [E, out, in/32] uint8 as published; ``codes`` are overwritten.

        Some experts at a time, so that no second copy of the bank is ever in memory.
        """
        count, out, width = codes.shape
        tiles = codes.view(count, out // 32, width // 64, 2, 1024)
        for some, plain in zip(tiles.split(_AT_ONCE), codes.split(_AT_ONCE), strict=True):
            some.copy_(pack_fp4(plain))
        return cls(tiles, pack_fp4_scales(scales))

    @classmethod
    def of_two(cls, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> TiledBank:
        """Codes and scales of two banks of one shape, whose tiles come in pairs: those of gate and up."""
        count, out, width = first[0].shape
        tiles = first[0].new_empty((count, out // 16, width // 64, 2, 1024))
        cut = [tiles.split(_AT_ONCE), first[0].split(_AT_ONCE), second[0].split(_AT_ONCE)]
        for some, one, two in zip(*cut, strict=True):
            some.copy_(pack_fp4(interleaved(one, two)))
        return cls(tiles, pack_fp4_scales(interleaved(first[1], second[1])))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs"""
        count, pairs, steps = self.tiles.shape[:3]
        return count, pairs * 32, steps * STEP

    def codes(self, expert: int) -> Tensor:
        """[out, in/2] int8 as published"""
        return unpack_fp4(self.tiles[expert])

    def block_scales(self, expert: int) -> Tensor:
        """[out, in/32] uint8 as published"""
        return unpack_fp4_scales(self.scales[expert])


def takes(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
    """Whether ``TiledBank`` can hold codes [E, out, in/2] with these scales, one to each ``block``."""
    if codes.dtype != torch.int8 or block != FP4_BLOCK or not fits(codes.shape[1], 2 * codes.shape[2]):
        return False
    return codes.shape[0] <= 0x10000 and bool((scales <= MOST_FP4_SCALE).all())


@dataclass(frozen=True)
class TiledExperts:
    """A layer's experts; this rank's part of their width."""

    gate_up: TiledBank
    """E times [2 width, d], in turn 16 outputs of gate and of up"""
    down: TiledBank
    """E times [d, width]"""
    shared_gate_up: TiledFp8
    """[2 width, d], in the same order"""
    shared_down: TiledFp8
    """[d, width]"""

    def __post_init__(self) -> None:
        size, width = self.shared_down.shape
        wanted = {
            "gate_up": (self.gate_up.shape, (self.count, 2 * width, size)),
            "down": (self.down.shape, (self.count, size, width)),
            "shared_gate_up": (self.shared_gate_up.shape, (2 * width, size)),
        }
        for name, (got, want) in wanted.items():
            if got != want:
                raise ValueError(f"{name} of the experts is {got}, not {want}")

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]

    @property
    def size(self) -> int:
        """d"""
        return self.shared_down.shape[0]

    @property
    def width(self) -> int:
        return self.shared_down.shape[1]
