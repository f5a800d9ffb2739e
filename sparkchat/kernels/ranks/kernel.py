"""Ranks meet at counts that each keeps for the others: one for every program and rank, and its own beside them.

A program lays out its piece of a message, tells all other ranks how often it has met by now, and waits until they have
told its own rank the same. Counts only rise, so nothing has to be taken back, in whatever graph the kernel stands, and
a program waits for its likes alone: it does not matter how many of them run at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, wait
from sparkchat.kernels.ranks import WORDS, sum_block


@triton.jit
def meet(pads_ptr, program, rank, RANKS: tl.constexpr):
    """Wait until this program of all ranks has come here; what it has written before, others may then read."""
    own = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
    turn = tl.load(own + rank) + 1
    # All threads have written before one of them says so.
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        count = tl.load(pads_ptr + other).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
        tl.atomic_xchg(count, turn, sem="release", scope="sys")
    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        # The difference is right also when a count has gone over the end of its numbers.
        while tl.atomic_add(own + other, 0, sem="acquire", scope="sys") - turn < 0:
            pass
    tl.store(own + rank, turn)


@triton.jit
def _publish(x_ptr, mine_ptr, pads_ptr, rank, count, RANKS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    inside = at < count
    wait(PDL)
    tl.store(mine_ptr + at, tl.load(x_ptr + at, mask=inside), mask=inside)
    meet(pads_ptr, program, rank, RANKS)


@triton.jit
def _publish_sum(
    parts_ptr, mine_ptr, pads_ptr, rank, count, part_stride,
    PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * part_stride + at, mask=inside, other=0.0)
    tl.store(mine_ptr + at, total, mask=inside)
    meet(pads_ptr, program, rank, RANKS)


def launch_publish(x: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """x and mine [words] int32; see ``publish``."""
    count = x.shape[0]
    launch(_publish, (triton.cdiv(count, WORDS),), x, mine, pads, rank, count, pads.shape[0], WORDS, num_warps=4)


def launch_publish_sum(parts: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """parts [P, n], mine [n]; see ``publish_sum``."""
    count = mine.shape[0]
    block = sum_block(count)
    launch(
        _publish_sum, (triton.cdiv(count, block),), parts, mine, pads, rank, count, parts.stride(0),
        PARTS=parts.shape[0], RANKS=pads.shape[0], BLOCK=block, num_warps=4,
    )  # fmt: skip
