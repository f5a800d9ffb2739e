"""Rotation of the trailing dimensions of a head by position, in neighbouring pairs, and its inverse.

Layers without compressed entries turn by the plain base; everything in a layer with them turns by the other base,
stretched by YaRN at every position and without its factor on the amplitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.config import WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.rope import RopeTable


@dataclass(frozen=True)
class Rotations:
    """Angles of some rows."""

    cos: Tensor
    """[n, rope_dim/2] float32"""
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """x [n, ..., c] -> the same with its last rope_dim dimensions turned; float32."""
        return self._turned(x, self.sin)

    def turn_back(self, x: Tensor) -> Tensor:
        """Undo ``turn``."""
        return self._turned(x, -self.sin)

    def _turned(self, x: Tensor, sin: Tensor) -> Tensor:
        size = 2 * self.cos.shape[-1]
        spread = (self.cos.shape[0], *[1] * (x.dim() - 2), size // 2)
        cos, sin = self.cos.view(spread), sin.view(spread)
        plain, turned = x.float().split([x.shape[-1] - size, size], dim=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        # Single products and sums: a fused complex product rounds differently at the end of an array.
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return torch.cat([plain, pairs.flatten(-2)], dim=-1)


class Ropes:
    """Both tables of a model."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        self._device = device
        self._plain = RopeTable(config.rope, config.rope_dim, device)
        self._compressed = RopeTable(config.compress_rope, config.rope_dim, device)

    def rows(self, ratio: int, positions: Tensor, end: int) -> Rotations:
        """positions [n] int64, all below ``end``, in a layer of this ratio."""
        return _rotations(self._table(ratio).rows(positions, end))

    def prepare(self, end: int) -> None:
        """Compute what lies below ``end`` now, so that ``at`` can be captured."""
        for table in (self._plain, self._compressed):
            table.prepare(end)

    def at(self, ratio: int, positions: Tensor) -> Rotations:
        """As ``rows``, for positions that ``prepare`` has reached."""
        return _rotations(self._table(ratio).at(positions))

    def flat(self, ratio: int, end: int) -> Tensor:
        """[end, rope_dim] float32: cosine and sine of every pair side by side, of all positions below ``end``."""
        table = self._table(ratio)
        table.prepare(end)
        turns = table.at(torch.arange(end, device=self._device))
        return torch.view_as_real(turns).flatten(1).contiguous()

    def _table(self, ratio: int) -> RopeTable:
        return self._plain if ratio == WINDOW_ONLY else self._compressed


def _rotations(turns: Tensor) -> Rotations:
    return Rotations(turns.real.contiguous(), turns.imag.contiguous())
