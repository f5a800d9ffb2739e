"""A weight of 8 bits written out as plain numbers: a program for some steps of a pair of tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.fp8.plan import EXPANSION
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.tiles.product import expand_pair


@triton.jit
def _expand_weight(codes_ptr, scales_ptr, out_ptr, STEPS: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    first, pair = tl.program_id(0) * EACH, tl.program_id(1)
    at = pair.to(tl.int64) * STEPS + first
    codes = tl.load(codes_ptr + at * 4096 + tl.arange(0, EACH * 4096), eviction_policy="evict_first")
    scales = tl.load(scales_ptr + at * 2 + tl.arange(0, EACH * 2))
    # Before this, what is written over is still being read.
    wait(PDL)
    values = expand_pair(codes, scales, EACH).to(out_ptr.dtype.element_ty)
    row = pair.to(tl.int64) * 32 + tl.arange(0, 32)
    tl.store(out_ptr + row[:, None] * (STEPS * 128) + first * 128 + tl.arange(0, EACH * 128)[None, :], values)


def launch_expand(weight: TiledFp8, out: Tensor, expansion: tuple[int, int] = EXPANSION) -> None:
    """out [out, in], contiguous, of any float type = ``weight.dense()``, exactly where that type holds its numbers."""
    pairs, steps = weight.scales.shape[:2]
    each, warps = expansion
    # A power of two that divides the steps.
    each = min(each, steps & -steps)
    launch(
        _expand_weight, (steps // each, pairs),
        weight.tiles, weight.scales, out, STEPS=steps, EACH=each, num_warps=warps,
    )  # fmt: skip
