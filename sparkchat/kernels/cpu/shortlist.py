"""A block's drafts on a processor: the likeliest tokens of every position, the vanilla sequential head over them, the
request's filters, the draw, and the confidence, one position after the other in one call.

``engine/shortlist.py`` does the same with NumPy, and says why only the likeliest tokens are looked at.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit

from sparkchat.kernels.cpu.emit import I64, Emitter, repeat
from sparkchat.kernels.cpu.laws import peak_of, soften_row
from sparkchat.kernels.cpu.rows import BYTES, GROUP, primitive

(TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, IS_GREEDY, WIDEST, SHARPENING, SLACK,
 CONFIDENCE_BIAS) = range(12)  # fmt: skip
"""Places in the settings of a request. WIDEST 0: the draft temperature is the request's."""
NUM_SETTINGS = 12
_STRIDE = 256
"""Logits in which 16 are looked at together: those 16 apart from each other share a peak."""
_AHEAD = 8
"""Rows of W2 that are asked for before they are needed."""


def _strided_peaks(e: Emitter, x: ir.Value, blocks: ir.Value, out: ir.Value) -> None:
    """out[16 b + j] = the largest of x[256 b + j], x[256 b + j + 16], ...; what is no number is passed over."""
    b = e.builder

    def block(i: ir.Value) -> list[ir.Value]:
        at = e.at(x, e.times(i, 4 * _STRIDE))
        most = e.splat(float("-inf"))
        for part in range(_STRIDE // 16):
            most = e.larger(e.load(e.at(at, part * BYTES)), most)
        e.store(most, e.at(out, e.times(i, BYTES)))
        return []

    repeat(b, blocks, [], block)


def _bias(
    e: Emitter, columns: ir.Value, count: ir.Value, w2: ir.Value, blocks: ir.Value, vector: ir.Value, out: ir.Value
) -> None:
    """out[i] += w2[columns[i]] . vector, w2 in bfloat16 with blocks * 16 numbers a row."""
    b = e.builder
    stride = e.times(blocks, BYTES // 2)

    def row(place: ir.Value) -> ir.Value:
        column = b.load(b.inttoptr(e.at(columns, e.times(place, 8)), I64.as_pointer()))
        return e.at(w2, b.mul(column, stride))

    def one(i: ir.Value) -> list[ir.Value]:
        behind = row(e.at(i, _AHEAD))
        at = row(i)

        def multiply(k: ir.Value, total: ir.Value) -> list[ir.Value]:
            e.prefetch(e.at(behind, e.times(k, BYTES // 2)))
            weight = e.load(e.at(at, e.times(k, BYTES // 2)), "bf16")
            return [e.fma(e.load(e.at(vector, e.times(k, BYTES))), weight, total)]

        (total,) = repeat(b, blocks, [e.zero], multiply)
        place = e.at(out, e.times(i, 4))
        b.store(b.fadd(e.scalar(place), e.total(total)), b.inttoptr(place, ir.FloatType().as_pointer()))
        return []

    repeat(b, count, [], one)


def _rescore(
    e: Emitter,
    columns: ir.Value,
    count: ir.Value,
    codes: ir.Value,
    scale: ir.Value,
    groups: ir.Value,
    hidden: ir.Value,
    out: ir.Value,
) -> None:
    """out[i] = the row columns[i] of a weight in 8 bits, a scale for each 32 inputs, times hidden [groups * 32]."""
    b = e.builder
    lines = e.times(groups, GROUP)

    def row(place: ir.Value) -> tuple[ir.Value, ir.Value]:
        column = b.load(b.inttoptr(e.at(columns, e.times(place, 8)), I64.as_pointer()))
        return e.at(codes, b.mul(column, lines)), e.at(scale, b.mul(column, e.times(groups, 4)))

    def one(i: ir.Value) -> list[ir.Value]:
        behind, behind_scale = row(e.at(i, _AHEAD))
        at, at_scale = row(i)

        def multiply(g: ir.Value, total: ir.Value) -> list[ir.Value]:
            e.prefetch(e.at(behind, e.times(g, GROUP)))
            e.prefetch(e.at(behind_scale, e.times(g, 4)))
            part = e.zero
            for half in (0, 1):
                weight = e.load(e.at(at, e.times(g, GROUP), half * GROUP // 2), "i8")
                part = e.fma(weight, e.load(e.at(hidden, e.times(g, 4 * GROUP), half * BYTES)), part)
            return [e.fma(e.splat(e.scalar(e.at(at_scale, e.times(g, 4)))), part, total)]

        (total,) = repeat(b, groups, [e.zero], multiply)
        b.store(e.total(total), b.inttoptr(e.at(out, e.times(i, 4)), ir.FloatType().as_pointer()))
        return []

    repeat(b, count, [], one)


_peaks = primitive("strided_peaks", 3, _strided_peaks)
_rescored = primitive("shortlist_rescore", 7, _rescore)
_add_bias = primitive("shortlist_bias", 6, _bias)


@njit(nogil=True)
def _nth_largest(values, count, n):
    """The n-th largest (from 1) of the first ``count`` numbers, which are put into another order."""
    low, high, place = 0, count - 1, n - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return values[place]


@njit(nogil=True)
def _choose(row, columns, size, work, found):
    """Columns of the ``size`` largest logits of a row [Vd] of numbers, the lowest of equals, ascending."""
    blocks = row.shape[0] // _STRIDE
    peaks = work[: 16 * blocks]
    _peaks(row.ctypes.data, blocks, peaks.ctypes.data)
    least = np.float32(-np.inf)
    if peaks.shape[0] >= size:
        # That many peaks are as large, so the last one chosen is.
        copy = work[peaks.shape[0] : 2 * peaks.shape[0]]
        copy[:] = peaks
        least = _nth_largest(copy, copy.shape[0], size)
    count = 0
    lanes = np.empty(16, np.int64)
    for b in range(blocks):
        num_lanes = 0
        for j in range(16):
            if peaks[16 * b + j] >= least:
                lanes[num_lanes] = j
                num_lanes += 1
        for first in range(b * _STRIDE, (b + 1) * _STRIDE, 16):
            for j in range(num_lanes):
                if row[first + lanes[j]] >= least:
                    found[count] = first + lanes[j]
                    count += 1
    for i in range(blocks * _STRIDE, row.shape[0]):
        if row[i] >= least:
            found[count] = i
            count += 1
    for i in range(count):
        work[i] = row[found[i]]
    least = _nth_largest(work, count, size)
    above = 0
    for i in range(count):
        above += row[found[i]] > least
    equal, place = size - above, 0
    for i in range(count):
        value = row[found[i]]
        if value > least or (value == least and equal > 0):
            equal -= value == least
            columns[place] = found[i]
            place += 1


@njit(nogil=True)
def _penalise(logits, targets, settings, seen, counts, drafted):
    """Penalties in place; ``drafted``: tokens of this block so far."""
    repetition = np.float32(settings[REPETITION])
    presence, frequency = settings[PRESENCE], settings[FREQUENCY]
    for i in range(logits.shape[0]):
        token, times = targets[i], 0
        for other in drafted:
            times += other == token
        if repetition != 1.0 and (times or seen[token]):
            logits[i] = logits[i] * repetition if logits[i] < 0 else logits[i] / repetition
        if presence != 0.0 or frequency != 0.0:
            count = counts[token] + times
            if count > 0:
                logits[i] -= np.float32(presence + frequency * count)


@njit(nogil=True)
def _mass(values):
    total = 0.0
    for value in values:
        total += value
    return total


@njit(nogil=True)
def _keep_above(law, least, equal):
    """Drop what is below ``least``, and of what equals it all but the first ``equal``."""
    for i in range(law.shape[0]):
        if law[i] < least:
            law[i] = 0.0
        elif law[i] == least:
            if equal <= 0:
                law[i] = 0.0
            equal -= 1


@njit(nogil=True)
def _filter(law, settings, work):
    """top-p, then min-p, as ``engine/filters.py`` has them; the law is then normalised."""
    size = law.shape[0]
    if settings[TOP_P] < 1.0:
        descending = work[:size]
        descending[:] = law
        descending.sort()
        total, place = 0.0, size - 1
        for i in range(size - 1, -1, -1):
            total += descending[i]
            place = i
            if total >= settings[TOP_P] - settings[SLACK]:
                break
        least, equal = descending[place], 0
        for i in range(place, size):
            equal += descending[i] == least
        _keep_above(law, least, equal)
    if settings[MIN_P] > 0.0:
        most = law.max()
        _keep_above(law, np.float32(settings[MIN_P] * (1.0 - settings[SLACK])) * most, size)
    factor = 1.0 / _mass(law)
    for i in range(size):
        law[i] = np.float32(law[i] * factor)


@njit(nogil=True)
def _make_law(logits, settings, law, work):
    """law [M] = what the draft is drawn from; one-hot when greedy, or without a number to go by."""
    size = logits.shape[0]
    most, best, is_bad = np.float32(-np.inf), 0, False
    for i in range(size):
        is_bad = is_bad or np.isnan(logits[i])
        if logits[i] > most:
            most, best = logits[i], i
    if settings[IS_GREEDY] or is_bad or not np.isfinite(most):
        law[:] = 0.0
        law[best] = 1.0
        return
    temperature = settings[TEMPERATURE]
    blocks = size // 16
    if settings[WIDEST] > 0.0:
        inverse = np.float32(1.0 / temperature)
        peak = 1.0 / np.float64(soften_row(logits.ctypes.data, blocks, most, inverse, law.ctypes.data))
        temperature *= settings[WIDEST] - settings[SHARPENING] * peak
    top_k = np.int64(settings[TOP_K])
    if 0 < top_k < size:
        work[:size] = logits
        least = _nth_largest(work, size, top_k)
        # Ties at the last place stay.
        for i in range(size):
            if logits[i] < least:
                logits[i] = -np.inf
    soften_row(logits.ctypes.data, blocks, most, np.float32(1.0 / temperature), law.ctypes.data)
    factor = 1.0 / _mass(law)
    for i in range(size):
        law[i] = np.float32(law[i] * factor)
    if settings[TOP_P] < 1.0 or settings[MIN_P] > 0.0:
        _filter(law, settings, work)


@njit(nogil=True)
def _draw(law, u):
    target, total, last = u * _mass(law), 0.0, 0
    for i in range(law.shape[0]):
        if law[i] > 0:
            total += law[i]
            last = i
            if total > target:
                break
    return last


@njit(nogil=True)
def _judge(hidden, vector, weight, bias):
    """The confidence logit: weight [d + r] or [d] on the row's hidden state and the token before."""
    total = bias
    for i in range(hidden.shape[0]):
        total += np.float64(hidden[i]) * weight[i]
    for i in range(weight.shape[0] - hidden.shape[0]):
        total += np.float64(vector[i]) * weight[hidden.shape[0] + i]
    return np.float32(total)


@njit(
    "boolean(float32[:, ::1], float32[:, ::1], int64[::1], uint16[:, ::1], uint16[:, ::1], float32[::1], boolean[::1],"
    " float32[::1], float64[::1], int64, float64[::1], int64[::1], int64[::1], float32[:, ::1], int64[:, ::1],"
    " float32[::1], int8[:, ::1], float32[:, ::1])",
    nogil=True,
    cache=True,
)
def draw_block(
    base, hidden, mapping, w1, w2, judge, seen, counts, settings, anchor, u, ids, index, probs, support, confidence,
    codes, scale
):  # fmt: skip
    """Draw the drafts of one request; returns whether all logits were numbers.

    base [g, Vd] logits before the sequential head, hidden [g, d]; mapping [Vd] target ids, empty where they are the
    same; w1 [V, r] and w2 [Vd, r] bits of bfloat16, r a multiple of 16, or 0 without such a head; judge [d + r] or [d],
    [0] without a confidence head; seen [V] and counts [V] of the request's tokens, read for penalties alone; u [g].
    codes [Vd, d] and scale [Vd, d / 32], empty where base is exact: the weight that base is an estimate with, by which
    the likeliest tokens are chosen and no more. Receives ids [g], index [g], probs [g, M], support [g, M] target ids,
    confidence [g].
    """
    size, rank = probs.shape[1], w1.shape[1]
    work = np.empty(max(base.shape[1], size), np.float32)
    found = np.empty(base.shape[1], np.int32)
    columns = np.zeros(size + _AHEAD, np.int64)
    vector, bits = np.zeros(max(rank, 1), np.float32), np.zeros(max(rank, 1), np.uint32)
    logits = np.empty(size, np.float32)
    is_penalised = settings[REPETITION] != 1.0 or settings[PRESENCE] != 0.0 or settings[FREQUENCY] != 0.0
    is_sound, previous = True, anchor
    for k in range(ids.shape[0]):
        whole = base.shape[1] // 16
        peak = peak_of(base[k].ctypes.data, whole)
        for i in range(16 * whole, base.shape[1]):
            if base[k, i] > peak or np.isnan(base[k, i]):
                peak = base[k, i]
        if np.isfinite(peak):
            _choose(base[k], columns, size, work, found)
        else:
            columns[:size] = np.arange(size)
            is_sound = False
        for i in range(size):
            logits[i] = base[k, columns[i]]
            support[k, i] = mapping[columns[i]] if mapping.shape[0] else columns[i]
        if codes.shape[0]:
            _rescored(
                columns.ctypes.data, size, codes.ctypes.data, scale.ctypes.data, scale.shape[1],
                hidden[k].ctypes.data, logits.ctypes.data,
            )  # fmt: skip
        if rank:
            for i in range(rank):
                bits[i] = np.uint32(w1[previous, i]) << np.uint32(16)
            vector[:] = bits.view(np.float32)
            _add_bias(columns.ctypes.data, size, w2.ctypes.data, rank // 16, vector.ctypes.data, logits.ctypes.data)
        for i in range(size):
            is_sound = is_sound and not np.isnan(logits[i]) and logits[i] != np.inf
        if judge.shape[0]:
            confidence[k] = _judge(hidden[k], vector, judge, settings[CONFIDENCE_BIAS])
        if is_penalised:
            _penalise(logits, support[k], settings, seen, counts, ids[:k])
        _make_law(logits, settings, probs[k], work)
        index[k] = _draw(probs[k], u[k])
        ids[k] = previous = support[k, index[k]]
    return is_sound
