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
from sparkchat.kernels.experts.units import down_values, gate_up_values, store_inner, store_parts
from sparkchat.kernels.experts.weights import TiledExperts
from sparkchat.kernels.fp8.plan import MULTIPROCESSORS
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import launch, power_of_two, wait
from sparkchat.kernels.tiles.packing import OUTS, STEP
from sparkchat.kernels.tiles.product import INTERPRETED, call_bytes

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
def _sorted_out(chosen_ptr, count, ROWS: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr):
    """[CHOICES] the expert of each choice; [EXPERTS] how many items an expert has and how many come before; all."""
    choice = tl.arange(0, CHOICES)
    name = tl.load(chosen_ptr + choice, mask=choice < count, other=0)
    tiles = (tl.histogram(name, EXPERTS, mask=choice < count) + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, axis=0) - tiles
    return tl.where(choice < count, name, 0x10000), tiles, before, tl.sum(tiles, axis=0)


@triton.jit
def _word(number, items_ptr, most_items, tiles, before, ROWS: tl.constexpr, CHOICES: tl.constexpr):
    """Which expert an item is of, and the place of its first choice in the list; anything where it is no item."""
    if CHOICES == 0:
        word = tl.load(items_ptr + tl.minimum(tl.maximum(number, 0), most_items - 1))
    else:
        is_it = (before <= number) & (number < before + tiles)
        expert = tl.arange(0, tiles.shape[0])
        word = tl.sum(tl.where(is_it, expert + (number - before) * (ROWS * 65536), 0), axis=0)
    return word


@triton.jit
def _call_codes(
    tile, item, word, codes, shared_codes, shared_items,
    TILES: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Call a unit's codes into L2, each warp its share."""
    thread = tl.arange(0, WARPS * 32)
    SHARE: tl.constexpr = PAIRS * STEPS * 2048 // WARPS
    if item < shared_items:
        at, size = shared_codes + tile.to(tl.int64) * (STEPS * 4096), 2 * SHARE
    else:
        at, size = codes + ((word & 0xFFFF).to(tl.int64) * TILES + tile) * (STEPS * 2048), SHARE
    call_bytes(at + thread // 32 * size, tl.zeros_like(thread) + size, thread % 32)


@triton.jit(do_not_specialize=["num_rows", "list_size", "shared_items", "most_items", "programs"])
def _mix_experts(
    x_ptr, up_codes, up_scales, shared_up_codes, shared_up_scales, down_codes, down_scales, shared_down_codes,
    shared_down_scales, items_ptr, counts_ptr, lists_ptr, weights_ptr, chosen_ptr, inner_ptr, parts_ptr,
    state_ptr, num_rows, list_size, shared_items, most_items, programs, x_stride, limit,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, ROUND: tl.constexpr, AHEAD: tl.constexpr,
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
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
    if CHOICES == 0:
        items = shared_items + tl.load(counts_ptr)
        name, tiles, before = 0, 0, 0
    else:
        name, tiles, before, items = _sorted_out(chosen_ptr, num_rows * PER_ROW, ROWS, CHOICES, EXPERTS)
        items += shared_items
    begin_of_down = items * UP_UNITS
    end = begin_of_down + items * DOWN_UNITS
    unit = tl.sum(asked, axis=0)
    while unit < end:
        if unit < begin_of_down:
            item, tile = unit // UP_UNITS, unit % UP_UNITS * UP_PAIRS
            word = _word(item - shared_items, items_ptr, most_items, tiles, before, ROWS, CHOICES)
            value, to, is_out = gate_up_values(
                tile, item, word, x_ptr, up_codes, up_scales,
                shared_up_codes, shared_up_scales, counts_ptr, lists_ptr, weights_ptr, name, num_rows, list_size,
                shared_items, x_stride, limit,
                PER_ROW, UP_TILES, UP_STEPS, ROWS, UP_PAIRS, UP_SPLIT, UP_STAGES, UP_SHARED_STAGES, UP_LATE, ROUND,
                CHOICES,
            )  # fmt: skip
            asked = _ask(state_ptr, WARPS)
            store_inner(value, to, is_out, tile, inner_ptr, UP_TILES, UP_PAIRS)
            # All threads of this program have stored when it is counted.
            tl.debug_barrier()
            tl.atomic_add(state_ptr + HEAD + item, 1, sem="release", scope="gpu")
        else:
            item, tile = (unit - begin_of_down) // DOWN_UNITS, (unit - begin_of_down) % DOWN_UNITS * DOWN_PAIRS
            word = _word(item - shared_items, items_ptr, most_items, tiles, before, ROWS, CHOICES)
            counter = state_ptr + HEAD + item
            if tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < UP_UNITS:
                if AHEAD:
                    _call_codes(
                        tile, item, word, down_codes, shared_down_codes, shared_items,
                        DOWN_TILES, DOWN_STEPS, DOWN_PAIRS, WARPS,
                    )  # fmt: skip
                while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < UP_UNITS:
                    pass
            tl.debug_barrier()
            one, two, to, is_out = down_values(
                tile, item, word, inner_ptr, down_codes, down_scales, shared_down_codes, shared_down_scales, counts_ptr,
                lists_ptr, name, num_rows, list_size, shared_items,
                PER_ROW, DOWN_TILES, DOWN_STEPS, ROWS, DOWN_PAIRS, DOWN_SPLIT, DOWN_STAGES, DOWN_SHARED_STAGES,
                DOWN_LATE, ROUND, CHOICES,
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
        shared_down.scales, routing.items, routing.counts, routing.lists, routing.weights, routing.chosen, inner, parts,
        state, rows, routing.lists.shape[1], shared_items, most, programs, x.stride(0), limit,
        PER_ROW=per_row, ROWS=tile, WARPS=first.warps, ROUND=is_rounded, AHEAD=plan.is_ahead,
        CHOICES=0 if plan.is_listed(rows * per_row) else power_of_two(plan.most_choices),
        EXPERTS=power_of_two(weights.count),
        UP_TILES=both // (2 * OUTS), UP_STEPS=size // STEP, UP_PAIRS=first.pairs, UP_SPLIT=first.split,
        UP_STAGES=first.stages, UP_SHARED_STAGES=first.shared_stages, UP_LATE=first.is_late,
        DOWN_TILES=size // (2 * OUTS), DOWN_STEPS=weights.width // STEP, DOWN_PAIRS=second.pairs,
        DOWN_SPLIT=second.split, DOWN_STAGES=second.stages, DOWN_SHARED_STAGES=second.shared_stages,
        DOWN_LATE=second.is_late, num_warps=first.warps, num_stages=first.stages, maxnreg=plan.registers,
    )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # The interpreter runs one program after the other, and the first does all.
    return 1 if triton.knobs.runtime.interpret else MULTIPROCESSORS
