"""What benchmarks/kernels.py times of a rank of two of DeepSeek-V4-Flash besides layers: the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from kernel_inputs import Case, Maker, Run
from torch import Tensor

from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import Plan

D, VOCAB = 4096, 64640
HEAD_TILES = ((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (128, 128, 3, 8), (128, 128, 4, 8), (128, 64, 4, 4))
"""Outputs, inputs of a tile, stages, warps."""


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


V4_SMALL_GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {"v4-head": head_cases}
