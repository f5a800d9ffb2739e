"""What a layer makes of its input before attention, as phases of one launch: the products that read it, what is kept of
its rows, and the products that read their low ranks.

The codes of the last products come into L2 while rows are kept, which few programs do. A row's bits are those of the
three launches by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.ahead.kernel import ask_share
from sparkchat.kernels.compressor.kernel import Tile, compress_row, compressed_of, tile_of
from sparkchat.kernels.fp8.joint_kernel import joined_of, joint_tile
from sparkchat.kernels.fp8.plan import row_tile
from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.phases import begin_phases, end_phase, programs_at_once
from sparkchat.kernels.tiles.packing import STEP
from sparkchat.kernels.tiles.product import fp8_pairs

if TYPE_CHECKING:
    from sparkchat.kernels.compressor.input import InputPlan, InputRows


@triton.jit
def _low_rank_tile(
    x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, out_stride, item, first_row,
    STEPS: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Outputs of PAIRS pairs of tiles of some rows."""
    row = first_row + tl.arange(0, SPLIT * ROWS) % ROWS
    one, two = fp8_pairs(
        x_ptr + row.to(tl.int64) * (STEPS * 128), row < num_rows,
        codes_ptr + item.to(tl.int64) * (PAIRS * STEPS * 4096), scales_ptr + item * (PAIRS * STEPS * 2), 0,
        STEPS, STEPS, ROWS, PAIRS, SPLIT, STAGES, ROUND,
    )  # fmt: skip
    to_row = first_row + tl.arange(0, ROWS)
    out = (item * PAIRS + tl.arange(0, PAIRS))[:, None, None] * 32 + tl.arange(0, 16)[None, :, None]
    to = out_ptr + to_row[None, None, :].to(tl.int64) * out_stride + out
    is_row = (to_row < num_rows)[None, None, :]
    tl.store(to, one.to(out_ptr.dtype.element_ty), mask=is_row)
    tl.store(to + 16, two.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _keep_and_project(
    x_ptr, codes_ptr, scales_ptr, joint_ptr, plain_ptr, plain_out_ptr, whole_ptr, arrived_ptr,
    num_rows, plain_programs, num_plain, x_stride, joint_stride, joint_part, plain_stride, plain_part_stride,
    whole_stride,
    positions_ptr, rows_ptr, starts_ptr, span_starts_ptr, rope_ptr, num_requests, eps,
    kv_ptr, scores_ptr, bias_ptr, norm_ptr, raw_ptr, entries_ptr, rotation_ptr,
    ring, part_stride, row_stride, raw_stride, entries_stride, slot_stride, first_slot,
    kv2_ptr, scores2_ptr, bias2_ptr, norm2_ptr, raw2_ptr, entries2_ptr, rotation2_ptr,
    ring2, part_stride2, row_stride2, raw_stride2, entries_stride2, slot_stride2, first_slot2,
    latents_ptr, latent_norm_ptr, cache_ptr, low_ptr, low_norm_ptr, out_ptr,
    latent_part, latent_row, low_part, low_row, cache_stride, latent_stride, first_latent, latent_ring, latent_eps,
    low_codes_ptr, low_scales_ptr, low_to_ptr, low_to_stride, count_ptr,
    STEPS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PLAIN_TILES: tl.constexpr, PLAIN_SPLITS: tl.constexpr, PLAIN_ROWS: tl.constexpr, TILE_OUTS: tl.constexpr,
    WHOLE_FROM: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    PLAIN_STAGES: tl.constexpr, ROUND: tl.constexpr,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ROUND_BLOCK: tl.constexpr, ROTATES: tl.constexpr, IS_INDEX: tl.constexpr,
    WIDTH2: tl.constexpr, PARTS2: tl.constexpr, ROUND_BLOCK2: tl.constexpr, ROTATES2: tl.constexpr,
    IS_INDEX2: tl.constexpr,
    SIZE: tl.constexpr, LATENT_PARTS: tl.constexpr, LATENT_BLOCK: tl.constexpr, LOW: tl.constexpr,
    LOW_BLOCK: tl.constexpr, LOW_PARTS: tl.constexpr,
    FIRST_PROGRAMS: tl.constexpr, ROW_PROGRAMS: tl.constexpr, OUTS: tl.constexpr, LOW_PAIRS: tl.constexpr,
    LOW_SPLIT: tl.constexpr, LOW_STAGES: tl.constexpr, LOW_ROWS: tl.constexpr, AHEAD: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if AHEAD == 1:
        ask_share(low_codes_ptr, OUTS * LOW, program, PROGRAMS, WARPS)
    wait(PDL)
    if LAST > FIRST:
        begun = begin_phases(count_ptr, PROGRAMS * (LAST - FIRST))
    if FIRST == 0:
        for number in tl.range(program, FIRST_PROGRAMS, PROGRAMS, num_stages=1):
            joint_tile(
                x_ptr, codes_ptr, scales_ptr, joint_ptr, plain_ptr, plain_out_ptr, whole_ptr, arrived_ptr, num_rows,
                plain_programs, num_plain, x_stride, joint_stride, joint_part, plain_stride, plain_part_stride,
                whole_stride, tl.cast(number, tl.int32), STEPS, PAIRS, PART, SPLITS, ROWS, PLAIN_TILES, PLAIN_SPLITS,
                PLAIN_ROWS, TILE_OUTS, WHOLE_FROM, ROW_TILES, WARPS, STAGES, PLAIN_STAGES, ROUND, False,
            )  # fmt: skip
    if AHEAD == 2:
        ask_share(low_codes_ptr, OUTS * LOW, program, PROGRAMS, WARPS)
    if FIRST < 1 and LAST >= 1:
        end_phase(count_ptr, begun + PROGRAMS * (1 - FIRST))
    if FIRST <= 1 and LAST >= 1:
        for number in tl.range(program, num_rows * ROW_PROGRAMS, PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            compress_row(
                positions_ptr, rows_ptr, starts_ptr, span_starts_ptr, rope_ptr, num_requests, eps, kv_ptr, scores_ptr,
                bias_ptr, norm_ptr, raw_ptr, entries_ptr, rotation_ptr, ring, part_stride, row_stride, raw_stride,
                entries_stride, slot_stride, first_slot, kv2_ptr, scores2_ptr, bias2_ptr, norm2_ptr, raw2_ptr,
                entries2_ptr, rotation2_ptr, ring2, part_stride2, row_stride2, raw_stride2, entries_stride2,
                slot_stride2, first_slot2, latents_ptr, latent_norm_ptr, cache_ptr, low_ptr, low_norm_ptr, out_ptr,
                latent_part, latent_row, low_part, low_row, cache_stride, latent_stride, first_latent, latent_ring,
                latent_eps, (item // ROW_PROGRAMS).to(tl.int64), item % ROW_PROGRAMS, RATIO, OVERLAPS, ROPE, TOKENS,
                INDEX_BLOCK, WIDTH, PARTS, ROUND_BLOCK, ROTATES, IS_INDEX, WIDTH2, PARTS2, ROUND_BLOCK2, ROTATES2,
                IS_INDEX2, SIZE, LATENT_PARTS, LATENT_BLOCK, LOW, LOW_BLOCK, LOW_PARTS,
            )  # fmt: skip
    if FIRST < 2 and LAST >= 2:
        end_phase(count_ptr, begun + PROGRAMS * (2 - FIRST))
    if LAST >= 2:
        ITEMS: tl.constexpr = OUTS // (32 * LOW_PAIRS)
        for number in tl.range(program, tl.cdiv(num_rows, LOW_ROWS) * ITEMS, PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            _low_rank_tile(
                out_ptr, low_codes_ptr, low_scales_ptr, low_to_ptr, num_rows, low_to_stride, item % ITEMS,
                item // ITEMS * LOW_ROWS, LOW // 128, OUTS, LOW_ROWS, LOW_PAIRS, LOW_SPLIT, LOW_STAGES, ROUND,
            )  # fmt: skip


def launch_keep_and_project(given: InputRows, out: Tensor, plan: InputPlan) -> None:
    """See ``keep_and_project``; ``plan`` stands in for the usual one, for measuring."""
    x, written, weight = given.x, given.written, given.queries
    joined = joined_of(x, given.product, given.parts, given.plain, given.whole, given.is_rounded, given.product.plan)
    warps = given.product.plan.codes.warps
    tile = Tile(tile_of(given.shape).tokens, warps)
    kept = compressed_of(
        given.pools, given.positions, given.rows, given.starts, given.span_starts, given.rope, given.shape, written,
        tile,
    )  # fmt: skip
    outs, size = weight.shape
    programs = programs_at_once(x.device)
    at_once = programs > 1
    programs = plan.programs_each * programs if at_once else 1
    rows, split = row_tile(x.shape[0], given.is_rounded), min(plan.split, size // STEP)
    for first, last in plan.launches if at_once else ((0, 0), (1, 1), (2, 2)):
        launch(
            _keep_and_project, (programs,), *joined.arguments, *kept.arguments, weight.tiles, weight.scales, out,
            out.stride(0), given.count,
            **joined.sizes, **kept.sizes, FIRST_PROGRAMS=joined.programs, ROW_PROGRAMS=kept.programs, OUTS=outs,
            LOW_PAIRS=1 if outs // 32 % plan.pairs else plan.pairs, LOW_SPLIT=split, LOW_STAGES=plan.stages,
            LOW_ROWS=rows, AHEAD=plan.ahead, FIRST=first, LAST=last, PROGRAMS=programs, num_warps=warps,
        )  # fmt: skip
