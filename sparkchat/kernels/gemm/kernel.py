"""The small product: weights stream through shared memory once, outputs are the long side of the matrix instruction.

The tile is [64 outputs, rows], so that Hopper's 64-row instruction serves any number of rows, and an
output's sum runs over k in the same order whatever the number of rows is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparkchat.kernels.gemm.plan import Plan, plan_of
from sparkchat.kernels.launch import launch, power_of_two, prefetch, starts_early, wait

_NONE, _ADD, _SILU_MUL = 0, 1, 2
LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of a tile. Fewer than 16 would take another instruction, whose sums could differ."""


@triton.jit
def widen(codes):
    """float8_e4m3fn -> bfloat16, two at a time: the code's bits where a bfloat16 has them, times 2^120.

    Five instructions for two codes. The card's own conversion goes by way of float16 and needs two of the slowest kind
    besides (16 threads a clock and multiprocessor), and shifts of single numbers no fewer instructions. NaN, which no
    weight is, becomes 480. Multiplied by adding -0, as cards before compute capability 9.0 have no multiplication of
    pairs.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 t, s, c, z;
            cvt.u32.u16 t, $1;
            mov.b32 c, 0x7b807b80;
            mov.b32 z, 0x80008000;
            prmt.b32 t, t, 0, 0x1404;
            and.b32 s, t, 0x80008000;
            shr.b32 t, t, 4;
            lop3.b32 t, t, 0x07f007f0, s, 0xea;
            fma.rn.bf16x2 $0, t, c, z;
        }
        """,
        "=r,h", [codes.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _small_gemm(
    x_ptr, w_ptr, w_tiles, scales_ptr, bias_ptr, out_ptr,
    num_rows, num_out, size_k, x_stride, w_stride, scales_stride, out_stride, part_stride,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr, PART_K: tl.constexpr, EVEN_K: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr, WIDENS: tl.constexpr,
    EXACT: tl.constexpr, BULK: tl.constexpr, PREFETCH_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Gate and up share a tile: its upper half are outputs of one, its lower half the same outputs of the other.
    OUTS: tl.constexpr = BLOCK_OUT // 2 if EPILOGUE == 2 else BLOCK_OUT
    first_out = tl.program_id(0) * OUTS
    part = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, BLOCK_OUT)
    out = first_out + tile % OUTS
    num_outs = num_out
    if EPILOGUE == 2:
        num_outs = num_out // 2
    is_out = out < num_outs
    w_row = tl.where(is_out, out, 0)
    if EPILOGUE == 2:
        w_row += (tile // OUTS) * num_outs
    step = tl.arange(0, BLOCK_K)
    start_k = part * PART_K
    w_rows = w_ptr + w_row.to(tl.int64) * w_stride + start_k
    if PDL == 1 and PREFETCH_BYTES > 0:
        prefetch(w_rows, PREFETCH_BYTES)
    wait(PDL)
    is_row = row < num_rows
    w_at = w_rows[:, None] + step[None, :]
    x_at = x_ptr + start_k + row[None, :].to(tl.int64) * x_stride + step[:, None]
    if HAS_SCALES:
        scale_row = scales_ptr + (w_row // 128).to(tl.int64) * scales_stride
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for k in range(0, PART_K, BLOCK_K):
        if BULK:
            w = w_tiles.load([first_out, start_k + k])
            x = tl.load(x_at, mask=is_row[None, :], other=0.0)
        elif EVEN_K:
            w = tl.load(w_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_row[None, :], other=0.0)
        else:
            is_k = start_k + k + step < size_k
            w = tl.load(w_at, mask=is_k[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_row[None, :] & is_k[:, None], other=0.0)
        if HAS_SCALES:
            scale = tl.load(scale_row + (start_k + k) // 128, mask=is_out & (start_k + k < size_k), other=0.0)
            if WIDENS:
                total += tl.dot(widen(w), x) * scale[:, None]
            else:
                total += tl.dot(w.to(x.dtype), x, input_precision="ieee") * scale[:, None]
        elif EXACT:
            total = tl.dot(w, x, total, input_precision="ieee")
        else:
            total = tl.dot(w, x, total)
        w_at += BLOCK_K
        x_at += BLOCK_K
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_row, mask=is_out, other=0.0).to(tl.float32)
        total += tl.where(part == 0, bias, 0.0)[:, None]
    if EPILOGUE == 2:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, OUTS, ROWS)), (1, 2, 0)))
        value = gate * tl.sigmoid(gate) * up
        column = first_out + tl.arange(0, OUTS)
    else:
        value = total
        column = first_out + tl.arange(0, BLOCK_OUT)
    to = out_ptr + part * part_stride + row[None, :].to(tl.int64) * out_stride + column[:, None]
    kept = is_row[None, :] & (column < num_outs)[:, None]
    if EPILOGUE == 1:
        value += tl.load(to, mask=kept, other=0.0).to(tl.float32)
    tl.store(to, value.to(out_ptr.dtype.element_ty), mask=kept)


