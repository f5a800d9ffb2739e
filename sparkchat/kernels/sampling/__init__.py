"""Laws as logits and five numbers, the same for drafts and for the target. See ``engine/sampling.py`` for the rules."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
SLACK = 1e-6
VOCAB_BLOCK = 128
"""Tokens whose weights are summed together before a draw."""
ALL_TIES = 2**31 - 1
BINS, COPIES = 1024, 4
"""Bins of the logit by which filtered rows are counted, and copies of them that share the additions."""
ROOM = 2048
"""Tokens that may lie in the bin of a threshold before the whole vocabulary is searched."""
INFO = 4


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
class NearScratch:
    """What finding the thresholds of M filtered rows needs besides; see ``select.py``. Bins must start at zero."""

    counts: Tensor
    """[M, copies, bins] int32"""
    masses: Tensor
    """[M, copies, bins] int64"""
    near: Tensor
    """[M, ROOM] float32"""
    near_id: Tensor
    """[M, ROOM] int32"""
    near_count: Tensor
    """[M] int32"""
    near_mass: Tensor
    """[M, blocks] int64"""
    sure: Tensor
    """[M, blocks] float32"""
    info: Tensor
    """[M, 4] float32: peak, least logit of the bins, bins a unit, total"""
    found: Tensor
    """[M, 2] int64: whether the near tokens are listed, and the mass above them"""

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> NearScratch:
        blocks = -(-vocab // VOCAB_BLOCK)

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        return cls(
            make(torch.int32, COPIES, BINS),
            make(torch.int64, COPIES, BINS),
            make(torch.float32, ROOM),
            make(torch.int32, ROOM),
            make(torch.int32),
            make(torch.int64, blocks),
            make(torch.float32, blocks),
            make(torch.float32, INFO),
            make(torch.int64, 2),
        )


@dataclass(frozen=True)
class LawScratch:
    """What finding and drawing from M laws needs beside them."""

    block_max: Tensor
    """[M, blocks] float32"""
    block_sum: Tensor
    """[M, blocks] float32"""
    entries: Tensor
    """[M, blocks] int32"""
    near: NearScratch | None = None
    """Given, filters are found by all multiprocessors together, in two more launches; without, by one a row."""

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device, has_filters: bool = False) -> LawScratch:
        shape = (rows, -(-vocab // VOCAB_BLOCK))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            NearScratch.empty(rows, vocab, device) if has_filters else None,
        )

    def first(self, rows: int) -> LawScratch:
        """That of the first rows alone."""
        near = (
            None
            if self.near is None
            else NearScratch(*(getattr(self.near, field.name)[:rows] for field in fields(NearScratch)))
        )
        return LawScratch(self.block_max[:rows], self.block_sum[:rows], self.entries[:rows], near)
