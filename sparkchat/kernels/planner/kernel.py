"""Algorithm 1 in one program: candidates sorted as whole numbers that hold survival, position and request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, power_of_two, wait

_ONE = 0x3FF0000000000000
"""The bits of 1.0"""


@triton.jit
def _plan(
    confidence_ptr, temperatures_ptr, limits_ptr, cost_ptr, budget_ptr, lens_ptr, requests, num_costs,
    extra_rows, extra_tokens, ONE: tl.constexpr, WIDTH: tl.constexpr, REQUESTS: tl.constexpr, SLOTS: tl.constexpr,
    HAS_BUDGET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    request = tl.arange(0, REQUESTS)
    is_request = request < requests
    limit = tl.load(limits_ptr + request, mask=is_request, other=-1)
    slot = tl.arange(0, SLOTS)
    inside = is_request[:, None] & (slot < WIDTH)[None, :]
    logit = tl.load(confidence_ptr + request[:, None] * WIDTH + slot[None, :], mask=inside, other=0.0).to(tl.float64)
    # A confidence that is no number admits nothing.
    logit = tl.where(logit == logit, logit, float("-inf"))
    scale = tl.load(temperatures_ptr + slot, mask=slot < WIDTH, other=1.0).to(tl.float64)
    step = 1.0 / (1.0 + tl.exp(-logit / scale[None, :]))
    alive = _running_product(step, slot, SLOTS)
    is_candidate = inside & (slot[None, :] < limit[:, None]) & (alive > 0.0)
    # Less survival, later position, later request: the larger key. 51 bits of survival are kept.
    behind = (ONE - alive.to(tl.int64, bitcast=True)) >> 11
    key = (behind << 12) | (slot[None, :].to(tl.int64) << 8) | request[:, None].to(tl.int64)
    key = tl.where(is_candidate, key, 0x7FFFFFFFFFFFFFFF)
    order = tl.sort(tl.reshape(key, (REQUESTS * SLOTS,)))
    number = tl.arange(0, REQUESTS * SLOTS)
    is_real = order < 0x7FFFFFFFFFFFFFFF
    if HAS_BUDGET:
        admitted = is_real & (number < tl.load(budget_ptr))
    else:
        survival = (ONE - ((order >> 12) << 11)).to(tl.float64, bitcast=True)
        survival = tl.where(is_real, survival, 0.0)
        present = tl.sum((limit >= 0).to(tl.int32), axis=0)
        rows = present + extra_rows + number
        after = present.to(tl.float64) + extra_tokens + tl.cumsum(survival, axis=0)
        now_ms = tl.load(cost_ptr + tl.minimum(rows, num_costs - 1))
        more_ms = tl.load(cost_ptr + tl.minimum(rows + 1, num_costs - 1))
        loses = (after / more_ms <= (after - survival) / now_ms) | (is_real == 0)
        stop = tl.min(tl.where(loses, number, REQUESTS * SLOTS), axis=0)
        admitted = number < stop
    last = tl.max(tl.where(admitted, order, -1), axis=0)
    lens = tl.sum((is_candidate & (key <= last)).to(tl.int32), axis=1)
    tl.store(lens_ptr + request, lens, mask=is_request)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _running_product(step, slot, SLOTS: tl.constexpr):
    return tl.associative_scan(step, 1, _times)


def launch_plan_lengths(
    confidence: Tensor,
    temperatures: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    verify_lens: Tensor,
    extra_rows: int,
    extra_tokens: float,
    budget: Tensor | None,
) -> None:
    """See ``plan_lengths``."""
    requests, width = confidence.shape
    launch(
        _plan, (1,),
        confidence, temperatures, limits, cost_ms, limits if budget is None else budget, verify_lens, requests,
        cost_ms.shape[0], extra_rows, float(extra_tokens),
        ONE=_ONE, WIDTH=width, REQUESTS=power_of_two(requests), SLOTS=power_of_two(width),
        HAS_BUDGET=budget is not None, num_warps=4 if requests * width <= 512 else 16,
    )  # fmt: skip
