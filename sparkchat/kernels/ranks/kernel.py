"""Ranks meet at flags that each keeps for the others: one for every program and rank.

A program lays out its piece of the message, raises its flag at all other ranks, and waits until theirs are raised at
its own rank; each rank lowers what it has seen. So flags are as they were when the kernel ends, in whatever graph it
stands, and a program waits for its likes alone: it does not matter how many of them run at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.ranks import WORDS


@triton.jit
def _publish(x_ptr, mine_ptr, pads_ptr, rank, count, RANKS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    inside = at < count
    wait(PDL)
    tl.store(mine_ptr + at, tl.load(x_ptr + at, mask=inside), mask=inside)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        flag = tl.load(pads_ptr + other).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
        while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") != 0:
            pass
    own = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        while tl.atomic_cas(own + other, 1, 0, sem="acquire", scope="sys") != 1:
            pass


def launch_publish(x: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """x and mine [words] int32; see ``publish``."""
    count = x.shape[0]
    launch(_publish, (triton.cdiv(count, WORDS),), x, mine, pads, rank, count, pads.shape[0], WORDS, num_warps=4)
