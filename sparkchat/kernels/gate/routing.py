"""Where the rows of a batch go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.experts.plan import most_items


@dataclass(frozen=True)
class Routing:
    """The choices of N rows, k each, among E experts. Choice c of a row n is number n * k + c."""

    weights: Tensor
    """[N, k] float32, experts ascending"""
    chosen: Tensor
    """[N, k] int32 experts, ascending"""
    lists: Tensor
    """[E, N * k] int32: the numbers of the choices that name an expert, ascending; what is behind them means nothing"""
    counts: Tensor
    """[1 + E] int32: how many items there are; then how many choices name each expert"""
    items: Tensor
    """[most items] int32: expert + 65536 * place of the first choice in its list, experts ascending"""

    @classmethod
    def empty(cls, rows: int, per_row: int, experts: int, device: torch.device) -> Routing:
        """Buffers for so many rows; they may stand in a CUDA graph and be used again for as many rows."""

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        weights = torch.empty((rows, per_row), device=device)
        return cls(
            weights, ints(rows, per_row), ints(experts, rows * per_row), ints(1 + experts),
            ints(most_items(rows, per_row, experts)),
        )  # fmt: skip
