"""How the product with a weight of 8 bits is cut and run.

``warps`` and ``splits`` decide in what order an output is summed and follow from the weight's shape alone; ``stages``
and the rows of a tile are speed. Plans are the best of benchmarks/results/2026-11-30-v4-products.md for six rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from sparkchat.kernels.tiles.packing import OUTS, STEP

MULTIPROCESSORS = 132
"""Of an H200; plans are meant for it and right on any card."""
ROW_TILES = (8, 16, 32, 64)
"""Rows of a tile; more rows take several tiles, which find the weight in the L2 cache."""

MANY_ROWS, MOST_PAIRS = 17, 4
"""From so many rows on a program takes several pairs of tiles, up to so many: with one, more bytes of activations than
of codes come from the L2 cache, 32 outputs at a time (benchmarks/results/2026-11-30-v4-machine-code.md)."""

EXPANDED_ROWS = 128
"""From so many rows on a weight is expanded to plain numbers, and the library multiplies.

Measured on an H200 against cuBLAS with the same weight in bfloat16, microseconds at 24, 96 and 384 rows: wq_b 12.2,
26.8, 92 against 10.5, 11.3, 20.7; wo_b 11.7, 26.7, 95 against 12.7, 14.4, 21.4; main_proj 20.6, 52.7, 192 against
28.2, 33.0, 61. Expanding reads a byte and writes two for each code: at 4.6 TB/s 11 us for the 16.8 million of wq_b or
wo_b and 33 us for main_proj, so that the two are even at about 128 rows. That is expected, not measured:
``benchmarks/kernels.py --only v4-fp8`` times it as "expanded"."""
MOST_EXPANDED = 128 << 20
"""Bytes of the room that weights are expanded in; of a larger one, a drafter's head, some outputs at a time."""
EXPANSION, TRIED_EXPANSIONS = (2, 4), ((1, 2), (1, 4), (2, 4), (2, 8), (4, 8))
"""Steps of a program that expands, and its warps."""


