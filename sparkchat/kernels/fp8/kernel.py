"""The product with a weight of 8 bits: a program for pairs of tiles of 16 outputs and a part of the inputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.fp8.plan import Fp8Plan, plan_for_rows
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.ranks import Meeting
from sparkchat.kernels.ranks.kernel import meet
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import call_ahead, fp8_pairs


@triton.jit
def fp8_tile(
    x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, x_stride, out_stride, part_stride, outs_of_group, pair, part,
    first_row, STEPS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The outputs of PAIRS pairs of tiles from ``pair`` on, of one part of the inputs, of some rows."""
    codes = codes_ptr + pair.to(tl.int64) * (STEPS * 4096)
    row = first_row + tl.arange(0, SPLIT * ROWS) % ROWS
    x_rows = x_ptr + row.to(tl.int64) * x_stride
    if GROUPED:
        # A division, which everything that is loaded of x would wait for.
        x_rows += pair * 32 // outs_of_group * (STEPS * 128)
    one, two = fp8_pairs(
        x_rows, row < num_rows, codes, scales_ptr + pair * (STEPS * 2), part * PART,
        STEPS, PART, ROWS, PAIRS, SPLIT, STAGES, ROUND,
    )  # fmt: skip
    out = (pair + tl.arange(0, PAIRS))[:, None, None] * 32 + tl.arange(0, 16)[None, :, None]
    to_row = first_row + tl.arange(0, ROWS)
    to = out_ptr + part * part_stride + to_row[None, None, :].to(tl.int64) * out_stride + out
    is_row = (to_row < num_rows)[None, None, :]
    tl.store(to, one.to(out_ptr.dtype.element_ty), mask=is_row)
    tl.store(to + 16, two.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear(
    x_ptr, codes_ptr, scales_ptr, out_ptr, pads_ptr, num_rows, x_stride, out_stride, part_stride, outs_of_group, rank,
    STEPS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, GROUPED: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, part = tl.program_id(0) * PAIRS, tl.program_id(1)
    if PDL == 1 and PAIRS == 1 and STEPS % PART == 0:
        call_ahead(codes_ptr + pair.to(tl.int64) * (STEPS * 4096) + part * (PART * 4096), PART, SPLIT)
    wait(PDL)
    fp8_tile(
        x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, x_stride, out_stride, part_stride, outs_of_group, pair, part,
        tl.program_id(2) * ROWS, STEPS, PART, ROWS, SPLIT, PAIRS, STAGES, ROUND, GROUPED,
    )  # fmt: skip
    if RANKS > 1:
        meet(pads_ptr, tl.program_id(0) + tl.program_id(2) * tl.num_programs(0), rank, RANKS)


def launch_fp8_linear(
    x: Tensor,
    weight: TiledFp8,
    out: Tensor,
    groups: int,
    is_rounded: bool,
    plan: Fp8Plan | None = None,
    meeting: Meeting | None = None,
) -> None:
    """See ``fp8_linear``. ``plan`` stands in for the usual one, for measuring."""
    (outs, size), count, is_parts = weight.shape, x.shape[0], out.dim() == 3
    plan = plan or plan_for_rows(outs, size, is_parts, count, is_rounded, outs // groups)
    rows = plan.row_tile(count, is_rounded)
    launch(
        _fp8_linear, (outs // (2 * OUTS * plan.pairs), plan.splits, -(-count // rows)),
        x, weight.tiles, weight.scales, out, weight.scales if meeting is None else meeting.pads, count, x.stride(0),
        out.stride(-2), out.stride(0) if is_parts else 0, outs // groups, 0 if meeting is None else meeting.rank,
        STEPS=size // STEP, PART=plan.part(size), ROWS=rows, SPLIT=plan.warps, PAIRS=plan.pairs, STAGES=plan.stages,
        ROUND=is_rounded, GROUPED=groups > 1, RANKS=0 if meeting is None else meeting.pads.shape[0],
        is_streaming=True, num_warps=plan.warps * plan.pairs, num_stages=plan.stages,
    )  # fmt: skip
