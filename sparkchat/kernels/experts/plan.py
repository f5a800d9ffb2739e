"""How the products with a layer's experts are cut and run.

``split`` and ``is_late`` decide in what order an output is summed and follow from the weight's shape alone; the rest is
speed and may follow from the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkchat.kernels.tiles.packing import OUTS, STEP

FEW_ROWS, MANY_ROWS = 8, 16
"""Rows of a tile. An expert of more rows takes several, which find its weights in the L2 cache."""
_REGISTERS = 65536
"""Of a multiprocessor."""
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
    registers: int = 0
    """Of a thread, so that more programs fit; 0: as many as the compiler takes."""


@dataclass(frozen=True)
class WholePlan:
    """How gate, up and down run as one launch. ``warps`` of both are the same."""

    gate_up: ExpertPlan
    down: ExpertPlan
    programs: int
    """Of a multiprocessor: as many as fit, as programs go on until nothing is left."""

    @property
    def registers(self) -> int:
        """Of a thread, so that all programs of a multiprocessor fit."""
        return min(248, _REGISTERS // (32 * self.gate_up.warps * self.programs) // 8 * 8)

    def of(self, both: int, size: int, width: int) -> WholePlan:
        """The plan for weights [both, size] and [size, width] with less of pairs and steps than a large model's."""
        first, second = _fitted(self.gate_up, both, size), _fitted(self.down, size, width)
        warps = max(first.warps, second.warps)
        return replace(self, gate_up=replace(first, warps=warps), down=replace(second, warps=warps))


def gate_up_plan(out: int, size: int, rows: int) -> ExpertPlan:
    """The plan of gate and up of all experts, [out, size] each, for so many rows of the batch."""
    return _fitted(_of_rows(GATE_UP, rows), out, size)


def down_plan(out: int, size: int, rows: int) -> ExpertPlan:
    """The plan of down of all experts, [out, size] each."""
    return _fitted(_of_rows(DOWN, rows), out, size)


GATE_UP = (
    (1, ExpertPlan(2, 1, 2, 6, 4)),
    (16, ExpertPlan(2, 1, 2, 3)),
    (MOST_IN_FEW, ExpertPlan(2, 2, 4, 3)),
    (None, ExpertPlan(2, 8, 8, 3, registers=128)),
)
DOWN = (
    (1, ExpertPlan(1, 2, 2, 6, 4)),
    (16, ExpertPlan(1, 4, 4, 3)),
    (MOST_IN_FEW, ExpertPlan(1, 4, 2, 3)),
    (None, ExpertPlan(1, 8, 4, 3, registers=128)),
)
"""Up to how many rows which plan, one ``split`` each. One row is few programs, which must ask for more at a time: what
the shared expert's take for each turn of their loop is then the time of the launch (benchmarks/results/
2026-11-30-v4-experts.md). Tiles of MANY_ROWS have twice the activations, which more pairs read once. At 384 rows the
last two took 426 and 193.5 us; (2, 4, 8, 3) and (1, 8, 8, 3) with 80 registers, so that 24 warps fit on a
multiprocessor, 460 and 224 (2026-11-30-v4-machine-code.md)."""


def whole_plan(rows: int) -> WholePlan | None:
    """The plan of one launch for so many rows of the batch; None where two are made."""
    return WHOLE if IN_WHOLE[0] <= rows <= IN_WHOLE[1] else None


def _whole(stages: int, shared_stages: int, programs: int, pairs: int = 1) -> WholePlan:
    first = replace(GATE_UP[1][1], pairs=pairs, warps=2 * pairs)
    second = replace(DOWN[1][1], pairs=2 * pairs, warps=2 * pairs)
    both = (replace(plan, stages=stages, shared_stages=shared_stages) for plan in (first, second))
    return WholePlan(*both, programs)


_WHOLE_CUTS = (
    (4, 3, 8, 1), (3, 3, 9, 1), (3, 2, 12, 1), (4, 3, 5, 2), (3, 3, 5, 2), (3, 2, 6, 2), (5, 4, 4, 2), (4, 3, 4, 2),
    (4, 3, 3, 4),
)  # fmt: skip
WHOLE_TRIED = {
    str(programs) if pairs == 1 else f"{programs} of {pairs} pairs, {stages} stages": _whole(
        stages, shared_stages, programs, pairs
    )
    for stages, shared_stages, programs, pairs in _WHOLE_CUTS
}
"""By programs of a multiprocessor: of 16 warps in all, 18, 24, 20, 20, 24, 16, 16, 24.

With one buffer for the shared expert's codes, which are twice as long, its units take as long as all others together.
"""
WHOLE = WHOLE_TRIED["5 of 2 pairs, 4 stages"]
IN_WHOLE = 5, 12
"""Rows of a batch that take one launch: of fewer what the shared expert's units take one after the other is the time of
the launch, of more two launches have more warps at work. benchmarks/results/2026-11-30-v4-experts.md"""