def launch_small_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    epilogue: str,
    plan: Plan | None = None,
) -> None:
    """See ``small_gemm``. ``plan`` stands in for the tuned one, for measuring."""
    (n, k), count = weight.shape, x.shape[0]
    rows = max(LEAST_ROWS, min(MOST_ROWS if plan is None else plan.most_rows, power_of_two(count)))
    plan = plan or plan_of(weight, epilogue, rows, starts_early(is_streaming=True))
    is_silu = epilogue == "silu_mul"
    outs = plan.block_out // 2 if is_silu else plan.block_out
    widens = scales is not None and plan.widens and can_widen(x.dtype)
    if widens:
        weight = as_codes(weight)
    launch(
        _small_gemm, (-(-(n // 2 if is_silu else n) // outs), plan.splits, -(-count // rows)),
        x, weight, _tiles(plan, weight, is_silu), x if scales is None else scales, x if bias is None else bias, out,
        count, n, k, x.stride(0), weight.stride(0), 0 if scales is None else scales.stride(0),
        out.stride(-2), out.stride(0) if epilogue == "partials" else 0,
        ROWS=rows, BLOCK_OUT=plan.block_out, BLOCK_K=plan.block_k, PART_K=plan.part_k,
        EVEN_K=k == plan.part_k * plan.splits, EPILOGUE={"add": _ADD, "silu_mul": _SILU_MUL}.get(epilogue, _NONE),
        HAS_BIAS=bias is not None, HAS_SCALES=scales is not None, WIDENS=widens,
        EXACT=x.dtype == torch.float32, BULK=plan.is_bulk,
        PREFETCH_BYTES=_prefetched(plan, weight), is_streaming=True, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def can_widen(dtype: torch.dtype) -> bool:
    """Whether kernels expand weights of 8 bits for such inputs: the interpreter has no instructions of cards."""
    return dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


def as_codes(weight: Tensor) -> Tensor:
    """Weights of 8 bits as plain bytes: for cards before compute capability 8.9 the compiler knows no float8_e4m3fn."""
    return weight.view(torch.uint8)


def _prefetched(plan: Plan, weight: Tensor) -> int:
    """Bytes of each row to call into L2 before others have ended: whole units of 16 that lie within the row."""
    size = weight.element_size()
    if not starts_early(is_streaming=True):
        return 0
    if weight.shape[1] != plan.part_k * plan.splits or weight.stride(0) * size % 16:
        return 0
    return min(plan.prefetch, plan.part_k * size)


def _tiles(plan: Plan, weight: Tensor, is_silu: bool) -> TensorDescriptor | Tensor:
    """What the bulk copy engine reads tiles of ``weight`` by. Raises ValueError where it cannot."""
    if not plan.is_bulk:
        return weight
    if is_silu or weight.shape[1] != plan.part_k * plan.splits:
        raise ValueError("the bulk copy engine takes whole tiles of one weight")
    return TensorDescriptor.from_tensor(weight, [plan.block_out, plan.block_k])
