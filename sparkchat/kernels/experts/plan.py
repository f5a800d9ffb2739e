"""How the products with a layer's experts are cut and run.

``split``, ``pairs`` and ``is_late`` decide in what order an output is summed and follow from the weight's shape alone;
the rest is speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkchat.kernels.tiles.packing import OUTS, STEP

FEW_ROWS, MANY_ROWS = 8, 16
"""Rows of a tile. An expert of more rows takes several, which find its weights in the L2 cache."""
MOST_IN_FEW = 128
"""Rows of a batch up to which tiles are of FEW_ROWS: of 256 experts that are hit, next to none has more."""


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


def gate_up_plan(out: int, size: int) -> ExpertPlan:
    """The plan of gate and up of all experts, [out, size] each."""
    return replace(down_plan(out, size), next_items=NEXT_ITEMS)


def down_plan(out: int, size: int) -> ExpertPlan:
    """The plan of down of all experts, [out, size] each."""
    steps, pairs = size // STEP, out // (2 * OUTS)
    split = min(2 if steps >= LONG else 1, 1 << (steps.bit_length() - 1))
    many = min(4 // split, pairs & -pairs)
    return ExpertPlan(split, many, split * many, 3, calls=True)


NEXT_ITEMS = 8
"""Of down's codes: 2.1 MB each on a rank of two. Between two launches that much is not read."""
LONG = 16
"""Steps from which on the inputs are cut in parts."""


def tried(used: ExpertPlan, steps: int) -> list[ExpertPlan]:
    """Plans worth timing for experts with inputs of so many steps, the one in use first."""
    plans = [used, replace(used, calls=False), replace(used, is_late=False), replace(used, stages=4)]
    for split, pairs, warps, stages in CUTS_OF_LONG if steps >= LONG else CUTS_OF_SHORT:
        cut = replace(used, split=split, pairs=pairs, warps=warps, stages=stages)
        plans += [cut, replace(cut, calls=False)]
    return list(dict.fromkeys(plans))


CUTS_OF_LONG = ((4, 1, 4, 3), (2, 2, 4, 3), (2, 4, 4, 3), (2, 1, 2, 3), (2, 2, 2, 3), (1, 4, 4, 4))
CUTS_OF_SHORT = ((1, 4, 4, 3), (1, 4, 2, 3), (1, 2, 2, 3), (1, 8, 4, 3), (2, 2, 4, 3), (2, 4, 4, 3))
"""Split, pairs, warps, stages that are timed for weights of many and of few inputs."""


def row_tile(rows: int) -> int:
    """Rows of a tile for so many rows of the batch."""
    return FEW_ROWS if rows <= MOST_IN_FEW else MANY_ROWS


def most_items(rows: int, per_row: int, experts: int) -> int:
    """Row tiles that all experts together can have: at most one for each choice, and one not full for each expert."""
    choices, tile = rows * per_row, row_tile(rows)
    return min(choices, (choices + min(experts, choices) * (tile - 1)) // tile)
