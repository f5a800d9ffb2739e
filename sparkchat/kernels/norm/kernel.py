"""Residual addition and RMSNorm: one program per row, the row in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, power_of_two, reads_ahead, wait


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, weight_ptr, out_ptr, tap_ptr,
    x_stride, delta_stride, part_stride, out_stride, tap_stride, eps,
    SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_X: tl.constexpr, HAS_TAP: tl.constexpr, BLOCK: tl.constexpr,
    SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    before = tl.zeros((BLOCK,), tl.float32)
    if HAS_X and SETTLED:
        before = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    wait(PDL)
    if HAS_X and not SETTLED:
        before = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    x = tl.zeros((BLOCK,), tl.float32)
    if PARTS > 0:
        x = tl.load(delta_ptr + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(delta_ptr + part * part_stride + row * delta_stride + column, mask=inside, other=0.0)
    if HAS_X:
        x += before
        if PARTS > 0:
            tl.store(x_ptr + row * x_stride + column, x, mask=inside)
    if HAS_TAP:
        tl.store(tap_ptr + row * tap_stride + column, x.to(tap_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch_add_rms_norm(
    x: Tensor | None,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    tap: Tensor | None,
    is_settled: bool = False,
) -> None:
    """See ``add_rms_norm``."""
    rows, size = out.shape
    parts = 0 if delta is None else 1 if delta.dim() == 2 else delta.shape[0]
    block = power_of_two(size)
    launch(
        _add_rms_norm, (rows,),
        out if x is None else x, out if delta is None else delta, weight, out, out if tap is None else tap,
        0 if x is None else x.stride(0), 0 if delta is None else delta.stride(-2),
        delta.stride(0) if delta is not None and parts > 1 else 0,
        out.stride(0), 0 if tap is None else tap.stride(0), eps,
        SIZE=size, PARTS=parts, HAS_X=x is not None, HAS_TAP=tap is not None, BLOCK=block,
        SETTLED=reads_ahead(is_settled),
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
