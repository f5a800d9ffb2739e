"""The expert that every row goes to by itself, for a stream beside the one that finds out where rows go.

Sums are cut as in the launches of all experts, so bits are the same. Its weights are read once, and nothing else is
waited for: few programs, each with much on its way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import down_plan, gate_up_plan, row_tile
from sparkchat.kernels.experts.units import shared_down, shared_gate_up, store_inner, store_parts
from sparkchat.kernels.experts.weights import TiledExperts
from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP

STAGES = 6, 4
"""Depth of the pipelines of loads of gate and up, and of down, which must find room beside the programs of whole.py."""


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_of_all(
    x_ptr, codes, scales, inner_ptr, num_rows, x_stride, limit,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, item = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    value, to, is_out = shared_gate_up(
        tile, item, x_ptr, codes, scales, num_rows, x_stride, limit, PER_ROW, STEPS, ROWS, 1, SPLIT, STAGES, ROUND
    )  # fmt: skip
    store_inner(value, to, is_out, tile, inner_ptr, TILES, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _down_of_all(
    inner_ptr, codes, scales, parts_ptr, num_rows,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, item = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    one, two, to, is_out = shared_down(
        tile, item, inner_ptr, codes, scales, num_rows, PER_ROW, STEPS, ROWS, 1, SPLIT, STAGES, ROUND
    )  # fmt: skip
    store_parts(one, two, to, is_out, tile, parts_ptr, TILES, 1)


def launch_shared(
    x: Tensor, weights: TiledExperts, inner: Tensor, parts: Tensor, limit: float, is_rounded: bool
) -> None:
    """The last rows of inner [N * k + N, width], and parts[k] [N, d]."""
    (places, rows, size), (both, _) = parts.shape, weights.shared_gate_up.shape
    tile, width = row_tile(rows), weights.width
    up, down = weights.shared_gate_up, weights.shared_down
    first, second = gate_up_plan(both, size, rows), down_plan(size, width, rows)
    tiles, items = both // (2 * OUTS), -(-rows // tile)
    launch(
        _gate_up_of_all, (tiles, items), x, up.tiles, up.scales, inner, rows, x.stride(0), limit,
        PER_ROW=places - 1, TILES=tiles, STEPS=size // STEP, ROWS=tile, SPLIT=first.split, STAGES=STAGES[0],
        ROUND=is_rounded, num_warps=first.split, num_stages=STAGES[0],
    )  # fmt: skip
    tiles = size // (2 * OUTS)
    launch(
        _down_of_all, (tiles, items), inner, down.tiles, down.scales, parts, rows,
        PER_ROW=places - 1, TILES=tiles, STEPS=width // STEP, ROWS=tile, SPLIT=second.split, STAGES=STAGES[1],
        ROUND=is_rounded, num_warps=second.split, num_stages=STAGES[1],
    )  # fmt: skip
