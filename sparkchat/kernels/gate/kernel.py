"""The router: a program a row, so that no row knows of the others, and the lists of who goes where.

Of few rows the lists are made by the program that ends last; of many by a second launch, some experts a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import row_tile
from sparkchat.kernels.gate.plan import FEW_CHOICES, PLAN, GatePlan
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

_CHOICES_LISTED = 512
"""Of a step, where lists are a launch of their own."""


@triton.jit
def _softplus(x):
    """log(1 + exp(x)): the larger of x and 0, and log1p of what is at most 1, as a series that is exact to rounding."""
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * series


@triton.jit
def _scores(at, inside, part_stride, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    logits = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(at + part * part_stride, mask=inside, other=0.0)
    return tl.sqrt_rn(_softplus(logits))


@triton.jit
def _ranked(score, bias, is_expert):
    """Integers in the order of score + bias; what is no number comes first, what is no expert last. The card finds the
    largest integer of a warp in one instruction."""
    key = tl.where(score == score, score + bias, float("inf"))
    bits = key.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(is_expert, bits, -0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, chosen_ptr, lists_ptr, counts_ptr, items_ptr, arrived_ptr,
    num_rows, num_tokens, logits_stride, part_stride, scale,
    NUM_EXPERTS: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr, HAS_TABLE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    is_place = place < PER_ROW
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    if not HAS_TABLE:
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    wait(PDL)
    logits_ptr += row.to(tl.int64) * logits_stride
    if HAS_TABLE:
        token = tl.load(tokens_ptr + row)
        token = tl.minimum(tl.maximum(token, 0), num_tokens - 1)
        name = tl.load(table_ptr + token * PER_ROW + place, mask=is_place, other=0).to(tl.int32)
        chosen = _scores(logits_ptr + name, is_place, part_stride, PLACES, PARTS)
    else:
        score = _scores(logits_ptr + expert, is_expert, part_stride, BLOCK, PARTS)
        ranked = _ranked(score, bias, is_expert)
        name = tl.zeros((PLACES,), tl.int32)
        bits = score.to(tl.int32, bitcast=True)
        found = tl.zeros((PLACES,), tl.int32)
        for turn in tl.static_range(PER_ROW):
            # Of equals the lower one. Whoever was taken is below all, also below those that are no experts.
            best = tl.min(tl.where(ranked == tl.max(ranked, axis=0), expert, BLOCK), axis=0)
            ranked = tl.where(expert == best, -0x7FFFFFFF - 1, ranked)
            name = tl.where(place == turn, best, name)
            found = tl.where(place == turn, tl.sum(tl.where(expert == best, bits, 0), axis=0), found)
        chosen = found.to(tl.float32, bitcast=True)
    chosen = tl.where(is_place, chosen, 0.0)
    weight = chosen / tl.sum(chosen, axis=0) * scale
    # Experts ascending.
    is_before = (name[:, None] < name[None, :]) | ((name[:, None] == name[None, :]) & (place[:, None] < place[None, :]))
    to = row * PER_ROW + tl.sum((is_before & is_place[:, None]).to(tl.int32), axis=0)
    tl.store(weights_ptr + to, weight, mask=is_place)
    tl.store(chosen_ptr + to, name, mask=is_place)
    if CHOICES > 0:
        # All threads have written before the program is counted.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_rows - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr, 0)
            _list_few(
                chosen_ptr, lists_ptr, counts_ptr, items_ptr, num_rows * PER_ROW, NUM_EXPERTS, TILE, BLOCK, CHOICES
            )  # fmt: skip


@triton.jit
def _list_few(
    chosen_ptr, lists_ptr, counts_ptr, items_ptr, count,
    NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    choice = tl.arange(0, CHOICES)
    inside = choice < count
    # Other multiprocessors wrote these: not from the cache of this one.
    name = tl.load(chosen_ptr + choice, mask=inside, other=0, cache_modifier=".cg")
    # Those that are looked at lie beneath each other, in one thread: nothing is added up between threads.
    is_earlier = (name[:, None] == name[None, :]) & (choice[:, None] < choice[None, :])
    place = tl.sum(is_earlier.to(tl.int32), axis=0)
    tl.store(lists_ptr + name.to(tl.int64) * count + place, choice, mask=inside)
    _write_items(tl.histogram(name, BLOCK, mask=inside), counts_ptr, items_ptr, NUM_EXPERTS, TILE, BLOCK)


@triton.jit
def _write_items(total, counts_ptr, items_ptr, NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.arange(0, BLOCK)
    tl.store(counts_ptr + 1 + expert, total, mask=expert < NUM_EXPERTS)
    tiles = (total + TILE - 1) // TILE
    first_item = tl.cumsum(tiles, axis=0) - tiles
    for tile in range(tl.max(tiles, axis=0)):
        tl.store(items_ptr + first_item + tile, expert + tile * (TILE * 65536), mask=tile < tiles)
    tl.store(counts_ptr, tl.sum(tiles, axis=0))


@triton.jit(do_not_specialize=["count"])
def _list_choices(
    chosen_ptr, lists_ptr, counts_ptr, items_ptr, count,
    NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert = program * EXPERTS + tl.arange(0, EXPERTS)
    wait(PDL)
    listed = tl.zeros((EXPERTS,), tl.int32)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, count, CHOICES):
        choice = begin + tl.arange(0, CHOICES)
        inside = choice < count
        name = tl.load(chosen_ptr + choice, mask=inside, other=-1)
        is_named = (name[None, :] == expert[:, None]).to(tl.int32)
        place = listed[:, None] + tl.cumsum(is_named, axis=1) - is_named
        to = lists_ptr + expert[:, None].to(tl.int64) * count + place
        tl.store(to, tl.broadcast_to(choice[None, :], (EXPERTS, CHOICES)), mask=is_named != 0)
        listed += tl.sum(is_named, axis=1)
        if program == 0:
            total += tl.histogram(tl.maximum(name, 0), BLOCK, mask=inside)
    if program == 0:
        _write_items(total, counts_ptr, items_ptr, NUM_EXPERTS, TILE, BLOCK)


def launch_route(
    logits: Tensor,
    routing: Routing,
    scale: float,
    bias: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    arrived: Tensor | None = None,
    plan: GatePlan = PLAN,
) -> None:
    """See ``route``."""
    rows, per_row = routing.weights.shape
    experts = routing.lists.shape[0]
    check_flat(routing.weights, routing.chosen, routing.lists, bias, table, token_ids)
    block, tile, choices = power_of_two(experts), row_tile(rows), rows * per_row
    is_one = plan.is_one and arrived is not None and choices <= FEW_CHOICES
    launch(
        _route, (rows,),
        logits, logits if bias is None else bias, logits if table is None else table,
        logits if token_ids is None else token_ids, routing.weights, routing.chosen, routing.lists, routing.counts,
        routing.items, routing.counts if arrived is None else arrived, rows, 0 if table is None else table.shape[0],
        logits.stride(-2), logits.stride(0) if logits.dim() == 3 else 0, scale,
        NUM_EXPERTS=experts, PARTS=logits.shape[0] if logits.dim() == 3 else 1, PER_ROW=per_row,
        HAS_TABLE=table is not None, TILE=tile, BLOCK=block, PLACES=power_of_two(per_row),
        CHOICES=power_of_two(choices) if is_one else 0, lets_next=True, num_warps=plan.warps,
    )  # fmt: skip
    if not is_one:
        launch(
            _list_choices, (-(-experts // plan.listed),),
            routing.chosen, routing.lists, routing.counts, routing.items, choices,
            NUM_EXPERTS=experts, TILE=tile, BLOCK=block, EXPERTS=plan.listed,
            CHOICES=min(_CHOICES_LISTED, max(16, power_of_two(choices))), num_warps=4,
        )  # fmt: skip
