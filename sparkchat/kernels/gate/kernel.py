"""The router in one program: rows are taken a block at a time, experts lie side by side in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.experts.plan import row_tile
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

MOST_ROWS = 16
"""Of a block."""


@triton.jit
def _best(key, expert, BLOCK: tl.constexpr):
    """key [R, E] -> in each row true at the first of its largest"""
    most = tl.max(key, axis=1)
    first = tl.min(tl.where(key == most[:, None], expert[None, :], BLOCK), axis=1)
    return expert[None, :] == first[:, None]


@triton.jit
def _softplus(x):
    """log(1 + exp(x)): the larger of x and 0, and log1p of what is at most 1, as a series that is exact to rounding."""
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * series


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, chosen_ptr, lists_ptr, counts_ptr, items_ptr,
    num_rows, num_tokens, logits_stride, part_stride, scale,
    NUM_EXPERTS: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr, HAS_TABLE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    if not HAS_TABLE:
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    wait(PDL)
    list_size = num_rows * PER_ROW
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        is_row = row < num_rows
        inside = is_row[:, None] & is_expert[None, :]
        at = logits_ptr + row[:, None].to(tl.int64) * logits_stride + expert[None, :]
        logits = tl.zeros((ROWS, BLOCK), tl.float32)
        for part in tl.static_range(PARTS):
            logits += tl.load(at + part * part_stride, mask=inside, other=0.0)
        score = tl.sqrt_rn(_softplus(logits))
        named = tl.zeros((ROWS, BLOCK), tl.int32)
        if HAS_TABLE:
            token = tl.load(tokens_ptr + row, mask=is_row, other=0)
            token = tl.minimum(tl.maximum(token, 0), num_tokens - 1)
            for place in tl.static_range(PER_ROW):
                name = tl.load(table_ptr + token * PER_ROW + place).to(tl.int32)
                named += (expert[None, :] == name[:, None]).to(tl.int32)
        else:
            # What is no number comes first, so that it shows.
            key = tl.where(score == score, score + bias[None, :], float("inf"))
            key = tl.where(is_expert[None, :], key, float("-inf"))
            for _ in tl.static_range(PER_ROW):
                best = _best(key, expert, BLOCK)
                named += best.to(tl.int32)
                key = tl.where(best, float("-inf"), key)
        named = tl.where(inside, named, 0)
        sum_of_chosen = tl.sum(tl.where(named > 0, score * named.to(tl.float32), 0.0), axis=1)
        weight = score / sum_of_chosen[:, None] * scale
        place = tl.cumsum(named, axis=1) - named
        before = total[None, :] + tl.cumsum(named, axis=0) - named
        most = 1
        if HAS_TABLE:
            most = tl.max(tl.max(named, axis=1), axis=0)
        for again in range(most):
            is_named = named > again
            choice = row[:, None] * PER_ROW + place + again
            tl.store(weights_ptr + choice, weight, mask=is_named)
            tl.store(chosen_ptr + choice, tl.broadcast_to(expert[None, :], (ROWS, BLOCK)), mask=is_named)
            tl.store(
                lists_ptr + expert[None, :].to(tl.int64) * list_size + before + again, choice, mask=is_named
            )  # fmt: skip
        total += tl.sum(named, axis=0)
    tl.store(counts_ptr + 1 + expert, total, mask=is_expert)
    tiles = (total + TILE - 1) // TILE
    first_item = tl.cumsum(tiles, axis=0) - tiles
    for tile in range(tl.max(tiles, axis=0)):
        tl.store(items_ptr + first_item + tile, expert + tile * (TILE * 65536), mask=tile < tiles)
    tl.store(counts_ptr, tl.sum(tiles, axis=0))


def launch_route(
    logits: Tensor, routing: Routing, scale: float, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None
) -> None:
    """See ``route``."""
    rows, per_row = routing.weights.shape
    experts = routing.lists.shape[0]
    check_flat(routing.weights, routing.chosen, routing.lists, bias, table, token_ids)
    block, tall = power_of_two(experts), min(MOST_ROWS, power_of_two(rows))
    launch(
        _route, (1,),
        logits, logits if bias is None else bias, logits if table is None else table,
        logits if token_ids is None else token_ids, routing.weights, routing.chosen, routing.lists, routing.counts,
        routing.items, rows, 0 if table is None else table.shape[0], logits.stride(-2),
        logits.stride(0) if logits.dim() == 3 else 0, scale,
        NUM_EXPERTS=experts, PARTS=logits.shape[0] if logits.dim() == 3 else 1, PER_ROW=per_row,
        HAS_TABLE=table is not None, TILE=row_tile(rows), ROWS=tall, BLOCK=block,
        num_warps=max(1, min(8, tall * block // 512)),
    )  # fmt: skip
