"""Whole vocabularies on a processor: largest logits, softmax at a temperature, draws, and the acceptance of drafts.

Each does what its torch counterpart in the engine does (``engine/sampling.py``, ``engine/acceptance.py``) in one or two
passes over a row. Sums run in float32 inside 128 entries and in float64 over those.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types

from sparkchat.kernels.cpu.emit import Emitter, repeat
from sparkchat.kernels.cpu.rows import BYTES, primitive

_BLOCK = 128
"""Entries that are summed at once."""


def _peak(e: Emitter, x: ir.Value, blocks: ir.Value) -> ir.Value:
    """The largest of blocks * 16 numbers; none if one of them is none."""
    b = e.builder

    def look(i: ir.Value, most: ir.Value, bad: ir.Value) -> list[ir.Value]:
        value = e.load(e.at(x, e.times(i, BYTES)))
        is_bad = b.fcmp_unordered("uno", value, value)
        return [e.larger(value, most), b.select(is_bad, value, bad)]

    most, bad = repeat(b, blocks, [e.splat(float("-inf")), e.zero], look)
    # 0 where all are numbers, else none.
    return b.fadd(e.across(most, e.larger), e.total(bad))


def _soften(e: Emitter, x: ir.Value, blocks: ir.Value, peak: ir.Value, inverse: ir.Value, out: ir.Value) -> ir.Value:
    """out = e^((x - peak) * inverse), blocks * 16 numbers; returns their sum."""
    b = e.builder
    peaks, inverses = e.splat(peak), e.splat(inverse)

    def power(i: ir.Value, sums: ir.Value) -> list[ir.Value]:
        offset = e.times(i, BYTES)
        value = e.exp(b.fmul(b.fsub(e.load(e.at(x, offset)), peaks), inverses))
        e.store(value, e.at(out, offset))
        return [b.fadd(sums, value)]

    (sums,) = repeat(b, blocks, [e.zero], power)
    return e.total(sums)


def _total(e: Emitter, x: ir.Value, blocks: ir.Value) -> ir.Value:
    def add(i: ir.Value, sums: ir.Value) -> list[ir.Value]:
        return [e.builder.fadd(sums, e.load(e.at(x, e.times(i, BYTES))))]

    (sums,) = repeat(e.builder, blocks, [e.zero], add)
    return e.total(sums)


peak_of = primitive("peak", 2, _peak, types.float32)
soften_row = primitive("soften", 5, _soften, types.float32, floats=(2, 3))
_total_of = primitive("total", 2, _total, types.float32)


@njit("void(float32[:, ::1], float32[::1])", nogil=True, cache=True)
def find_peaks(logits, peaks):
    """logits [n, V] -> peaks [n]: the largest of each row, NaN where a row has one."""
    size = logits.shape[1]
    whole = size // 16
    for row in range(logits.shape[0]):
        most = peak_of(logits[row].ctypes.data, whole) if whole else np.float32(-np.inf)
        for i in range(whole * 16, size):
            value = logits[row, i]
            if value > most or np.isnan(value):
                most = value
            if np.isnan(most):
                break
        peaks[row] = most


@njit("void(float32[::1], float32, float32, float32[::1])", nogil=True, cache=True)
def soften(logits, peak, temperature, law):
    """law [V] = softmax(logits / temperature); ``peak`` is the largest logit."""
    size = logits.shape[0]
    whole = size // 16
    inverse = np.float32(1.0) / temperature
    total = 0.0
    for first in range(0, whole, _BLOCK // 16):
        count, offset = min(_BLOCK // 16, whole - first), first * 64
        total += soften_row(logits.ctypes.data + offset, count, peak, inverse, law.ctypes.data + offset)
    for i in range(whole * 16, size):
        value = np.float32(np.exp((logits[i] - peak) * inverse))
        law[i] = value
        total += value
    factor = np.float32(1.0 / total)
    for i in range(size):
        law[i] *= factor


@njit("boolean(float32[:, ::1], float64[::1], float32[:, ::1])", nogil=True, cache=True)
def make_laws(logits, temperatures, laws):
    """laws [n, V] = softmax(logits / temperature) of every row, temperatures [n] above 0.

    Returns whether all rows are of numbers; where one is not, laws are left unfinished.
    """
    peaks = np.empty(logits.shape[0], np.float32)
    find_peaks(logits, peaks)
    for row in range(logits.shape[0]):
        if not np.isfinite(peaks[row]):
            return False
        soften(logits[row], peaks[row], np.float32(temperatures[row]), laws[row])
    return True


@njit(nogil=True)
def _sum(weights):
    """float64 sum of [V], as ``_draw`` counts it."""
    total = 0.0
    for start in range(0, weights.shape[0], _BLOCK):
        total += _sum_block(weights, start)
    return total


@njit(nogil=True)
def _sum_block(weights, start):
    if start + _BLOCK <= weights.shape[0]:
        return np.float64(_total_of(weights.ctypes.data + 4 * start, _BLOCK // 16))
    total = 0.0
    for i in range(start, weights.shape[0]):
        total += weights[i]
    return total


@njit(nogil=True)
def _draw(weights, total, u):
    """Inverse CDF over [V] weights of sum ``total``; an entry of zero is never drawn."""
    size, target, before = weights.shape[0], u * total, 0.0
    last = 0
    for start in range(0, size, _BLOCK):
        mass = _sum_block(weights, start)
        if before + mass > target:
            inside = before
            for i in range(start, min(start + _BLOCK, size)):
                if weights[i] > 0:
                    last = i
                    inside += weights[i]
                    if inside > target:
                        return i
            # The block's own sum was a little larger: its last entry is meant.
            if weights[last] > 0 and last >= start:
                return last
        before += mass
    for i in range(size - 1, -1, -1):
        if weights[i] > 0:
            return i
    return 0


@njit("void(float32[:, ::1], float64[::1], int64[::1])", nogil=True, cache=True)
def draw_rows(weights, u, out):
    """One id a row, [n], of weights [n, V] that need not sum to one; u [n] in [0, 1)."""
    for row in range(weights.shape[0]):
        out[row] = _draw(weights[row], _sum(weights[row]), u[row])


@njit(nogil=True)
def _draw_residual(p, ids, q, floor, rest, u):
    """A draw from max(p - q, 0), q [M] on the tokens ``ids``; from p where no more than ``floor`` is left."""
    rest[:] = p
    for i in range(ids.shape[0]):
        rest[ids[i]] = max(p[ids[i]] - q[i], np.float32(0.0))
    total = _sum(rest)
    if total <= floor:
        return _draw(p, _sum(p), u)
    return _draw(rest, total, u)


@njit(
    "void(float32[:, ::1], int64[::1], int64[::1], int64[::1], int64[:, ::1], int64[::1], float32[:, :, ::1],"
    " int64[:, ::1], int64[:, :, ::1], float64[:, ::1], float64[:, ::1], boolean[::1], int64[::1], float64,"
    " int64[:, ::1], float64[:, :, ::1])",
    nogil=True,
    cache=True,
)
def accept_drafts(
    p, starts, lens, limits, ids, drafted, probs, index, support, u_accept, u_next, is_greedy, argmax, floor, out, seen
):
    """``engine.acceptance.accept`` for drafts whose laws lie on their own few tokens.

    out [R, 3] int64 receives accepted, fully accepted, next id; seen [2, R, g] float64 q(x) and p(x), and keeps what it
    holds where there is none. p [N, V], probs [R, g, M], index [R, g] and support [R, g, M] are not read for greedy
    requests.
    """
    rest = np.empty(p.shape[1], np.float32)
    for r in range(starts.shape[0]):
        full, is_open = 0, True
        for k in range(ids.shape[1]):
            if k >= drafted[r]:
                continue
            row = starts[r] + k
            q_x = 1.0 if is_greedy[r] else np.float64(probs[r, k, index[r, k]])
            seen[0, r, k] = q_x
            if k >= lens[r]:
                continue
            p_x = (1.0 if ids[r, k] == argmax[row] else 0.0) if is_greedy[r] else np.float64(p[row, ids[r, k]])
            seen[1, r, k] = p_x
            is_open = is_open and q_x > 0 and u_accept[r, k] * q_x < p_x
            if is_open:
                full += 1
        taken = min(full, min(lens[r], limits[r]))
        row = starts[r] + taken
        out[r, 0], out[r, 1] = taken, full
        if full > taken:
            out[r, 2] = ids[r, taken]
        elif is_greedy[r]:
            out[r, 2] = argmax[row]
        elif taken < lens[r] and taken < drafted[r]:
            out[r, 2] = _draw_residual(p[row], support[r, taken], probs[r, taken], floor, rest, u_next[r, taken])
        else:
            out[r, 2] = _draw(p[row], _sum(p[row]), u_next[r, taken])
