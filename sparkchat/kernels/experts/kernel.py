"""Two launches for all experts of a layer: gate, up and their product; then down.

A program takes a few pairs of tiles of 16 outputs of one expert and up to ROWS of the rows that go to it; the programs
in front are those of the expert that every row goes to. Programs behind the last item of the routing end at once, so
that the grid is that of the worst case and no number is read by the host. Every choice of a row has a place of its own
in what is written, so nothing is added in memory and nothing depends on who comes first.

A program's way to its first codes is one load long: which expert it is; everything else about its rows is asked for
meanwhile. Calling all of a program's codes into L2 at its start made it slower (benchmarks/results).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import ExpertPlan, down_plan, gate_up_plan, most_items, row_tile
from sparkchat.kernels.experts.units import (
    routed_down,
    routed_gate_up,
    shared_down,
    shared_gate_up,
    store_inner,
    store_parts,
    word_of,
)
from sparkchat.kernels.experts.weights import TiledExperts
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import launch, power_of_two, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import call_ahead


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items", "most_items"])
def _gate_up(
    x_ptr, codes_ptr, scales_ptr, shared_codes, shared_scales, items_ptr, counts_ptr, lists_ptr, weights_ptr, inner_ptr,
    num_rows, list_size, shared_items, most_items, x_stride, limit,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SHARED_STAGES: tl.constexpr, LATE: tl.constexpr,
    ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, item = tl.program_id(0) * PAIRS, tl.program_id(1)
    if PDL == 1:  # noqa: SIM102 - one is decided when compiling, the other when running
        # Which experts are hit is not known yet; the shared one always is.
        if item < shared_items:
            call_ahead(shared_codes + tile.to(tl.int64) * (STEPS * 4096), PAIRS * STEPS, WARPS)
    if PDL > 0:
        # In this order: what starts next may read, before it waits itself, what the router wrote.
        tl.extra.cuda.gdc_wait()
    if PDL % 2 == 1 or PDL == 4:
        tl.extra.cuda.gdc_launch_dependents()
    word = word_of(item, items_ptr, shared_items, most_items)
    if item >= shared_items + tl.load(counts_ptr):
        return
    if item < shared_items:
        value, to, is_out = shared_gate_up(
            tile, item, x_ptr, shared_codes, shared_scales, num_rows, x_stride, limit,
            PER_ROW, STEPS, ROWS, PAIRS, SPLIT, SHARED_STAGES, ROUND,
        )  # fmt: skip
    else:
        value, to, is_out = routed_gate_up(
            tile, word, x_ptr, codes_ptr, scales_ptr, counts_ptr, lists_ptr, weights_ptr, list_size, x_stride, limit,
            PER_ROW, TILES, STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
        )  # fmt: skip
    store_inner(value, to, is_out, tile, inner_ptr, TILES, PAIRS)


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items", "most_items"])
def _down(
    inner_ptr, codes_ptr, scales_ptr, shared_codes, shared_scales, items_ptr, counts_ptr, lists_ptr, parts_ptr,
    num_rows, list_size, shared_items, most_items,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SHARED_STAGES: tl.constexpr, LATE: tl.constexpr,
    ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, item = tl.program_id(0) * PAIRS, tl.program_id(1)
    # Gate and up let this start when the router had ended, so that its lists may be read before all else has.
    word = word_of(item, items_ptr, shared_items, most_items)
    if item >= shared_items + tl.load(counts_ptr):
        return
    if PDL == 1:  # noqa: SIM102
        if item < shared_items:
            call_ahead(shared_codes + tile.to(tl.int64) * (STEPS * 4096), PAIRS * STEPS, WARPS)
    wait(PDL)
    if item < shared_items:
        one, two, to, is_out = shared_down(
            tile, item, inner_ptr, shared_codes, shared_scales, num_rows,
            PER_ROW, STEPS, ROWS, PAIRS, SPLIT, SHARED_STAGES, ROUND,
        )  # fmt: skip
    else:
        one, two, to, is_out = routed_down(
            tile, word, inner_ptr, codes_ptr, scales_ptr, counts_ptr, lists_ptr, num_rows, list_size,
            PER_ROW, TILES, STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
        )  # fmt: skip
    store_parts(one, two, to, is_out, tile, parts_ptr, TILES, PAIRS)


@triton.jit
def _add_parts(parts_ptr, out_ptr, size, part_stride, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PLACES):
        total += tl.load(parts_ptr + place * part_stride + row * size + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch_gate_up(
    x: Tensor,
    weights: TiledExperts,
    routing: Routing,
    inner: Tensor,
    limit: float,
    is_rounded: bool,
    plan: ExpertPlan | None = None,
) -> None:
    """inner [N * k + N, width] = what the down projections multiply: every choice's, then the shared expert's rows."""
    (rows, per_row), experts, (both, size) = routing.weights.shape, weights.count, weights.shared_gate_up.shape
    plan, tile, tiles = plan or gate_up_plan(both, size, rows), row_tile(rows), both // (2 * OUTS)
    bank, shared, shared_items = weights.gate_up, weights.shared_gate_up, -(-rows // tile)
    most = most_items(rows, per_row, experts)
    launch(
        _gate_up, (tiles // plan.pairs, shared_items + most),
        x, bank.tiles, bank.scales, shared.tiles, shared.scales,
        routing.items, routing.counts, routing.lists, routing.weights, inner,
        rows, routing.lists.shape[1], shared_items, most, x.stride(0), limit,
        PER_ROW=per_row, TILES=tiles, STEPS=size // STEP, ROWS=tile, PAIRS=plan.pairs, SPLIT=plan.split,
        WARPS=plan.warps, STAGES=plan.stages, SHARED_STAGES=plan.shared_stages, LATE=plan.is_late,
        ROUND=is_rounded, is_streaming=True, lets_next=False,
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers or None,
    )  # fmt: skip


def launch_down(
    inner: Tensor,
    weights: TiledExperts,
    routing: Routing,
    parts: Tensor,
    is_rounded: bool,
    plan: ExpertPlan | None = None,
) -> None:
    """parts [k + 1, N, d] = every choice's output, experts ascending, then the shared one's."""
    (rows, per_row), experts, (size, width) = routing.weights.shape, weights.count, weights.shared_down.shape
    plan, tile, tiles = plan or down_plan(size, width, rows), row_tile(rows), size // (2 * OUTS)
    bank, shared, shared_items = weights.down, weights.shared_down, -(-rows // tile)
    most = most_items(rows, per_row, experts)
    launch(
        _down, (tiles // plan.pairs, shared_items + most),
        inner, bank.tiles, bank.scales, shared.tiles, shared.scales,
        routing.items, routing.counts, routing.lists, parts, rows, routing.lists.shape[1], shared_items, most,
        PER_ROW=per_row, TILES=tiles, STEPS=width // STEP, ROWS=tile, PAIRS=plan.pairs, SPLIT=plan.split,
        WARPS=plan.warps, STAGES=plan.stages, SHARED_STAGES=plan.shared_stages, LATE=plan.is_late,
        ROUND=is_rounded, is_streaming=True,
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers or None,
    )  # fmt: skip


def launch_add_parts(parts: Tensor, out: Tensor) -> None:
    """See ``add_parts``."""
    places, rows, size = parts.shape
    block = min(1024, power_of_two(size))
    launch(
        _add_parts, (rows, -(-size // block)), parts, out, size, parts.stride(0), PLACES=places, BLOCK=block,
        lets_next=True, num_warps=max(1, block // 256),
    )  # fmt: skip
