"""The router of few rows in one launch: the product with the router's weight, and behind it all that ``route`` does.

Programs multiply as those of ``gemm.kernel`` do, and the one that ends last chooses for all rows and makes the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import row_tile
from sparkchat.kernels.gate.kernel import ranked_of, softplus, write_items
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.gemm.kernel import LEAST_ROWS
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

MOST_ROWS = 8
_OUTS, _STEP = 64, 128


@dataclass(frozen=True)
class QuickPlan:
    """How it is launched; the parts of the sums are those of the logits."""

    stages: int = 5
    warps: int = 4


PLAN = QuickPlan()
TRIED = (PLAN, QuickPlan(3), QuickPlan(5, 8))


@triton.jit
def _product(
    x_ptr, w_ptr, logits_ptr, num_rows, size_k, x_stride, part_stride,
    NUM_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = out < NUM_EXPERTS
    row, step = tl.arange(0, TILE_ROWS), tl.arange(0, STEP)
    w_at = w_ptr + tl.where(is_out, out, 0)[:, None].to(tl.int64) * size_k + part * PART + step[None, :]
    x_at = x_ptr + row[None, :].to(tl.int64) * x_stride + part * PART + step[:, None]
    is_row = row < num_rows
    total = tl.zeros((OUTS, TILE_ROWS), tl.float32)
    for _ in range(0, PART, STEP):
        w = tl.load(w_at)
        x = tl.load(x_at, mask=is_row[None, :], other=0.0)
        if EXACT:
            total = tl.dot(w, x, total, input_precision="ieee")
        else:
            total = tl.dot(w, x, total)
        w_at += STEP
        x_at += STEP
    to = logits_ptr + part * part_stride + row[None, :] * NUM_EXPERTS + out[:, None]
    tl.store(to, total, mask=is_row[None, :] & is_out[:, None])


@triton.jit
def _scores_of(at, inside, part_stride, PARTS: tl.constexpr):
    logits = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg") + 0.0
    for part in tl.static_range(1, PARTS):
        # Other multiprocessors wrote these: not from the cache of this one.
        logits += tl.load(at + part * part_stride, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sqrt_rn(softplus(logits))


@triton.jit(do_not_specialize=["num_rows"])
def _gate_rows(
    x_ptr, w_ptr, logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, chosen_ptr, lists_ptr, counts_ptr,
    items_ptr, arrived_ptr, num_rows, num_tokens, size_k, x_stride, part_stride, scale,
    NUM_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, PROGRAMS: tl.constexpr, PER_ROW: tl.constexpr, HAS_TABLE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, EXACT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    if FIRST:
        _product(
            x_ptr, w_ptr, logits_ptr, num_rows, size_k, x_stride, part_stride, NUM_EXPERTS, TILE_ROWS, OUTS, STEP, PART,
            EXACT,
        )  # fmt: skip
    is_last = True
    if FIRST and SECOND:
        # All threads have written before the program is counted.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1
    if SECOND and is_last:
        tl.debug_barrier()
        tl.store(arrived_ptr, 0)
        _choose_all(
            logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, chosen_ptr, lists_ptr, counts_ptr, items_ptr,
            num_rows, num_tokens, part_stride, scale, NUM_EXPERTS, PARTS, PER_ROW, HAS_TABLE, TILE, ROWS, BLOCK, PLACES,
        )  # fmt: skip


@triton.jit
def _choose_all(
    logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, chosen_ptr, lists_ptr, counts_ptr, items_ptr, num_rows,
    num_tokens, part_stride, scale,
    NUM_EXPERTS: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr, HAS_TABLE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row, place = tl.arange(0, ROWS), tl.arange(0, PLACES)[None, :]
    is_row = row < num_rows
    inside = is_row[:, None] & (place < PER_ROW)
    expert = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_TABLE:
        token = tl.load(tokens_ptr + row, mask=is_row, other=0)
        token = tl.minimum(tl.maximum(token, 0), num_tokens - 1)
        name = tl.load(table_ptr + token[:, None] * PER_ROW + place, mask=inside, other=0).to(tl.int32)
        chosen = _scores_of(logits_ptr + row[:, None] * NUM_EXPERTS + name, inside, part_stride, PARTS)
        for turn in tl.static_range(PER_ROW):
            total += tl.sum(tl.where(place == turn, chosen, 0.0), axis=1)
    else:
        bias = tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
        is_expert = is_row[:, None] & (expert < NUM_EXPERTS)
        score = _scores_of(logits_ptr + row[:, None] * NUM_EXPERTS + expert, is_expert, part_stride, PARTS)
        ranked = ranked_of(score, bias, expert < NUM_EXPERTS)
        bits = score.to(tl.int32, bitcast=True)
        name = tl.zeros((ROWS, PLACES), tl.int32)
        found = tl.zeros((ROWS, PLACES), tl.int32)
        for turn in tl.static_range(PER_ROW):
            # Of equals the lower one. Whoever was taken is below all, also below those that are no experts.
            most = tl.max(ranked, axis=1)[:, None]
            best = tl.min(tl.where(ranked == most, expert, BLOCK), axis=1)
            one = tl.sum(tl.where(expert == best[:, None], bits, 0), axis=1)
            ranked = tl.where(expert == best[:, None], -0x7FFFFFFF - 1, ranked)
            name = tl.where(place == turn, best[:, None], name)
            found = tl.where(place == turn, one[:, None], found)
            total += one.to(tl.float32, bitcast=True)
        chosen = found.to(tl.float32, bitcast=True)
    weight = chosen / total[:, None] * scale
    # Experts ascending.
    first, second = name[:, :, None], name[:, None, :]
    where, other = tl.arange(0, PLACES)[None, :, None], tl.arange(0, PLACES)[None, None, :]
    is_before = ((first < second) | ((first == second) & (where < other))) & (where < PER_ROW)
    to = row[:, None] * PER_ROW + tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(weights_ptr + to, weight, mask=inside)
    tl.store(chosen_ptr + to, name, mask=inside)
    # Each choice compared with each.
    CHOICES: tl.constexpr = ROWS * PLACES
    names, places = tl.reshape(tl.where(inside, name, -1), (CHOICES,)), tl.reshape(to, (CHOICES,))
    is_earlier = (names[:, None] == names[None, :]) & (places[:, None] < places[None, :])
    before = tl.sum(is_earlier.to(tl.int32), axis=0)
    count = num_rows * PER_ROW
    tl.store(lists_ptr + names.to(tl.int64) * count + before, places, mask=names >= 0)
    write_items(
        tl.histogram(tl.maximum(names, 0), BLOCK, mask=names >= 0), counts_ptr, items_ptr, NUM_EXPERTS, TILE, BLOCK
    )  # fmt: skip


def takes(rows: int, size: int, parts: int) -> bool:
    """Whether ``launch_gate_rows`` takes so many rows, and weights of ``size`` inputs summed in ``parts``."""
    return rows <= MOST_ROWS and size % (parts * _STEP) == 0


def launch_gate_rows(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    routing: Routing,
    scale: float,
    bias: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    arrived: Tensor,
    plan: QuickPlan = PLAN,
) -> None:
    """x [N, d] of up to MOST_ROWS rows, weight [E, d]; logits [S, N, E] float32 receives partial sums; the rest as
    ``route``."""
    rows, per_row = routing.weights.shape
    (experts, size), parts = weight.shape, logits.shape[0]
    check_flat(weight, logits, routing.weights, routing.chosen, routing.lists, bias, table, token_ids)
    if not takes(rows, size, parts):
        raise ValueError(f"one launch routes up to {MOST_ROWS} rows by whole steps, not {rows} of {size} in {parts}")
    blocks = -(-experts // _OUTS)

    def start(is_first: bool, is_second: bool, grid: tuple[int, int]) -> None:
        launch(
            _gate_rows, grid,
            x, weight, logits, logits if bias is None else bias, logits if table is None else table,
            logits if token_ids is None else token_ids, routing.weights, routing.chosen, routing.lists, routing.counts,
            routing.items, arrived, rows, 0 if table is None else table.shape[0], size, x.stride(0), logits.stride(0),
            scale,
            NUM_EXPERTS=experts, TILE_ROWS=LEAST_ROWS, OUTS=_OUTS, STEP=_STEP, PART=size // parts, PARTS=parts,
            PROGRAMS=blocks * parts, PER_ROW=per_row, HAS_TABLE=table is not None, TILE=row_tile(rows),
            ROWS=1 if rows == 1 else MOST_ROWS, BLOCK=power_of_two(experts), PLACES=power_of_two(per_row),
            EXACT=weight.element_size() == 4, FIRST=is_first, SECOND=is_second, num_warps=plan.warps,
            num_stages=plan.stages,
        )  # fmt: skip

    # The interpreter counts no programs against each other.
    if triton.knobs.runtime.interpret and not x.is_cuda:
        start(True, False, (blocks, parts))
        start(False, True, (1, 1))
    else:
        start(True, True, (blocks, parts))
