"""How a weight's product is cut and run.

What the sums of a row look like (``splits``, ``part_k``) follows from the weight's shape alone, so that a row never
depends on the rows beside it; the rest is speed and may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

MULTIPROCESSORS = 132
"""Of an H200; plans are tuned for it and right on any card."""
PREFETCH = 1024
"""Bytes of each weight row of a tile called into L2 while the kernel before still runs (only with overlap)."""


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
    stages: int
    """Depth of the pipeline of loads."""
    warps: int = 4
    prefetch: int = PREFETCH
    is_bulk: bool = False
    """Weights come by the bulk copy engine, not by loads of every thread."""


def plan_of(weight: Tensor, epilogue: str, rows: int = 16) -> Plan:
    """The plan of ``weight`` [n, k] for tiles of ``rows`` rows."""
    return plan(weight.shape[0], weight.shape[1], weight.element_size(), epilogue, rows)


@cache
def plan(n: int, k: int, element_size: int, epilogue: str, rows: int = 16) -> Plan:
    block_k = 32 if element_size == 4 else 64 if k < 1024 else 128
    if element_size == 1:
        block_k = 128  # a block of weights that share a scale
    steps = -(-k // block_k)
    splits = 1
    if epilogue == "partials":
        tiles = -(-n // 64)
        # Two programs on every multiprocessor, less a few that stay idle.
        while splits < 8 and tiles * splits < 1.9 * MULTIPROCESSORS and steps // (2 * splits) >= 4:
            splits *= 2
    stages = 2 if element_size == 4 else 5 if rows <= 16 else 4
    return Plan(64, block_k, splits, -(-steps // splits) * block_k, stages)
