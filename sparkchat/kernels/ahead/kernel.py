"""A launch of nothing but requests: every thread asks for one stretch of a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, prefetch, wait

_BYTE = torch.int8
STRETCH = 2048
"""Bytes that a thread asks for."""


@triton.jit
def _ask(weight_ptr, size, first, BYTES: tl.constexpr):
    # Threads whose stretch would go over the end ask for the last one again.
    at = tl.minimum((first + tl.arange(0, 32)).to(tl.int64) * BYTES, size - BYTES)
    prefetch(weight_ptr + tl.maximum(at, 0), BYTES)


@triton.jit(do_not_specialize=["size_a", "size_b", "size_c", "size_d", "to_a", "to_b", "to_c"])
def _call_ahead(
    a_ptr, b_ptr, c_ptr, d_ptr, size_a, size_b, size_c, size_d, to_a, to_b, to_c,
    BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    program = tl.program_id(0)
    if program < to_a:
        _ask(a_ptr, size_a, program * 32, BYTES)
    elif program < to_b:
        _ask(b_ptr, size_b, (program - to_a) * 32, BYTES)
    elif program < to_c:
        _ask(c_ptr, size_c, (program - to_b) * 32, BYTES)
    else:
        _ask(d_ptr, size_d, (program - to_c) * 32, BYTES)


def launch_call_ahead(pieces: Sequence[tuple[Tensor, int]]) -> None:
    """See ``Lane.call``; pieces shorter than a stretch are left out."""
    from sparkchat.kernels.ahead import MOST_PIECES

    kept = [(weight.view(-1).view(_BYTE), size) for weight, size in pieces if size >= STRETCH]
    if not kept:
        return
    ends, end = [], 0
    for _, size in kept:
        end += -(-size // (32 * STRETCH))
        ends.append(end)
    kept += [kept[0]] * (MOST_PIECES - len(kept))
    ends += [end] * (MOST_PIECES - len(ends))
    launch(
        _call_ahead, (end,), *(weight for weight, _ in kept), *(size for _, size in kept), *ends[:-1],
        BYTES=STRETCH, num_warps=1,
    )  # fmt: skip
