"""What benchmarks/kernels.py times of a rank of two of DeepSeek-V4-Flash besides layers: router, head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from kernel_inputs import Case, Maker, Run
from torch import Tensor

from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.gate.quick import MOST_ROWS, TRIED, QuickPlan, launch_gate_rows
from sparkchat.kernels.gemm import gemm_splits
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import Plan

D, EXPERTS, PER_ROW, VOCAB = 4096, 256, 6, 64640
HEAD_TILES = ((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (128, 128, 3, 8), (128, 128, 4, 8), (128, 64, 4, 4))
"""Outputs, inputs of a tile, stages, warps."""


def gate_cases(make: Maker) -> Iterator[Case]:
    """The router's product and choice, by two launches and by one, with weights that do not stay in L2."""
    each = 2 * EXPERTS * D
    weights = [make.half(EXPERTS, D) for _ in range(min(60, make.sets(each)))]
    bias, splits = make.floats(EXPERTS, scale=0.1), gemm_splits(weights[0])
    for rows in (1, 6, 8, 24):
        x, routing = make.half(rows, D, scale=1.0), Routing.empty(rows, PER_ROW, EXPERTS, make.device)
        logits = torch.empty((splits, rows, EXPERTS), device=make.device)
        arrived = torch.zeros(1, dtype=torch.int32, device=make.device)
        fixed = (x, logits, routing, arrived)

        def apart(i: int, fixed: tuple[Tensor, Tensor, Routing, Tensor] = fixed) -> None:
            x, logits, routing, arrived = fixed
            launch_small_gemm(x, weights[i], logits, None, None, "partials")
            launch_route(logits, routing, 1.5, bias, None, None, arrived)

        def quick(plan: QuickPlan, fixed: tuple[Tensor, Tensor, Routing, Tensor] = fixed) -> Run:
            x, logits, routing, arrived = fixed
            return lambda i: launch_gate_rows(
                x, weights[i], logits, routing, 1.5, bias, None, None, arrived, plan
            )  # fmt: skip

        plans = TRIED if rows <= MOST_ROWS else ()
        variants = {f"one launch, stages {p.stages} warps {p.warps}": quick(p) for p in plans}
        yield Case(f"v4 gate {rows} rows", each, len(weights), {"two launches": apart, **variants})


def head_cases(make: Maker) -> Iterator[Case]:
    """The target's vocabulary; cuBLAS beside it."""
    weights = [make.half(VOCAB, D) for _ in range(2)]
    for rows in (1, 6, 24):
        x, out = make.half(rows, D, scale=1.0), make.half(rows, VOCAB)

        def run(plan: Plan, x: Tensor = x, out: Tensor = out) -> Run:
            return lambda i: launch_small_gemm(x, weights[i], out, None, None, "none", plan)

        variants = {
            f"{outs}x{step} stages {stages} warps {warps}": run(Plan(outs, step, 1, D, stages, warps))
            for outs, step, stages, warps in (HEAD_TILES if rows > 1 else HEAD_TILES[:3])
        }

        def library(i: int, x: Tensor = x) -> None:
            F.linear(x, weights[i])

        yield Case(f"v4 head {rows} rows", 2 * VOCAB * D, 2, variants, library)


V4_SMALL_GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {"v4-gate": gate_cases, "v4-head": head_cases}
