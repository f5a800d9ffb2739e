"""How the products with a layer's experts are cut and run.

``warps`` decides in what order an output is summed and follows from the weight's shape alone; the rest is speed.
No plan has been timed yet: benchmarks/kernels.py tries ``TRIED``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat.kernels.tiles.packing import STEP

FEW_ROWS, MANY_ROWS = 8, 16
"""Rows of a tile. An expert of more rows takes several, which find its weights in the L2 cache."""


@dataclass(frozen=True)
class ExpertPlan:
    """Tiles of the products with all experts."""

    warps: int
    """That share the inputs of a program."""
    stages: int
    """Depth of the pipeline of loads."""


TRIED = tuple(ExpertPlan(warps, stages) for warps in (2, 4, 8) for stages in (2, 3, 4, 6))


def plan_of(size: int) -> ExpertPlan:
    """The plan of experts with ``size`` inputs."""
    steps = size // STEP
    return ExpertPlan(4 if steps >= 4 else 1 << (steps.bit_length() - 1), 3)


def row_tile(rows: int) -> int:
    """Rows of a tile for so many rows of the batch."""
    return FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS


def most_items(rows: int, per_row: int, experts: int) -> int:
    """Row tiles that all experts together can have: at most one for each choice, and one not full for each expert."""
    choices, tile = rows * per_row, row_tile(rows)
    return min(choices, (choices + min(experts, choices) * (tile - 1)) // tile)
