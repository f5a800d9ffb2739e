"""Rows over caches of latents as DeepSeek V4 lays them out, for the tests of its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAN = float("nan")
FIRST_SLOT = 16


@dataclass(frozen=True)
class Rows:
    """Rows of some spans, as device tensors."""

    positions: Tensor
    rows: Tensor
    starts: Tensor
    span_starts: Tensor
    """[N] position of the first row of each row's span"""
    ends: Tensor
    first_seen: Tensor

    def row(self, n: int) -> Rows:
        """Row n as the only one of its request."""
        one = torch.tensor([0, 1], dtype=torch.int32, device=self.rows.device)
        cut = [t[n : n + 1] for t in (self.positions, self.rows)]
        return Rows(*cut, one, self.positions[n : n + 1], self.ends[n : n + 1], self.first_seen[n : n + 1])


def rows_of(
    spans: Sequence[tuple[int, int, int]], window: int, device: torch.device, *, is_block: bool = False
) -> Rows:
    """``spans``: (cache row, position of the first row, rows)."""
    positions = [start + i for _, start, count in spans for i in range(count)]
    rows = [row for row, _, count in spans for _ in range(count)]
    begins = [start for _, start, count in spans for _ in range(count)]
    bounds = [0]
    for _, _, count in spans:
        bounds.append(bounds[-1] + count)
    ends = [start + count if is_block else start + i + 1 for _, start, count in spans for i in range(count)]
    first_seen = [b - window if is_block else p - window + 1 for b, p in zip(begins, positions, strict=True)]

    def numbers(values: list[int], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return Rows(
        numbers(positions), numbers(rows, torch.int32), numbers(bounds, torch.int32), numbers(begins), numbers(ends),
        numbers(first_seen),
    )  # fmt: skip


def rope_of(context: int, size: int, device: torch.device) -> Tensor:
    """[context, size] cosine and sine side by side"""
    speeds = 100.0 ** (-torch.arange(size // 2, device=device) * 2 / size)
    angles = torch.arange(context, device=device)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).contiguous()


def latents_of(
    spans: Sequence[tuple[int, int, int]],
    ring: int,
    ratio: int,
    size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[4, slots, size] with a window's ring and entries as far as these spans go; what was never written is NaN."""
    longest = max(start + count for _, start, count in spans)
    entries = math.ceil(longest / ratio) if ratio else 0
    cache = torch.full((4, FIRST_SLOT + ring + entries + 16, size), NAN, device=device, dtype=dtype)
    for row, start, count in spans:
        end = start + count
        written = torch.arange(max(0, end - ring), end, device=device) % ring
        cache[row, FIRST_SLOT + written] = torch.randn(len(written), size, device=device).to(dtype)
        if ratio:
            held = end // ratio
            first = FIRST_SLOT + ring
            cache[row, first : first + held] = torch.randn(held, size, device=device).to(dtype)
    return cache
