"""The joint product: programs of the plain weight come first, which have more to read, then those of the codes.

A plain weight is multiplied as kernels/gemm does, by the instruction for 64 outputs, whatever the number of rows is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.fp8.kernel import fp8_tile, launch_fp8_linear
from sparkchat.kernels.fp8.plan import MOST_PAIRS, widened
from sparkchat.kernels.launch import launch, power_of_two, prefetch, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import call_ahead

if TYPE_CHECKING:
    from sparkchat.kernels.fp8.joint import JointPlan, JointProduct

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile of the plain product, as in kernels/gemm."""


@triton.jit
def _plain_tile(
    x_ptr, plain_ptr, to_ptr, whole_ptr, arrived_ptr, tile, part, row_tile, num_rows, num_out, x_stride, to_stride,
    part_stride, whole_stride,
    STEPS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE_OUTS: tl.constexpr, WHOLE_FROM: tl.constexpr,
    ROW_TILES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = STEPS // SPLITS * 128
    out = tile * TILE_OUTS + tl.arange(0, TILE_OUTS)
    is_out = out < num_out
    w_rows = plain_ptr + tl.where(is_out, out, 0).to(tl.int64) * (STEPS * 128) + part * PART
    if PDL == 1:
        prefetch(w_rows, PART * 2)
    wait(PDL)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    step = tl.arange(0, 128)
    w_at = w_rows[:, None] + step[None, :]
    x_at = x_ptr + part * PART + row[None, :].to(tl.int64) * x_stride + step[:, None]
    total = tl.zeros((TILE_OUTS, ROWS), tl.float32)
    for k in tl.range(0, PART, 128, num_stages=STAGES):
        w = tl.load(w_at + k, eviction_policy="evict_first")
        x = tl.load(x_at + k, mask=is_row[None, :], other=0.0)
        total = tl.dot(w, x, total)
    kept = is_out[:, None] & is_row[None, :]
    at = row[None, :].to(tl.int64) * to_stride + out[:, None]
    tl.store(to_ptr + part * part_stride + at, total, mask=kept)
    if tile * TILE_OUTS >= WHOLE_FROM:
        arrived_ptr += (tile - WHOLE_FROM // TILE_OUTS) * ROW_TILES + row_tile
        # All threads have written before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((TILE_OUTS, ROWS), tl.float32)
            for other in tl.static_range(SPLITS):
                # Other multiprocessors wrote these: not from the cache of this one.
                total += tl.load(to_ptr + other * part_stride + at, mask=kept, other=0.0, cache_modifier=".cg")
            whole = whole_ptr + row[None, :].to(tl.int64) * whole_stride + (out - WHOLE_FROM)[:, None]
            tl.store(whole, total, mask=kept)
            tl.store(arrived_ptr, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _joint_product(
    x_ptr, codes_ptr, scales_ptr, out_ptr, plain_ptr, plain_out_ptr, whole_ptr, arrived_ptr,
    num_rows, plain_programs, num_plain, x_stride, out_stride, part_stride, plain_stride, plain_part_stride,
    whole_stride,
    STEPS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PLAIN_TILES: tl.constexpr, PLAIN_SPLITS: tl.constexpr, PLAIN_ROWS: tl.constexpr, TILE_OUTS: tl.constexpr,
    WHOLE_FROM: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    PLAIN_STAGES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < plain_programs:
        # Those that are added up begin first.
        tile = PLAIN_TILES - 1 - program % PLAIN_TILES
        rest = program // PLAIN_TILES
        _plain_tile(
            x_ptr, plain_ptr, plain_out_ptr, whole_ptr, arrived_ptr, tile, rest % PLAIN_SPLITS, rest // PLAIN_SPLITS,
            num_rows, num_plain, x_stride, plain_stride, plain_part_stride, whole_stride,
            STEPS, PLAIN_SPLITS, PLAIN_ROWS, TILE_OUTS, WHOLE_FROM, ROW_TILES, PLAIN_STAGES, PDL,
        )  # fmt: skip
    else:
        program -= plain_programs
        pair = program % PAIRS
        part = program // PAIRS % SPLITS
        if PDL == 1 and STEPS % PART == 0:
            call_ahead(codes_ptr + pair.to(tl.int64) * (STEPS * 4096) + part * (PART * 4096), PART, WARPS)
        wait(PDL)
        fp8_tile(
            x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, x_stride, out_stride, part_stride, PAIRS * 32, pair, part,
            program // (PAIRS * SPLITS) * ROWS, STEPS, PART, ROWS, WARPS, 1, STAGES, ROUND, False,
        )  # fmt: skip


def launch_joint(
    x: Tensor, product: JointProduct, out: Tensor, plain: Tensor, whole: Tensor, is_rounded: bool, plan: JointPlan
) -> None:
    """See ``JointProduct``; ``plan`` may be another than its own, for measuring."""
    from sparkchat.kernels.fp8.joint import PLAIN_OUTS

    (outs, size), count, num_plain = product.codes.shape, x.shape[0], product.plain.shape[0]
    rows, plain_rows = plan.codes.row_tile(count, is_rounded), max(_LEAST_ROWS, min(_MOST_ROWS, power_of_two(count)))
    tiles, pairs = -(-num_plain // PLAIN_OUTS), outs // (2 * OUTS)
    plain_programs = tiles * plan.plain_splits * -(-count // plain_rows)
    code_programs = pairs * plan.codes.splits * -(-count // rows)
    many = widened(plan.codes, outs, count, is_rounded)
    if many.pairs == MOST_PAIRS:
        # Programs of several pairs have more warps than those of the plain weight: a launch of their own.
        launch_fp8_linear(x, product.codes, out, 1, False, many)
        code_programs = 0
    launch(
        _joint_product, (plain_programs + code_programs,),
        x, product.codes.tiles, product.codes.scales, out, product.plain, plain, whole, product.arrived,
        count, plain_programs, num_plain, x.stride(0), out.stride(1), out.stride(0), plain.stride(1), plain.stride(0),
        whole.stride(0),
        STEPS=size // STEP, PAIRS=pairs, PART=plan.codes.part(size), SPLITS=plan.codes.splits, ROWS=rows,
        PLAIN_TILES=tiles, PLAIN_SPLITS=plan.plain_splits, PLAIN_ROWS=plain_rows, TILE_OUTS=PLAIN_OUTS,
        WHOLE_FROM=product.whole_from, ROW_TILES=product.arrived.shape[1], WARPS=plan.codes.warps,
        STAGES=plan.codes.stages, PLAIN_STAGES=plan.plain_stages, ROUND=is_rounded, is_streaming=True,
        num_warps=plan.codes.warps,
    )  # fmt: skip
