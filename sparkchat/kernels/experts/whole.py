"""One launch for all experts of a layer of few rows: a queue of units, first those of gate and up, then those of down.

Every program takes a unit, a few pairs of tiles of one item, and then the next that nobody has; so all multiprocessors
read weights until nothing is left, and nobody waits for the end of gate and up. A unit of down begins when all units of
gate and up of its own item have ended, which a counter of the item says; as units are taken in order, those are with
programs that run, so that no program waits for one that has not started. Which program takes what changes no bit.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import WholePlan, most_items, row_tile
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
from sparkchat.kernels.fp8.plan import MULTIPROCESSORS
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import INTERPRETED

HEAD = tl.constexpr(2)
"""Numbers in front of the items' counters: units that were asked for, programs that have ended."""


# A sum over the threads of a warp, into which an addition to one place is turned, would be waited for at once.
_ASK_ASM = tl.constexpr(
    "{ .reg .pred p; .reg .b32 found; mov.u32 found, 0; setp.eq.u32 p, $2, 0;"
    " @p atom.relaxed.gpu.global.inc.u32 found, [$1], 0x7fffffff; mov.u32 $0, found; }"
)


@triton.jit
def _ask(queue_ptr, WARPS: tl.constexpr):
    """[threads] whose sum is the number of the next unit: it is on its way until somebody adds them up."""
    thread = tl.arange(0, WARPS * 32)
    queue = queue_ptr + tl.zeros_like(thread)
    if INTERPRETED:
        return tl.where(thread == 0, tl.atomic_add(queue, 1, mask=thread == 0), 0)
    else:
        return tl.inline_asm_elementwise(
            _ASK_ASM, "=r,l,r", [queue.to(tl.uint64), thread], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _count(state_ptr, item):
    """A unit of gate and up of the item has ended."""
    # All threads of this program have stored when it is counted.
    tl.debug_barrier()
    tl.atomic_add(state_ptr + HEAD + item, 1, sem="release", scope="gpu")


@triton.jit
def _await(state_ptr, item, UNITS: tl.constexpr):
    """Until all units of gate and up of the item have ended."""
    while tl.atomic_add(state_ptr + HEAD + item, 0, sem="acquire", scope="gpu") < UNITS:
        pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items", "most_items", "programs"])
def _mix_experts(
    x_ptr, up_codes, up_scales, shared_up_codes, shared_up_scales, down_codes, down_scales, shared_down_codes,
    shared_down_scales, items_ptr, counts_ptr, lists_ptr, weights_ptr, inner_ptr, parts_ptr, state_ptr,
    num_rows, list_size, shared_items, most_items, programs, x_stride, limit,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, ROUND: tl.constexpr,
    UP_TILES: tl.constexpr, UP_STEPS: tl.constexpr, UP_PAIRS: tl.constexpr, UP_SPLIT: tl.constexpr,
    UP_STAGES: tl.constexpr, UP_SHARED_STAGES: tl.constexpr, UP_LATE: tl.constexpr,
    DOWN_TILES: tl.constexpr, DOWN_STEPS: tl.constexpr, DOWN_PAIRS: tl.constexpr, DOWN_SPLIT: tl.constexpr,
    DOWN_STAGES: tl.constexpr, DOWN_SHARED_STAGES: tl.constexpr, DOWN_LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    UP_UNITS: tl.constexpr = UP_TILES // UP_PAIRS
    DOWN_UNITS: tl.constexpr = DOWN_TILES // DOWN_PAIRS
    wait(PDL)
    # The first one too: who has not started has none, so that nobody waits for somebody for whom there is no room.
    asked = _ask(state_ptr, WARPS)
    items = shared_items + tl.load(counts_ptr)
    down = items * UP_UNITS
    # Four loops, so that what each keeps in registers it keeps while it runs: units come in this order.
    unit = tl.sum(asked, axis=0)
    while unit < shared_items * UP_UNITS:
        item, tile = unit // UP_UNITS, unit % UP_UNITS * UP_PAIRS
        value, to, is_out = shared_gate_up(
            tile, item, x_ptr, shared_up_codes, shared_up_scales, num_rows, x_stride, limit,
            PER_ROW, UP_STEPS, ROWS, UP_PAIRS, UP_SPLIT, UP_SHARED_STAGES, ROUND,
        )  # fmt: skip
        asked = _ask(state_ptr, WARPS)
        store_inner(value, to, is_out, tile, inner_ptr, UP_TILES, UP_PAIRS)
        _count(state_ptr, item)
        unit = tl.sum(asked, axis=0)
    while unit < down:
        item, tile = unit // UP_UNITS, unit % UP_UNITS * UP_PAIRS
        value, to, is_out = routed_gate_up(
            tile, word_of(item, items_ptr, shared_items, most_items), x_ptr, up_codes, up_scales, counts_ptr, lists_ptr,
            weights_ptr, list_size, x_stride, limit,
            PER_ROW, UP_TILES, UP_STEPS, ROWS, UP_PAIRS, UP_SPLIT, UP_STAGES, UP_LATE, ROUND,
        )  # fmt: skip
        asked = _ask(state_ptr, WARPS)
        store_inner(value, to, is_out, tile, inner_ptr, UP_TILES, UP_PAIRS)
        _count(state_ptr, item)
        unit = tl.sum(asked, axis=0)
    while unit < down + shared_items * DOWN_UNITS:
        item, tile = (unit - down) // DOWN_UNITS, (unit - down) % DOWN_UNITS * DOWN_PAIRS
        _await(state_ptr, item, UP_UNITS)
        one, two, to, is_out = shared_down(
            tile, item, inner_ptr, shared_down_codes, shared_down_scales, num_rows,
            PER_ROW, DOWN_STEPS, ROWS, DOWN_PAIRS, DOWN_SPLIT, DOWN_SHARED_STAGES, ROUND,
        )  # fmt: skip
        asked = _ask(state_ptr, WARPS)
        store_parts(one, two, to, is_out, tile, parts_ptr, DOWN_TILES, DOWN_PAIRS)
        unit = tl.sum(asked, axis=0)
    while unit < down + items * DOWN_UNITS:
        item, tile = (unit - down) // DOWN_UNITS, (unit - down) % DOWN_UNITS * DOWN_PAIRS
        word = word_of(item, items_ptr, shared_items, most_items)
        _await(state_ptr, item, UP_UNITS)
        one, two, to, is_out = routed_down(
            tile, word, inner_ptr, down_codes, down_scales, counts_ptr, lists_ptr, num_rows, list_size,
            PER_ROW, DOWN_TILES, DOWN_STEPS, ROWS, DOWN_PAIRS, DOWN_SPLIT, DOWN_STAGES, DOWN_LATE, ROUND,
        )  # fmt: skip
        asked = _ask(state_ptr, WARPS)
        store_parts(one, two, to, is_out, tile, parts_ptr, DOWN_TILES, DOWN_PAIRS)
        unit = tl.sum(asked, axis=0)
    # Who ends last leaves all numbers as the next launch must find them: nobody reads them any more.
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        for at in range(0, items + HEAD, WARPS * 32):
            number = at + tl.arange(0, WARPS * 32)
            tl.store(state_ptr + number, tl.zeros_like(number), mask=number < items + HEAD)


def launch_mix_experts(
    x: Tensor,
    weights: TiledExperts,
    routing: Routing,
    inner: Tensor,
    parts: Tensor,
    state: Tensor,
    limit: float,
    is_rounded: bool,
    plan: WholePlan,
) -> None:
    """See ``run_experts``."""
    (rows, per_row), (both, size) = routing.weights.shape, weights.shared_gate_up.shape
    plan, tile, most = plan.of(both, size, weights.width), row_tile(rows), most_items(rows, per_row, weights.count)
    shared_items, first, second = -(-rows // tile), plan.gate_up, plan.down
    if state.numel() < HEAD.value + shared_items + most:
        raise ValueError(f"{state.numel()} counters are too few for {shared_items + most} items")
    up, down = weights.gate_up, weights.down
    shared_up, shared_down = weights.shared_gate_up, weights.shared_down
    # No more programs than units of the most items there can be.
    units = (shared_items + most) * (both // (2 * OUTS * first.pairs) + size // (2 * OUTS * second.pairs))
    programs = min(plan.programs * _multiprocessors(x.device), units)
    launch(
        _mix_experts, (programs,),
        x, up.tiles, up.scales, shared_up.tiles, shared_up.scales, down.tiles, down.scales, shared_down.tiles,
        shared_down.scales, routing.items, routing.counts, routing.lists, routing.weights, inner, parts, state,
        rows, routing.lists.shape[1], shared_items, most, programs, x.stride(0), limit,
        PER_ROW=per_row, ROWS=tile, WARPS=first.warps, ROUND=is_rounded,
        UP_TILES=both // (2 * OUTS), UP_STEPS=size // STEP, UP_PAIRS=first.pairs, UP_SPLIT=first.split,
        UP_STAGES=first.stages, UP_SHARED_STAGES=first.shared_stages, UP_LATE=first.is_late,
        DOWN_TILES=size // (2 * OUTS), DOWN_STEPS=weights.width // STEP, DOWN_PAIRS=second.pairs,
        DOWN_SPLIT=second.split, DOWN_STAGES=second.stages, DOWN_SHARED_STAGES=second.shared_stages,
        DOWN_LATE=second.is_late, is_streaming=True,
        num_warps=first.warps, num_stages=first.stages, maxnreg=plan.registers,
    )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # The interpreter runs one program after the other, and the first does all.
    return 1 if triton.knobs.runtime.interpret else MULTIPROCESSORS
