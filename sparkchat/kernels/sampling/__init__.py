"""Laws as logits and five numbers, the same for drafts and for the target. See ``engine/sampling.py`` for the rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
SLACK = 1e-6
VOCAB_BLOCK = 128
"""Tokens whose weights are summed together before a draw."""
ALL_TIES = 2**31 - 1


@dataclass(frozen=True)
class DrawSettings:
    """Settings of R requests, on the device."""

    temperature: Tensor
    """[R] float32; below 1e-5 means greedy"""
    top_k: Tensor
    """[R] int32, 0 for no limit"""
    top_p: Tensor
    """[R] float32, 1 for all"""
    min_p: Tensor
    """[R] float32, 0 for all"""
    seeds: Tensor
    """[R] int64, the bits of the 64 bit seed"""
    rounds: Tensor
    """[R] int64, decode steps of the request so far"""

    @classmethod
    def empty(cls, requests: int, device: torch.device) -> DrawSettings:
        """Greedy settings to write into."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((requests,), value, dtype=dtype, device=device)

        return cls(
            full(0.0, torch.float32),
            full(0, torch.int32),
            full(1.0, torch.float32),
            full(0.0, torch.float32),
            full(0, torch.int64),
            full(0, torch.int64),
        )


@dataclass(frozen=True)
class Laws:
    """The laws of M rows: p(v) = exp((z_v - peak) / temperature) * scale where z_v > least, or z_v == least and
    v <= last_tie; 0 elsewhere. Greedy rows are one-hot."""

    logits: Tensor
    """[M, V], any floating dtype"""
    peak: Tensor
    """[M] float32; NaN where the logits are no numbers"""
    temperature: Tensor
    """[M] float32, 1 on greedy rows"""
    least: Tensor
    """[M] float32"""
    scale: Tensor
    """[M] float32"""
    last_tie: Tensor
    """[M] int32"""

    @classmethod
    def empty(cls, logits: Tensor) -> Laws:
        """Static buffers for the rows of ``logits`` [M, V]."""
        numbers = [torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(4)]
        return cls(logits, *numbers, torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device))

    def probabilities(self) -> Tensor:
        """[M, V] float32: the law written out, for tests and for the host."""
        z = self.logits.float()
        ids = torch.arange(z.shape[1], device=z.device)
        tie = (z == self.least[:, None]) & (ids <= self.last_tie[:, None])
        weights = torch.exp((z - self.peak[:, None]) / self.temperature[:, None]) * self.scale[:, None]
        return torch.where((z > self.least[:, None]) | tie, weights, 0.0)


@dataclass(frozen=True)
class LawScratch:
    """What finding and drawing from M laws needs beside them."""

    block_max: Tensor
    """[M, blocks] float32"""
    block_sum: Tensor
    """[M, blocks] float32"""
    entries: Tensor
    """[M, blocks] int32"""

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> LawScratch:
        shape = (rows, -(-vocab // VOCAB_BLOCK))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )
