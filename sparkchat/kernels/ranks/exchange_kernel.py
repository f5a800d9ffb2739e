"""Words pushed to other ranks, and waited for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word(x, turn):
    """x float32 and the number of its turn in one word"""
    low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (turn.to(tl.int64) << 32) | low


@triton.jit
def find_inboxes(
    inboxes_ptr, rank, turn, row, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Where each rank finds the row of this one; then where this one finds that of each: first words."""
    slot = (turn >> 1) & 1
    found = ()
    for owner in tl.static_range(RANKS):
        inbox = tl.load(inboxes_ptr + owner).to(tl.pointer_type(tl.int64))
        found = found + (inbox + ((slot * RANKS + rank) * MOST_ROWS + row) * SIZE,)  # noqa: RUF005
    own = tl.load(inboxes_ptr + rank).to(tl.pointer_type(tl.int64))
    for sender in tl.static_range(RANKS):
        found = found + (own + ((slot * RANKS + sender) * MOST_ROWS + row) * SIZE,)  # noqa: RUF005
    return found


@triton.jit
def push(x, column, places, rank, turn, RANKS: tl.constexpr):
    """Tell all other ranks x, columns of a row; ``places`` as of ``find_inboxes``."""
    words = word(x, turn)
    for owner in tl.static_range(RANKS):
        # Past all caches of this device.
        if owner != rank:
            tl.store(places[owner] + column, words, cache_modifier=".wt")


@triton.jit
def _are_late(words, turn):
    return tl.max(((words >> 32).to(tl.int32) != turn).to(tl.int32), axis=0) != 0


@triton.jit
def add_all(x, column, places, rank, turn, RANKS: tl.constexpr):
    """x of all ranks, added in their order; waits for those of others."""
    total = tl.zeros_like(x)
    for sender in tl.static_range(RANKS):
        if sender == rank:
            total += x
        else:
            at = places[RANKS + sender] + column
            words = tl.load(at, volatile=True)
            while _are_late(words, turn):
                words = tl.load(at, volatile=True)
            total += words.to(tl.int32).to(tl.float32, bitcast=True)
    return total
