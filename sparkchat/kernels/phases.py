"""Phases of one launch whose programs are all on the card at once: all end a phase before any begins the next.

A count in memory is told of every program that has ended a phase, and all wait for it. It counts on and on: a launch
adds the same to it each time, so that every count serves launches of one number of programs and phases, one after the
other. Where programs run one after another (Triton's interpreter), and where not all of them fit on the card, every
phase is a launch of its own.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparkchat.kernels.launch import is_compiling

MULTIPROCESSORS = 132
"""Of an H200, which kernels are compiled for ahead of time."""
_READ_ASM = tl.constexpr("ld.acquire.gpu.global.s64 $0, [$1];")


def programs_at_once(device: torch.device) -> int:
    """Programs of any size that are on the card together; 1 where phases cannot wait for each other."""
    if is_compiling():
        return MULTIPROCESSORS
    return 1 if device.type != "cuda" or triton.knobs.runtime.interpret else _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def begin_phases(count_ptr, EACH: tl.constexpr):
    """What the count was when this launch began, of which each adds EACH; asked before this program is counted."""
    count = tl.load(count_ptr, volatile=True)
    return count - count % EACH


@triton.jit
def end_phase(count_ptr, until):
    """Wait until the count is ``until``: then whatever all programs have written can be read."""
    # All threads have written before one of them says so.
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")
    while tl.inline_asm_elementwise(
        _READ_ASM, "=l,l", [count_ptr.to(tl.uint64)], dtype=tl.int64, is_pure=False, pack=1
    ) < until:  # fmt: skip
        pass
    tl.debug_barrier()
