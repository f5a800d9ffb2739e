"""Attention and the two products behind it as phases of one launch: spans, their join, groups of heads, the output.

While spans and their join wait for few bytes, the codes of both products come into L2; and three starts of launches are
waits for a count instead. A row's bits are those of the launches by themselves with the same cut of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.fp8.kernel import fp8_tile
from sparkchat.kernels.fp8.plan import row_tile
from sparkchat.kernels.latent_attention.kernel import HALF_TILE, attend_span, join_spans, scale_of
from sparkchat.kernels.latent_attention.write_kernel import check_cache
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.phases import begin_phases, end_phase, programs_at_once
from sparkchat.kernels.ranks.kernel import meet
from sparkchat.kernels.tiles.packing import STEP
from sparkchat.kernels.tiles.product import call_ahead

if TYPE_CHECKING:
    from sparkchat.kernels.latent_attention import LatentShape, LatentWorkspace
    from sparkchat.kernels.latent_attention.output import OutputPlan, OutputWeights
    from sparkchat.kernels.ranks import Meeting

_MOST_SHARED = 225_000


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _attend_to_output(
    q_ptr, cache_ptr, rows_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, chosen_ptr, sinks_ptr, mixed_ptr,
    stats_ptr, heads_ptr, inner_ptr, out_ptr, inner_codes_ptr, inner_scales_ptr, codes_ptr, scales_ptr, pads_ptr,
    count_ptr, num_rows, part_stride, row_stride, cache_stride, slot_stride, first_slot, ring, scale, eps, out_stride,
    rank,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, RATIO: tl.constexpr,
    TOPK: tl.constexpr, ROOM: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, WINDOWS: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, READS_AHEAD: tl.constexpr, EXACT: tl.constexpr,
    GROUPS: tl.constexpr, INNER: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, LAST_ROWS: tl.constexpr,
    ROUND: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, RANKS: tl.constexpr, AHEAD: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = HEADS * SIZE // GROUPS // 128
    LAST_STEPS: tl.constexpr = INNER // 128
    program = tl.program_id(0)
    if AHEAD > 0 and program < INNER // 32:
        call_ahead(inner_codes_ptr + program.to(tl.int64) * (STEPS * 4096), STEPS, WARPS)
    if AHEAD == 1 and program < OUT // 32:
        call_ahead(codes_ptr + program.to(tl.int64) * (LAST_STEPS * 4096), LAST_STEPS, WARPS)
    wait(PDL)
    if LAST > FIRST:
        begun = begin_phases(count_ptr, PROGRAMS * (LAST - FIRST))
    if FIRST == 0:
        TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
        for number in tl.range(program, num_rows * (TILES * SPANS), PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            attend_span(
                q_ptr, cache_ptr, rows_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, chosen_ptr, mixed_ptr,
                stats_ptr, part_stride, row_stride, cache_stride, slot_stride, first_slot, ring, scale, eps,
                (item // (TILES * SPANS)).to(tl.int64), item % TILES, item // TILES % SPANS, HEADS, SIZE, ROPE, PARTS,
                RATIO, TOPK, ROOM, SPAN, WINDOWS, MOST, TILE, BLOCK, READS_AHEAD, EXACT,
            )  # fmt: skip
    if AHEAD == 2 and program < OUT // 32:
        call_ahead(codes_ptr + program.to(tl.int64) * (LAST_STEPS * 4096), LAST_STEPS, WARPS)
    if FIRST < 1 and LAST >= 1:
        end_phase(count_ptr, begun + PROGRAMS * (1 - FIRST))
    if FIRST <= 1 and LAST >= 1:
        for number in tl.range(program, num_rows * HEADS, PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            join_spans(
                mixed_ptr, stats_ptr, positions_ptr, first_seen_ptr, ends_ptr, rope_ptr, sinks_ptr, heads_ptr,
                (item // HEADS).to(tl.int64), item % HEADS, 0, HEADS, SIZE, ROPE, RATIO, TOPK, ROOM, SPANS, SPAN,
                WINDOWS, MOST, SIZE // 2, False,
            )  # fmt: skip
    if FIRST < 2 and LAST >= 2:
        end_phase(count_ptr, begun + PROGRAMS * (2 - FIRST))
    if FIRST <= 2 and LAST >= 2:
        for number in tl.range(program, tl.cdiv(num_rows, ROWS) * (INNER // 32), PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            fp8_tile(
                heads_ptr, inner_codes_ptr, inner_scales_ptr, inner_ptr, num_rows, HEADS * SIZE, INNER, 0,
                INNER // GROUPS, item % (INNER // 32), 0, item // (INNER // 32) * ROWS, STEPS, STEPS, ROWS, WARPS,
                STAGES, False,
            )  # fmt: skip
    if FIRST < 3 and LAST >= 3:
        end_phase(count_ptr, begun + PROGRAMS * (3 - FIRST))
    if LAST >= 3:
        for number in tl.range(program, tl.cdiv(num_rows, LAST_ROWS) * (OUT // 32), PROGRAMS, num_stages=1):
            item = tl.cast(number, tl.int32)
            fp8_tile(
                inner_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, INNER, out_stride, 0, OUT, item % (OUT // 32), 0,
                item // (OUT // 32) * LAST_ROWS, LAST_STEPS, LAST_STEPS, LAST_ROWS, WARPS, STAGES, ROUND,
            )  # fmt: skip
            if RANKS > 1:
                meet(pads_ptr, item, rank, RANKS)


def launch_attend_to_output(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    weights: OutputWeights,
    out: Tensor,
    workspace: LatentWorkspace,
    shape: LatentShape,
    context: int,
    chosen: Tensor | None,
    meeting: Meeting | None,
    plan: OutputPlan,
) -> None:
    """See ``attend_to_output``; ``plan`` stands in for the usual one, for measuring."""
    from sparkchat.kernels.latent_attention import MOST_SPANS, SPAN, WINDOW_SPANS, latent_spans

    num_rows, heads, size = q.shape[-2], sinks.shape[0], cache.shape[2]
    tile = HALF_TILE
    room, spans = workspace.mixed.shape[2], latent_spans(shape, context)
    check_cache(cache, shape)
    check_flat(rows, positions, first_seen, ends, rope, sinks, chosen)
    space = workspace.mixed.shape
    if spans > room or space[1] != heads or num_rows > space[0] or cache.dtype == torch.float32:
        raise ValueError(
            f"no launch for {num_rows} rows of {spans} spans of {cache.dtype} in a space of {tuple(space)}"
        )
    mid, outs = weights.inner.shape[0], weights.output.shape[0]
    mixed = torch.empty((num_rows, heads, size), dtype=cache.dtype, device=q.device)
    inner = torch.empty((num_rows, mid), dtype=cache.dtype, device=q.device)
    programs = programs_at_once(q.device)
    phases = plan.launches if programs > 1 else tuple((n, n) for n in range(4))
    warps, tiles = weights.cut.warps, row_tile(num_rows)
    # A stage but the first has a buffer of its own, of codes and of rows for every warp.
    stages = min(plan.stages, 1 + _MOST_SHARED // (warps * (32 * STEP + 2 * STEP * tiles)))
    for first, last in phases:
        launch(
            _attend_to_output, (programs,),
            q, cache, rows, positions, first_seen, ends, rope, rows if chosen is None else chosen, sinks,
            workspace.mixed, workspace.stats, mixed, inner, out, weights.inner.tiles, weights.inner.scales,
            weights.output.tiles, weights.output.scales, rows if meeting is None else meeting.pads, workspace.count,
            num_rows, q.stride(0) if q.dim() == 3 else 0, q.stride(-2), cache.stride(0), cache.stride(1),
            shape.first_slot, shape.ring, scale_of(size), shape.eps, out.stride(0),
            0 if meeting is None else meeting.rank,
            HEADS=heads, SIZE=size, ROPE=shape.rope_dim, PARTS=1 if q.dim() == 2 else q.shape[0], RATIO=shape.ratio,
            TOPK=shape.topk, ROOM=room, SPANS=spans, SPAN=SPAN, WINDOWS=WINDOW_SPANS, MOST=MOST_SPANS,
            TILE=max(16, min(tile.heads, power_of_two(heads))), BLOCK=tile.keys, READS_AHEAD=tile.reads_ahead,
            EXACT=False, GROUPS=weights.groups, INNER=mid, OUT=outs, ROWS=tiles,
            LAST_ROWS=row_tile(num_rows, weights.is_rounded), ROUND=weights.is_rounded, WARPS=warps,
            STAGES=stages, RANKS=0 if meeting is None else meeting.pads.shape[0], AHEAD=plan.ahead, FIRST=first,
            LAST=last, PROGRAMS=programs, num_warps=warps,
        )  # fmt: skip
