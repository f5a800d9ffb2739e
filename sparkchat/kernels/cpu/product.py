"""A packed matrix times rows, shared out among threads by lane blocks."""

from __future__ import annotations

from numba import njit

from sparkchat.kernels.cpu.memory import fetch_add, words
from sparkchat.kernels.cpu.rows import BYTES, add, gate
from sparkchat.kernels.cpu.tiles import call_tile

STORE, ADD, GATE = 0, 1, 2
"""What becomes of a product: out = y, out += y, or out = silu(first half of y) * second half."""
KIND, CODES, BLOCKS, GROUPS, BLOCK_BYTES, BIAS, TILES = range(7)
"""Words of a matrix's record; TILES begins five addresses of code."""
RECORD_WORDS = 11
SLAB = 32
"""Rows that a lane block is multiplied with before the next one is read."""
SCRATCH_BYTES = 2 * SLAB * BYTES
_LEAST = 2
"""Lane blocks of the smallest shares; a tile of one row takes two at once."""


@njit(nogil=True)
def share_start(index, units, threads):
    """Where share ``index`` of a product begins: half of all is dealt out first, then half of the rest, and so on.

    Threads may be held up, and all wait for the last one: so what comes last is small. The first share of a thread is
    known before it asks.
    """
    first, size = 0, units // (2 * threads)
    while size > _LEAST and index >= threads:
        size -= size % _LEAST
        first, index, size = first + threads * size, index - threads, size // 2
    return min(units, first + index * max(_LEAST, size - size % _LEAST))


@njit(nogil=True)
def _block(m, codes, x, x_stride, count, out, out_stride, ahead):
    """One lane block times ``count`` rows."""
    row = 0
    while row < count:
        height = min(4, count - row)
        call_tile(
            m[TILES + height - 1], codes, m[BLOCK_BYTES], m[GROUPS], x + row * x_stride, x_stride,
            out + row * out_stride, out_stride, ahead,
        )  # fmt: skip
        row += height


@njit(nogil=True)
def _unit(m, unit, behind, x, x_stride, count, epilogue, out, out_stride, scratch):
    """Lane block ``unit`` of the output, from one block of the matrix or, gated, from two; unit ``behind`` is next."""
    codes, ahead = m[CODES] + unit * m[BLOCK_BYTES], m[CODES] + behind * m[BLOCK_BYTES]
    place = out + unit * BYTES
    bias = 0 if m[BIAS] == 0 else m[BIAS] + unit * BYTES
    if epilogue == STORE:
        _block(m, codes, x, x_stride, count, place, out_stride, ahead)
        if bias:
            for r in range(count):
                add(bias, place + r * out_stride)
        return
    _block(m, codes, x, x_stride, count, scratch, BYTES, ahead)
    if epilogue == ADD:
        for r in range(count):
            if bias:
                add(bias, scratch + r * BYTES)
            add(scratch + r * BYTES, place + r * out_stride)
        return
    half = m[BLOCKS] // 2 * m[BLOCK_BYTES]
    other = scratch + SLAB * BYTES
    _block(m, codes + half, x, x_stride, count, other, BYTES, ahead + half)
    for r in range(count):
        if bias:
            add(bias, scratch + r * BYTES)
            add(bias + m[BLOCKS] // 2 * BYTES, other + r * BYTES)
        gate(scratch + r * BYTES, other + r * BYTES, place + r * out_stride)


@njit(nogil=True)
def multiply(record, x, x_stride, count, epilogue, out, out_stride, counter, thread, threads, scratch):
    """This thread's share of ``count`` rows times the matrix of ``record``; ``counter``: shares taken behind the first
    ones."""
    m = words(record, RECORD_WORDS)
    units = m[BLOCKS] // 2 if epilogue == GATE else m[BLOCKS]
    is_single = count == 1 and epilogue == STORE and m[BIAS] == 0
    index = thread
    first = share_start(index, units, threads)
    while first < units:
        last = share_start(index + 1, units, threads)
        index = threads + fetch_add(counter, 1)
        after = share_start(index, units, threads)
        row = 0
        while row < count:
            rows = min(SLAB, count - row)
            at, to = x + row * x_stride, out + row * out_stride
            unit = first
            while is_single and unit + 2 <= last:
                codes = m[CODES] + unit * m[BLOCK_BYTES]
                behind = unit + 2 if unit + 2 < last else after
                call_tile(
                    m[TILES + 4],
                    codes,
                    m[BLOCK_BYTES],
                    m[GROUPS],
                    at,
                    x_stride,
                    to + unit * BYTES,
                    0,
                    m[CODES] + behind * m[BLOCK_BYTES],
                )
                unit += 2
            while unit < last:
                behind = unit + 1 if unit + 1 < last else after
                _unit(m, unit, behind, at, x_stride, rows, epilogue, to, out_stride, scratch)
                unit += 1
            row += rows
        first = after
