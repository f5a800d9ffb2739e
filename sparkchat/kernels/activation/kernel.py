"""silu(gate) * up: programs of a piece of a row, which read what a product left in L2."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, wait

_BLOCK, _WARPS = 2048, 4


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, row_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    gate = tl.load(gate_up_ptr + row * row_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=at < SIZE)


def launch_silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See ``silu_mul``."""
    rows, size = out.shape
    launch(
        _silu_mul, (rows, triton.cdiv(size, _BLOCK)),
        gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
