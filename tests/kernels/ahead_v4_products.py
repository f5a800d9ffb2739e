"""Compiles the kernels of DeepSeek V4's projections, router and experts at their true shapes for an H200.

    PYTHONPATH=.:tests python tests/kernels/ahead_v4_products.py [NAME]

As ahead.py, whose lines it prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton

from kernels.ahead import CPU, HALF, Driver, compile_only
from sparkchat.kernels.experts import COUNTERS, ExpertBuffers, TiledBank, TiledExperts
from sparkchat.kernels.experts.kernel import launch_add_parts, launch_down, launch_gate_up
from sparkchat.kernels.experts.plan import WHOLE_TRIED
from sparkchat.kernels.experts.whole import launch_mix_experts
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.expand_kernel import launch_expand
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.fp8.plan import plan_of
from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.launch import overlap, started_by
from sparkchat.kernels.ranks import Meeting, publish, publish_sum

D, WIDTH, EXPERTS, PER_ROW = 4096, 1024, 256, 6
"""Of a rank of two."""


def tiles_of(out: int, size: int) -> TiledFp8:
    tiles = torch.zeros(out // 32, size // 128, 2, 2048, dtype=torch.int8)
    return TiledFp8(tiles, torch.ones(out // 32, size // 128, 2))


def bank_of(out: int, size: int) -> TiledBank:
    """One expert stands for all: only shapes count, and they take gigabytes."""
    shape = out // 32, size // 128, 2
    tiles = torch.zeros(1, *shape, 1024, dtype=torch.int8).expand(EXPERTS, *shape, 1024)
    return TiledBank(tiles, torch.zeros(1, *shape, 16, 4, dtype=torch.uint8).expand(EXPERTS, *shape, 16, 4))


def experts_of() -> TiledExperts:
    return TiledExperts(bank_of(2 * WIDTH, D), bank_of(D, WIDTH), tiles_of(2 * WIDTH, D), tiles_of(D, WIDTH))


def fp8() -> None:
    for out, size, rows, is_rounded in (
        (1536, D, 6, False), (16384, 1024, 6, False), (D, D, 6, True), (1536, D, 16, False), (1536, D, 64, True),
        (D, 3 * D, 1, False),
    ):  # fmt: skip
        weight, x = tiles_of(out, size), torch.zeros(rows, size, dtype=HALF)
        parts = torch.zeros(plan_of(out, size).splits, rows, out)
        launch_fp8_linear(x, weight, parts, 1, is_rounded)
        launch_fp8_linear(x, weight, torch.zeros(rows, out, dtype=HALF), 1, is_rounded)


def expand() -> None:
    for out, size, dtype in ((16384, 1024, HALF), (D, 3 * D, HALF), (32, 128, torch.float32)):
        launch_expand(tiles_of(out, size), torch.empty(out, size, dtype=dtype))


def joint() -> None:
    for plain, whole_from, rows in ((2624, 2560, 6), (1024, None, 64)):
        product = JointProduct(tiles_of(1536, D), torch.zeros(plain, D, dtype=HALF), whole_from)
        plan, x = product.plan, torch.zeros(rows, D, dtype=HALF)
        out, to = torch.zeros(plan.codes.splits, rows, 1536), torch.zeros(plan.plain_splits, rows, plain)
        launch_joint(x, product, out, to, torch.zeros(rows, 64), False, plan)


def ranks() -> None:
    pads = torch.zeros(2, dtype=torch.int64)
    publish(torch.zeros(6, D), torch.zeros(6, D), pads, 0)
    publish_sum(torch.zeros(7, 6, D), torch.zeros(6, D), pads, 1)
    x, out = torch.zeros(6, D, dtype=HALF), torch.zeros(6, D, dtype=HALF)
    launch_fp8_linear(x, tiles_of(D, D), out, 1, False, meeting=Meeting(pads, 1))


def route() -> None:
    table = torch.zeros(129280, PER_ROW, dtype=torch.int64)
    for rows in (1, 6, 64):
        routing, logits = Routing.empty(rows, PER_ROW, EXPERTS, CPU), torch.zeros(8, rows, EXPERTS)
        launch_route(logits, routing, 1.5, torch.zeros(EXPERTS), None, None)
        arrived = torch.zeros(1, dtype=torch.int32)
        launch_route(logits, routing, 1.5, torch.zeros(EXPERTS), None, None, arrived)
        launch_route(logits, routing, 1.5, None, table, torch.zeros(rows, dtype=torch.int64), arrived)


def experts() -> None:
    weights = experts_of()
    for rows, is_rounded in ((6, False), (6, True), (64, False)):
        routing = Routing.empty(rows, PER_ROW, EXPERTS, CPU)
        buffers = ExpertBuffers.empty(rows, PER_ROW, weights, HALF)
        launch_gate_up(torch.zeros(rows, D, dtype=HALF), weights, routing, buffers.inner, 10.0, is_rounded)
        launch_down(buffers.inner, weights, routing, buffers.parts, is_rounded)
        state = torch.zeros(COUNTERS, dtype=torch.int32)
        for plan in WHOLE_TRIED.values() if rows == 6 and not is_rounded else ():
            launch_mix_experts(
                torch.zeros(rows, D, dtype=HALF), weights, routing, buffers.inner, buffers.parts, state, 10.0,
                is_rounded, plan,
            )  # fmt: skip
    launch_add_parts(torch.zeros(PER_ROW + 1, 6, D), torch.zeros(6, D))


ALL: dict[str, Callable[[], None]] = {f.__name__: f for f in (fp8, expand, joint, ranks, route, experts)}


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    with started_by(compile_only), overlap():
        for name in names or ALL:
            ALL[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