@dataclass(frozen=True)
class Fp8Plan:
    """Tiles of one product."""

    warps: int
    """That share the inputs of a program."""
    splits: int
    """Parts of the inputs summed apart, by programs of their own."""
    stages: int
    """Depth of the pipeline of loads."""
    pairs: int = 1
    """Pairs of tiles of a program, ``warps`` warps each, which read the same rows: a power of two."""
    most_rows: int = 32
    """Of a tile."""

    def row_tile(self, rows: int, is_rounded: bool = False) -> int:
        """Rows of a tile for so many rows; rounding the largest takes more registers than there are."""
        most = min(self.most_rows, 16) if is_rounded else self.most_rows
        return next((tile for tile in ROW_TILES if tile >= min(rows, most)), ROW_TILES[-1])

    def part(self, size: int) -> int:
        """Steps of 128 inputs of a part."""
        return -(-(size // STEP) // self.splits)


TRIED = ((1, 4), (1, 6), (2, 3), (2, 4), (2, 5), (4, 2), (4, 3), (4, 4), (8, 3))
"""Warps and stages."""
TRIED_OF_MANY = ((2, 32, 3), (4, 32, 2), (4, 32, 3), (4, 64, 2), (4, 64, 3), (8, 32, 2), (8, 32, 3))
"""Pairs, rows of a tile, stages for many rows."""
_MOST_SHARED = 225_000


@cache
def plan_of(out: int, size: int, has_parts: bool = True) -> Fp8Plan:
    """The plan of a weight [out, size]; ``has_parts``: whether parts of the inputs may be summed apart."""
    programs, steps = out // (2 * OUTS), size // STEP
    # Two warps: small programs, of which many are on the card at once. Where programs are few and must sum all inputs,
    # four and a deeper pipeline bring more bytes on their way.
    is_short = not has_parts and programs <= MULTIPROCESSORS and steps >= 16
    warps, stages = (4, 4) if is_short else (2, 3)
    warps = min(warps, 1 << (steps.bit_length() - 1))
    splits = 1
    # About three programs on every multiprocessor, each with at least two steps for every warp.
    while has_parts and splits < 8 and programs * splits < 3 * MULTIPROCESSORS and steps >= 4 * splits * warps:
        splits *= 2
    return Fp8Plan(warps, splits, stages)


def plan_for_rows(
    out: int, size: int, has_parts: bool, rows: int, is_rounded: bool = False, outs_of_group: int | None = None
) -> Fp8Plan:
    """The plan of a weight [out, size] for so many rows, with the sums of ``plan_of``. Outputs of a group read the same
    inputs; a program's must be of one."""
    return widened(plan_of(out, size, has_parts), out, rows, is_rounded, outs_of_group)


def widened(plan: Fp8Plan, out: int, rows: int, is_rounded: bool = False, outs_of_group: int | None = None) -> Fp8Plan:
    """``plan`` with as many pairs of tiles a program as many rows want."""
    if is_rounded or rows < MANY_ROWS:
        return plan
    pairs, width = 1, outs_of_group or out
    programs = out // (2 * OUTS) * plan.splits * -(-rows // plan.row_tile(rows))
    while pairs < MOST_PAIRS and programs // (2 * pairs) >= 1.4 * MULTIPROCESSORS and width % (4 * OUTS * pairs) == 0:
        pairs *= 2
    return replace(plan, pairs=pairs, stages=3) if pairs > 1 else plan


def num_programs(out: int, size: int, rows: int, is_rounded: bool) -> int:
    """Of a product of so many outputs, inputs and rows, all inputs summed by one program."""
    plan = plan_for_rows(out, size, False, rows, is_rounded)
    return out // (2 * OUTS * plan.pairs) * -(-rows // plan.row_tile(rows, is_rounded))


def is_expanded(out: int, size: int, rows: int, is_rounded: bool = False, groups: int = 1) -> bool:
    """Whether a weight [out, size] is expanded for so many rows; the outputs of a group must have room together."""
    unit = 2 * OUTS if groups == 1 else out // groups
    return rows >= EXPANDED_ROWS and not is_rounded and 4 * unit * size <= MOST_EXPANDED


def expanded_pieces(
    out: int, size: int, groups: int, itemsize: int, most: int = MOST_EXPANDED
) -> list[tuple[int, int]]:
    """First and last outputs of pieces that are expanded one after the other, as even as may be, in ``most`` bytes:
    of pairs of tiles, or of whole groups."""
    unit = 2 * OUTS if groups == 1 else out // groups
    units = out // unit
    pieces = -(-units // (most // (unit * size * itemsize)))
    each = -(-units // pieces) * unit
    return [(first, min(out, first + each)) for first in range(0, out, each)]


def shared_bytes(plan: Fp8Plan, rows: int, bytes_of_step: int = 2 * 16 * STEP) -> int:
    """Shared memory of a program, nearly: a buffer less than stages."""
    return max(1, plan.stages - 1) * plan.warps * (plan.pairs * bytes_of_step + plan.row_tile(rows) * STEP * 2)


def tried(out: int, size: int, rows: int, has_parts: bool) -> list[Fp8Plan]:
    """Plans worth timing for a weight [out, size], the one in use first."""
    used, steps = plan_for_rows(out, size, has_parts, rows), size // STEP
    splits = [n for n in (used.splits // 2, used.splits, 2 * used.splits) if n] if has_parts else [1]
    plans = [used, *(Fp8Plan(warps, parts, stages) for parts in splits for warps, stages in TRIED)]
    if rows >= MANY_ROWS:
        # Only those that leave the order of sums.
        plain = plan_of(out, size, has_parts)
        plans = [used, plain, *(replace(plain, stages=s, pairs=p, most_rows=r) for p, r, s in TRIED_OF_MANY)]
    fit = [
        p
        for p in plans
        if p.warps * p.splits <= steps and p.warps * p.pairs <= 16 and shared_bytes(p, rows) <= _MOST_SHARED
    ]
    return list(dict.fromkeys(fit))