def _of_rows(plans: tuple[tuple[int | None, ExpertPlan], ...], rows: int) -> ExpertPlan:
    return next(plan for most, plan in plans if most is None or rows <= most)


def _fitted(plan: ExpertPlan, out: int, size: int) -> ExpertPlan:
    """The plan for a weight with less of pairs and steps than a large model's."""
    steps, pairs = size // STEP, out // (2 * OUTS)
    split, many = min(plan.split, 1 << (steps.bit_length() - 1)), min(plan.pairs, pairs & -pairs)
    return replace(plan, split=split, pairs=many, warps=min(plan.warps, split * many))


def tried(used: ExpertPlan, steps: int, rows: int = 1) -> list[ExpertPlan]:
    """Plans worth timing for experts with inputs of so many steps, the one in use first."""
    if rows > MOST_IN_FEW:
        cuts = MANY_OF_LONG if steps >= 16 else MANY_OF_SHORT
        return list(dict.fromkeys([used, *(ExpertPlan(s, p, w, d, registers=r) for s, p, w, d, r in cuts)]))
    cuts = CUTS_OF_LONG if steps >= 16 else CUTS_OF_SHORT
    plans = [replace(used, split=s, pairs=p, warps=w, stages=d) for s, p, w, d in cuts]
    deeper = [replace(used, shared_stages=stages) for stages in (2, 3, 4)]
    return list(dict.fromkeys([used, replace(used, is_late=False), *deeper, *plans]))


CUTS_OF_LONG = (
    (2, 1, 2, 3), (2, 1, 2, 4), (2, 1, 2, 5), (2, 1, 2, 6), (2, 2, 4, 3), (2, 2, 4, 4), (2, 2, 4, 6), (2, 2, 2, 4),
    (4, 1, 4, 3), (4, 1, 4, 4), (4, 1, 4, 5), (4, 2, 8, 3), (2, 4, 4, 3), (2, 4, 8, 3), (2, 4, 8, 4),
)  # fmt: skip
CUTS_OF_SHORT = (
    (1, 4, 4, 3), (1, 4, 4, 4), (1, 4, 4, 6), (1, 2, 2, 3), (1, 2, 2, 4), (1, 2, 2, 6), (1, 4, 2, 3), (1, 1, 1, 6),
    (2, 2, 4, 3), (2, 1, 2, 4), (2, 4, 8, 3), (1, 8, 4, 3), (1, 8, 8, 3), (1, 8, 8, 4),
)  # fmt: skip
"""Split, pairs, warps, stages that are timed for weights of many and of few inputs."""
MANY_OF_LONG = (
    (2, 2, 4, 3, 0), (2, 2, 4, 3, 96), (2, 2, 4, 3, 80), (2, 4, 8, 3, 128), (2, 4, 8, 4, 80), (2, 4, 8, 4, 128),
    (2, 1, 2, 3, 80), (2, 4, 4, 3, 128), (2, 4, 4, 4, 128), (2, 4, 8, 3, 80), (2, 8, 8, 2, 80),
)  # fmt: skip
MANY_OF_SHORT = (
    (1, 4, 2, 3, 0), (1, 4, 4, 3, 0), (1, 4, 4, 3, 80), (1, 8, 8, 3, 128), (1, 8, 8, 4, 80), (1, 4, 4, 4, 80),
    (1, 8, 8, 3, 80), (1, 8, 4, 4, 128), (1, 16, 8, 3, 128), (1, 16, 16, 3, 80),
)  # fmt: skip
"""The same, and registers, for tiles of MANY_ROWS."""


def row_tile(rows: int) -> int:
    """Rows of a tile for so many rows of the batch."""
    return FEW_ROWS if rows <= MOST_IN_FEW else MANY_ROWS


def most_items(rows: int, per_row: int, experts: int) -> int:
    """Row tiles that all experts together can have: at most one for each choice, and one not full for each expert."""
    choices, tile = rows * per_row, row_tile(rows)
    return min(choices, (choices + min(experts, choices) * (tile - 1)) // tile)
