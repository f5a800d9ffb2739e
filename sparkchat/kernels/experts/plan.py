"""How the products with a layer's experts are cut and run.

``split``, ``pairs`` and ``is_late`` decide in what order an output is summed and follow from the weight's shape alone;
the rest is speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat.kernels.tiles.packing import OUTS, STEP

FEW_ROWS, MANY_ROWS = 8, 16
"""Rows of a tile. An expert of more rows takes several, which find its weights in the L2 cache."""


@dataclass(frozen=True)
class ExpertPlan:
    """Tiles of the products with all experts."""

    split: int
    """Parts of the inputs that a program sums apart."""
    pairs: int
    """Pairs of tiles of 16 outputs of a program; they read the same rows."""
    warps: int
    """That share the ``split * pairs`` products."""
    stages: int
    """Depth of the pipeline of loads."""
    shared_stages: int = 2
    """The same for the expert of all rows, whose codes are twice as long."""
    is_late: bool = True
    """Whether factors of blocks are multiplied in after the product with a block, not into its codes."""
    calls: bool = False
    """Whether a program calls all its codes into L2 before it looks up its rows."""
    next_items: int = 0
    """Gate and up: of how many items the codes of down are called into L2 by the programs that come last."""

    def fits(self, out: int, size: int) -> bool:
        """Whether a weight [out, size] can be cut so."""
        steps, pairs = size // STEP, out // (2 * OUTS)
        return self.split <= steps and self.pairs <= pairs and pairs % self.pairs == 0


def plan_of(out: int, size: int) -> ExpertPlan:
    """The plan of experts [out, size]."""
    steps, pairs = size // STEP, out // (2 * OUTS)
    split = 4 if steps >= 16 else 1
    split = min(split, 1 << (steps.bit_length() - 1))
    many = min(4 // split, pairs & -pairs)
    return ExpertPlan(split, many, split * many, 3)


def row_tile(rows: int) -> int:
    """Rows of a tile for so many rows of the batch."""
    return FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS


def most_items(rows: int, per_row: int, experts: int) -> int:
    """Row tiles that all experts together can have: at most one for each choice, and one not full for each expert."""
    choices, tile = rows * per_row, row_tile(rows)
    return min(choices, (choices + min(experts, choices) * (tile - 1)) // tile)
