"""How a weight's product is cut and run.

What the sums of a row look like (``splits``, ``part_k``) follows from the weight's shape alone, so that a row never
depends on the rows beside it; the rest is speed and may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from sparkchat.kernels.cards import card_of

MULTIPROCESSORS = 132
"""Of an H200; plans are tuned for it and right on any card."""
PREFETCH = 512
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
    widens: bool = True
    """8 bit weights become bfloat16 by integer instructions, not by the card's conversion."""
    is_bulk: bool = False
    """Weights come by the bulk copy engine, not by loads of every thread."""
    most_rows: int = 64
    """Of a tile, a power of two."""


def plan_of(weight: Tensor, epilogue: str, rows: int = 16, overlaps: bool = False) -> Plan:
    """The plan of ``weight`` [n, k] for tiles of ``rows`` rows, launched with or without overlap, on its card."""
    tuned = plan(weight.shape[0], weight.shape[1], weight.element_size(), epilogue, rows, overlaps)
    return within(tuned, rows, weight.element_size(), card_of(weight.device).shared_bytes)


def within(tuned: Plan, rows: int, element_size: int, shared_bytes: int) -> Plan:
    """As many tiles under way as a card's shared memory holds. Sums stay what they are."""
    # Inputs are at least of 16 bits; of n stages n - 1 lie in shared memory.
    stage = tuned.block_k * (tuned.block_out * element_size + rows * max(2, element_size))
    most = 1 + max(1, shared_bytes // stage)
    return tuned if tuned.stages <= most else replace(tuned, stages=most)


@cache
def plan(n: int, k: int, element_size: int, epilogue: str, rows: int = 16, overlaps: bool = False) -> Plan:
    # The numbers are the best of benchmarks/results/2026-11-30-kernels.md.
    block_k = 32 if element_size == 4 else 64 if k < 1024 else 128
    if element_size == 1:
        block_k = 128  # a block of weights that share a scale
    steps = -(-k // block_k)
    splits = 1
    if epilogue == "partials":
        tiles = -(-n // 64)
        # 16 bit: a program on nearly every multiprocessor, two where a part would still be longer than 32 steps.
        # Others: two, less a few that stay idle.
        while splits < 8 and steps // (2 * splits) >= 4:
            if tiles * splits >= (0.95 if element_size == 2 and steps // splits <= 32 else 1.9) * MULTIPROCESSORS:
                break
            splits *= 2
    part_k = -(-steps // splits) * block_k
    if element_size == 4:
        return Plan(64, block_k, splits, part_k, 2)
    if rows > 32 and element_size == 2 and epilogue != "partials":
        return Plan(128, block_k, splits, part_k, 4, warps=8)
    if overlaps:
        # Of the two forms run with overlap, the deep one gained by it and the shallow one lost.
        return Plan(64, block_k, splits, part_k, 5)
    # Deep pipelines cost more to fill than they hide, but for the short grids of two parts; where two programs have
    # to share a multiprocessor, both must fit.
    is_small = element_size == 2 and -(-n // 64) * splits <= MULTIPROCESSORS // 4 and part_k <= 4 * block_k
    if is_small:
        # Few programs of a few steps each, as a router's: all loads at once (2026-11-30-v4-streams.md).
        return Plan(64, block_k, splits, part_k, 5)
    is_short = splits == 2 and element_size == 2 and (rows <= 32 or 2 * -(-n // 64) <= MULTIPROCESSORS)
    return Plan(64, block_k, splits, part_k, 4 if is_short else 3)
