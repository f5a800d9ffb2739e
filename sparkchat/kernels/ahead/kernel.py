"""A launch of nothing but requests, a little at a time: asked for all at once, a weight would lie before whatever the
small kernels beside it wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.tiles.product import INTERPRETED, call_bytes

_BYTE = torch.int8
PROGRAMS, STRETCH, PAUSE = 16, 16384, 100
"""Every program asks for so many bytes, then sleeps for about so many nanoseconds: 2.6 TB/s, half of what there is."""
_SLEEP_ASM = tl.constexpr("{ nanosleep.u32 $1; mov.u32 $0, 0; }")


@triton.jit
def _ask(weight_ptr, size, program, PROGRAMS: tl.constexpr, BYTES: tl.constexpr, PAUSE: tl.constexpr):
    lane = tl.arange(0, 32)
    for first in tl.range(program * BYTES, size, PROGRAMS * BYTES, num_stages=1):
        at = tl.zeros_like(lane) + first
        call_bytes(weight_ptr + at, tl.minimum(size - at, BYTES), lane)
        if not INTERPRETED:
            tl.inline_asm_elementwise(
                _SLEEP_ASM, "=r,r", [lane * 0 + PAUSE], dtype=tl.int32, is_pure=False, pack=1
            )  # fmt: skip


@triton.jit(do_not_specialize=["size_a", "size_b", "size_c", "size_d"])
def _call_ahead(
    a_ptr, b_ptr, c_ptr, d_ptr, size_a, size_b, size_c, size_d,
    PROGRAMS: tl.constexpr, BYTES: tl.constexpr, PAUSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    program = tl.program_id(0)
    _ask(a_ptr, size_a, program, PROGRAMS, BYTES, PAUSE)
    _ask(b_ptr, size_b, program, PROGRAMS, BYTES, PAUSE)
    _ask(c_ptr, size_c, program, PROGRAMS, BYTES, PAUSE)
    _ask(d_ptr, size_d, program, PROGRAMS, BYTES, PAUSE)


def launch_call_ahead(pieces: Sequence[tuple[Tensor, int]]) -> None:
    """See ``Lane.call``."""
    from sparkchat.kernels.ahead import MOST_PIECES

    if not pieces:
        return
    kept = [(weight.view(-1).view(_BYTE), size) for weight, size in pieces]
    kept += [(kept[0][0], 0)] * (MOST_PIECES - len(kept))
    launch(
        _call_ahead, (PROGRAMS,), *(weight for weight, _ in kept), *(size for _, size in kept),
        PROGRAMS=PROGRAMS, BYTES=STRETCH, PAUSE=PAUSE, num_warps=1,
    )  # fmt: skip
