"""Two launches for all experts of a layer: gate, up and their product; then down.

A program takes two tiles of 16 outputs of one expert and up to ROWS of the rows that go to it; the programs in front
are those of the expert that every row goes to. Programs behind the last item of the routing end at once, so that the
grid is that of the worst case and no number is read by the host. Every choice of a row has a place of its own in what
is written, so nothing is added in memory and nothing depends on who comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import ExpertPlan, most_items, plan_of, row_tile
from sparkchat.kernels.experts.weights import TiledExperts
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import launch, power_of_two, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import fp4_pair, fp8_pair


@triton.jit
def _chosen_rows(item, items_ptr, counts_ptr, lists_ptr, list_size, at):
    """(expert, which of its rows the item takes, are there such, which choices these are)"""
    word = tl.load(items_ptr + item)
    expert, first = word & 0xFFFF, word >> 16
    place = first + at
    is_row = place < tl.load(counts_ptr + 1 + expert)
    choice = tl.load(lists_ptr + expert.to(tl.int64) * list_size + place, mask=is_row, other=0)
    return expert, is_row, choice


@triton.jit
def _activate(gate, up, limit):
    """silu(gate) * up, gate clamped above, up on both sides; what is no number stays none."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items"])
def _gate_up(
    x_ptr, gate_ptr, up_ptr, gate_scales, up_scales, shared_gate, shared_up, shared_gate_scales, shared_up_scales,
    items_ptr, counts_ptr, lists_ptr, weights_ptr, inner_ptr,
    num_rows, list_size, shared_items, x_stride, limit,
    PER_ROW: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, item = tl.program_id(0), tl.program_id(1)
    # Row n of warp w lies at w * ROWS + n.
    at, out_at = tl.arange(0, WARPS * ROWS) % ROWS, tl.arange(0, ROWS)
    wait(PDL)
    if item >= shared_items + tl.load(counts_ptr):
        return
    if item < shared_items:
        row, to_row = item * ROWS + at, item * ROWS + out_at
        is_out = to_row < num_rows
        begin, block = tile.to(tl.int64) * (STEPS * 2048), tile // 8 * STEPS
        gate, up = fp8_pair(
            x_ptr + row.to(tl.int64) * x_stride, row < num_rows, shared_gate + begin, shared_up + begin,
            shared_gate_scales + block, shared_up_scales + block, 0, STEPS, STEPS, ROWS, WARPS, STAGES, ROUND,
        )  # fmt: skip
        value = _activate(gate, up, limit)
        to = num_rows * PER_ROW + to_row
    else:
        expert, is_row, choice = _chosen_rows(item - shared_items, items_ptr, counts_ptr, lists_ptr, list_size, at)
        begin = (expert.to(tl.int64) * (WIDTH // 16) + tile) * STEPS
        gate, up = fp4_pair(
            x_ptr + (choice // PER_ROW).to(tl.int64) * x_stride, is_row, gate_ptr + begin * 1024, up_ptr + begin * 1024,
            gate_scales + begin * 16, up_scales + begin * 16, STEPS, ROWS, WARPS, STAGES, ROUND,
        )  # fmt: skip
        _, is_out, to = _chosen_rows(item - shared_items, items_ptr, counts_ptr, lists_ptr, list_size, out_at)
        value = _activate(gate, up, limit) * tl.load(weights_ptr + to, mask=is_out, other=0.0)[None, :]
    out = inner_ptr + to[None, :].to(tl.int64) * WIDTH + (tile * 16 + tl.arange(0, 16))[:, None]
    tl.store(out, value.to(inner_ptr.dtype.element_ty), mask=is_out[None, :])


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items"])
def _down(
    inner_ptr, down_ptr, down_scales, shared_down, shared_down_scales, items_ptr, counts_ptr, lists_ptr, parts_ptr,
    num_rows, list_size, shared_items,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, item = tl.program_id(0), tl.program_id(1)
    at, out_at = tl.arange(0, WARPS * ROWS) % ROWS, tl.arange(0, ROWS)
    wait(PDL)
    if item >= shared_items + tl.load(counts_ptr):
        return
    if item < shared_items:
        row, to_row = item * ROWS + at, item * ROWS + out_at
        is_out = to_row < num_rows
        first, scales = shared_down + (2 * pair).to(tl.int64) * (STEPS * 2048), shared_down_scales + pair // 4 * STEPS
        one, two = fp8_pair(
            inner_ptr + (num_rows * PER_ROW + row).to(tl.int64) * (STEPS * 128), row < num_rows,
            first, first + STEPS * 2048, scales, scales, 0, STEPS, STEPS, ROWS, WARPS, STAGES, ROUND,
        )  # fmt: skip
        to = PER_ROW * num_rows + to_row
    else:
        expert, is_row, choice = _chosen_rows(item - shared_items, items_ptr, counts_ptr, lists_ptr, list_size, at)
        begin = (expert.to(tl.int64) * (SIZE // 16) + 2 * pair) * STEPS
        first, scales = down_ptr + begin * 1024, down_scales + begin * 16
        one, two = fp4_pair(
            inner_ptr + choice.to(tl.int64) * (STEPS * 128), is_row, first, first + STEPS * 1024,
            scales, scales + STEPS * 16, STEPS, ROWS, WARPS, STAGES, ROUND,
        )  # fmt: skip
        _, is_out, choice = _chosen_rows(item - shared_items, items_ptr, counts_ptr, lists_ptr, list_size, out_at)
        to = choice % PER_ROW * num_rows + choice // PER_ROW
    out = parts_ptr + to[None, :].to(tl.int64) * SIZE + (pair * 32 + tl.arange(0, 16))[:, None]
    tl.store(out, one, mask=is_out[None, :])
    tl.store(out + 16, two, mask=is_out[None, :])


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
    rows, per_row = routing.weights.shape
    experts, width, half = weights.gate.tiles.shape
    plan, tile = plan or plan_of(2 * half), row_tile(rows)
    shared_items, gate, up = -(-rows // tile), weights.shared_gate, weights.shared_up
    launch(
        _gate_up, (width // OUTS, shared_items + most_items(rows, per_row, experts)),
        x, weights.gate.tiles, weights.up.tiles, weights.gate.scales, weights.up.scales,
        gate.tiles, up.tiles, gate.scales, up.scales,
        routing.items, routing.counts, routing.lists, routing.weights, inner,
        rows, routing.lists.shape[1], shared_items, x.stride(0), limit,
        PER_ROW=per_row, WIDTH=width, STEPS=2 * half // STEP, ROWS=tile,
        WARPS=plan.warps, STAGES=plan.stages, ROUND=is_rounded, num_warps=plan.warps, num_stages=plan.stages,
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
    rows, per_row = routing.weights.shape
    experts, size, half = weights.down.tiles.shape
    plan, tile = plan or plan_of(2 * half), row_tile(rows)
    shared_items = -(-rows // tile)
    launch(
        _down, (size // (2 * OUTS), shared_items + most_items(rows, per_row, experts)),
        inner, weights.down.tiles, weights.down.scales, weights.shared_down.tiles, weights.shared_down.scales,
        routing.items, routing.counts, routing.lists, parts, rows, routing.lists.shape[1], shared_items,
        PER_ROW=per_row, SIZE=size, STEPS=2 * half // STEP, ROWS=tile,
        WARPS=plan.warps, STAGES=plan.stages, ROUND=is_rounded, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def launch_add_parts(parts: Tensor, out: Tensor) -> None:
    """See ``add_parts``."""
    places, rows, size = parts.shape
    block = min(1024, power_of_two(size))
    launch(
        _add_parts, (rows, -(-size // block)), parts, out, size, parts.stride(0), PLACES=places, BLOCK=block,
        num_warps=max(1, block // 256),
    )  # fmt: skip
