"""Counts what the kernels of a DeepSeek V4 layer are made of, for an H200: ``PYTHONPATH=.:tests python FILE [NAME]``.

A line a launch, with the plans in use for 1, 6, 96 and 384 rows: registers, bytes put aside, shared memory, programs
that fit on a multiprocessor and how often the grid fills the card, instructions in front of the first loop; beneath it
a line a loop: its instructions by kind, and the widths of what it loads and stores.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from kernels.ahead import CPU, HALF, Driver, resources_of
from kernels.ahead_v4_products import EXPERTS, PER_ROW, D, experts_of, tiles_of
from kernels.ahead_v4_rows import LATENT, ROPE, STREAMS
from kernels.listing import listing_of
from sparkchat.kernels.experts import COUNTERS, ExpertBuffers
from sparkchat.kernels.experts.kernel import launch_down, launch_gate_up
from sparkchat.kernels.experts.plan import WHOLE_TRIED, whole_plan
from sparkchat.kernels.experts.whole import launch_mix_experts
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.fp8.plan import MULTIPROCESSORS, plan_of
from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.hyper import PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.latent_attention import LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import launch_latent_attention
from sparkchat.kernels.launch import started_by

CONTEXT = 2304
_REGISTERS, _SHARED, _WARPS = 65536, 227 * 1024, 64
"""Of a multiprocessor."""


def count(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    code = kernel.warmup(*arguments, grid=grid, **options)
    stack, registers = resources_of(code.asm["ptx"])
    listing, warps, shared = listing_of(code.asm["ptx"]), code.metadata.num_warps, code.metadata.shared
    fit = min(32, _WARPS // warps, _REGISTERS // (32 * warps * (-(-registers // 8) * 8)), _SHARED // (shared + 1024))
    print(
        f"  {kernel.fn.__name__:18} grid {grid!s:16} warps {warps:2} registers {registers:3} stack {stack:3}"
        f" shared {shared:6} fit {fit:2} rounds {math.prod(grid) / MULTIPROCESSORS / fit:5.2f} before {listing.before}",
        flush=True,
    )
    for loop in listing.loops:
        kinds = " ".join(f"{name} {number}" for name, number in loop.kinds.most_common())
        widths = " ".join(f"{name} {number}" for name, number in loop.wide.items())
        print(f"    loop {len(loop)}: {kinds}; {widths}", flush=True)


def products(rows: int) -> None:
    x = torch.zeros(rows, D, dtype=HALF)
    for out, size, has_parts in ((24576, 1024, False), (D, D, False), (D, D, True)):
        shape = (plan_of(out, size).splits, rows, out) if has_parts else (rows, out)
        to = torch.zeros(shape, dtype=torch.float32 if has_parts else HALF)
        launch_fp8_linear(x[:, :size].contiguous(), tiles_of(out, size), to, 1, False)
    product = JointProduct(tiles_of(1536, D), torch.zeros(2624, D, dtype=HALF), 2560)
    parts = (torch.zeros(n, rows, out) for n, out in ((product.plan.codes.splits, 1536), (4, 2624)))
    launch_joint(x, product, *parts, torch.zeros(rows, 64), False, product.plan)


def experts(rows: int) -> None:
    weights, routing = experts_of(), Routing.empty(rows, PER_ROW, EXPERTS, CPU)
    launch_route(torch.zeros(8, rows, EXPERTS), routing, 1.5, torch.zeros(EXPERTS), None, None, COUNT)
    space, x = ExpertBuffers.empty(rows, PER_ROW, weights, HALF), torch.zeros(rows, D, dtype=HALF)
    for plan in WHOLE_TRIED.values() if whole_plan(rows) else ():
        state = torch.zeros(COUNTERS, dtype=torch.int32)
        launch_mix_experts(x, weights, routing, space.inner, space.parts, state, 10.0, False, plan)
    if not whole_plan(rows):
        launch_gate_up(x, weights, routing, space.inner, 10.0, False)
        launch_down(space.inner, weights, routing, space.parts, False)


def streams(rows: int) -> None:
    fn = torch.zeros(24, STREAMS * D)
    weights = StreamWeights(fn, torch.zeros(24), torch.zeros(24), STREAMS, 1e-6, 1e-6, 20)
    before, mix, out = (
        torch.zeros(rows, STREAMS, D, dtype=HALF),
        torch.zeros(rows, 20),
        torch.zeros(rows, D, dtype=HALF),
    )
    parts, space = PartList.of([torch.zeros(rows, D) for _ in range(2)]), hyper_workspace(rows, D, CPU)
    launch_connect_streams(
        before, weights, space, parts, mix, before.clone(), mix, torch.ones(D), 1e-6, out, None, None
    )  # fmt: skip


def attention(rows: int) -> None:
    where, owners = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
    cache, rope = torch.zeros(1, 16 + 256 + 1024, LATENT, dtype=HALF), torch.zeros(CONTEXT, ROPE)
    q, out = torch.zeros(rows, 32 * LATENT, dtype=HALF), torch.zeros(rows, 32, LATENT, dtype=HALF)
    for ratio, topk in ((4, 512), (128, 0)):
        shape = LatentShape(16, 256, ratio, ROPE, 1e-6, topk=topk)
        space = latent_workspace(rows, 32, LATENT, latent_spans(shape, CONTEXT), CPU)
        chosen = torch.zeros(rows, topk, dtype=torch.int32) if topk else None
        launch_latent_attention(
            q, cache, owners, where, where, where, rope, torch.zeros(32), out, space, shape, CONTEXT, chosen
        )  # fmt: skip


COUNT = torch.zeros(1, dtype=torch.int32)
ALL: dict[str, Callable[[int], None]] = {f.__name__: f for f in (products, experts, streams, attention)}


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    with started_by(count):
        for name in names or ALL:
            for rows in (1, 6, 96, 384):
                print(f"{name}, {rows} rows", flush=True)
                ALL[name](rows)


if __name__ == "__main__":
    main(sys.argv[1:])
