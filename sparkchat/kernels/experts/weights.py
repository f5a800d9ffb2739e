"""The weights of a layer's experts in the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.tiles.packing import (
    FP4_BLOCK,
    MOST_FP4_SCALE,
    fits,
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
    """[E, out, in/2] int8"""
    scales: Tensor
    """[E, out/16, in/128, 16] int32"""

    @classmethod
    def in_place(cls, codes: Tensor, scales: Tensor) -> TiledBank:
        """codes [E, out, in/2] int8 and scales [E, out, in/32] uint8 as published; ``codes`` are overwritten.

        Some experts at a time, so that no second copy of the bank is ever in memory.
        """
        for some in codes.split(_AT_ONCE):
            some.copy_(pack_fp4(some))
        return cls(codes, pack_fp4_scales(scales))

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

    gate: TiledBank
    up: TiledBank
    """[E, width, d]"""
    down: TiledBank
    """[E, d, width]"""
    shared_gate: TiledFp8
    shared_up: TiledFp8
    """[width, d]"""
    shared_down: TiledFp8
    """[d, width]"""

    def __post_init__(self) -> None:
        width, size = self.shared_gate.shape
        experts = self.gate.tiles.shape[0]
        wanted = {
            "gate": (self.gate.tiles.shape, (experts, width, size // 2)),
            "up": (self.up.tiles.shape, (experts, width, size // 2)),
            "down": (self.down.tiles.shape, (experts, size, width // 2)),
            "shared_up": (self.shared_up.shape, (width, size)),
            "shared_down": (self.shared_down.shape, (size, width)),
        }
        for name, (got, want) in wanted.items():
            if tuple(got) != want:
                raise ValueError(f"{name} of the experts is {tuple(got)}, not {want}")
