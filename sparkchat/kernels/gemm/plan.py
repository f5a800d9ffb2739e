"""How a weight's product is cut: by its shape alone, so that a row's sums never depend on the rows beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

MULTIPROCESSORS = 132
"""Of an H200; plans are tuned for it and right on any card."""


@dataclass(frozen=True)
class Plan:
    """Tiles of one product."""

    block_out: int
    """Outputs of a tile."""
    block_k: int
    splits: int
    """Parts of k summed apart."""
    part_k: int
    """Inputs of a part, a multiple of ``block_k``."""


def plan_of(weight: Tensor, epilogue: str) -> Plan:
    """The plan of ``weight`` [n, k]."""
    return plan(weight.shape[0], weight.shape[1], weight.element_size(), epilogue)


@cache
def plan(n: int, k: int, element_size: int, epilogue: str) -> Plan:
    block_k = 128 if k >= 1024 and element_size <= 2 else 64 if element_size <= 2 else 32
    if element_size == 1:
        block_k = 128  # a block of weights that share a scale
    steps = -(-k // block_k)
    splits = 1
    if epilogue == "partials":
        tiles = -(-n // 64)
        # Two programs on every multiprocessor, less a few that stay idle.
        while splits < 8 and tiles * splits < 1.9 * MULTIPROCESSORS and steps // (2 * splits) >= 4:
            splits *= 2
    return Plan(64, block_k, splits, -(-steps // splits) * block_k)
