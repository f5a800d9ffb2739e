"""A decoder's layers in one call: every thread runs all of it, and they meet between the phases of a layer.

Phases of a layer: norm and qkv, rotation and storing, attention, o, norm and gate_up, down. What is cheap (norms) every
thread does for itself; products are shared out by lane blocks, attention by row and head.
"""

from __future__ import annotations

import math

from numba import njit

from sparkchat.kernels.cpu import rows
from sparkchat.kernels.cpu.memory import exchange, fetch_add, floats, peek, words, yield_processor
from sparkchat.kernels.cpu.product import ADD, GATE, KIND, RECORD_WORDS, SCRATCH_BYTES, STORE, multiply
from sparkchat.kernels.cpu.tiles import BF16

# fmt: off
(COUNT, HIDDEN, HEADS, KEY_HEADS, HEAD_SIZE, INNER, LAYERS, TABLE, X, POSITIONS, ENDS, CACHE_ROWS, ROPE, TAPS,
 TAP_COUNT, OUT, LAST_NORM, EPS, KEYS_BF16, QKV, QKV_STRIDE, MIXED, ACT, SCRATCH, SCRATCH_STRIDE,
 CONTEXT_BYTES) = range(26)
# fmt: on
"""Words of a stack's job; capitals in the text below."""
(INPUT_NORM, POST_NORM, QK_NORM, QKV_MATRIX, O_MATRIX, GATE_UP, DOWN, STORE_BASE, ROW_STRIDE, HEAD_STRIDE, SLOTS,
 WINDOW, TAP) = range(13)  # fmt: skip
"""Words of a layer's line in the table."""
LAYER_WORDS = 13
BARRIER, GENERATION, COUNTERS = 0, 8, 16
"""Words of the threads' meeting place; a line of the processor's cache apart. Counters of the phases come last."""
PHASES_A_LAYER = 6
_SPINS = 4000
"""How often a thread looks before it lets others have the processor: some microseconds."""


@njit(nogil=True)
def meet(place, threads):
    """Wait until all threads are here."""
    if threads == 1:
        return
    generation = peek(place + 8 * GENERATION)
    if fetch_add(place + 8 * BARRIER, 1) == threads - 1:
        exchange(place + 8 * BARRIER, 0)
        fetch_add(place + 8 * GENERATION, 1)
        return
    spins = 0
    while peek(place + 8 * GENERATION) == generation:
        spins += 1
        if spins > _SPINS:
            yield_processor()


@njit(nogil=True)
def _norm_rows(job, weight, out):
    """Every row of X normed to ``out`` [COUNT, HIDDEN] float32."""
    eps = floats(job[EPS], 1)[0]
    stride = 4 * job[HIDDEN]
    for n in range(job[COUNT]):
        rows.norm(job[X] + n * stride, weight, eps, job[HIDDEN] // 16, out + n * stride)


@njit(nogil=True)
def _multiply(job, matrix, x, inputs, packed, epilogue, out, out_stride, counter, threads, own):
    """This thread's share of x [COUNT, inputs] float32 times a matrix; ``packed``: room for rows as codes want them."""
    count, stride = job[COUNT], 4 * inputs
    if words(matrix, RECORD_WORDS)[KIND] != BF16:
        wide = inputs // rows.GROUP * rows.GROUP_ROW_BYTES
        for n in range(count):
            rows.pack(x + n * stride, inputs // rows.GROUP, packed + n * wide)
        x, stride = packed, wide
    multiply(matrix, x, stride, count, epilogue, out, out_stride, counter, threads, own)


@njit(nogil=True)
def _rotate_rows(job, layer, counter):
    """Queries and keys normed and turned; keys and values put into the cache."""
    heads, key_heads, size, count = job[HEADS], job[KEY_HEADS], job[HEAD_SIZE], job[COUNT]
    total = heads + 2 * key_heads
    positions, cache_rows = words(job[POSITIONS], count), words(job[CACHE_ROWS], count)
    eps = floats(job[EPS], 1)[0]
    item = fetch_add(counter, total)
    while item < count * total:
        n = item // total
        position = positions[n]
        turn = floats(job[ROPE] + position * size * 4, size)
        store = layer[STORE_BASE] + cache_rows[n] * layer[ROW_STRIDE]
        slot = position % layer[SLOTS]
        for h in range(total):
            at = job[QKV] + n * job[QKV_STRIDE] + h * size * 4
            if h < heads + key_heads:
                if layer[QK_NORM]:
                    rows.norm(at, layer[QK_NORM] + h * size * 4, eps, size // 16, at)
                head = floats(at, size)
                for i in range(0, size, 2):
                    a, b, c, s = head[i], head[i + 1], turn[i], turn[i + 1]
                    head[i] = a * c - b * s
                    head[i + 1] = a * s + b * c
            if h >= heads:
                place = store + (h - heads) * layer[HEAD_STRIDE]
                if job[KEYS_BF16]:
                    rows.copy_bf16(at, size // 16, place + slot * size * 2)
                else:
                    rows.copy_f32(at, size // 16, place + slot * size * 4)
        item = fetch_add(counter, total)


@njit(nogil=True)
def _attend_span(job, q, keys, values, count, scores, out, is_scoring):
    """Scores of ``count`` keys in a row, or their values mixed."""
    size, is_half = job[HEAD_SIZE], job[KEYS_BF16]
    if is_scoring:
        factor = 1.0 / math.sqrt(size)
        if is_half:
            rows.scores_bf16(q, keys, count, size // 16, factor, scores)
        else:
            rows.scores_f32(q, keys, count, size // 16, factor, scores)
        return
    width = 2 if is_half else 4
    i = 0
    while i < size:
        at = values + i * width
        if i + 64 <= size:
            if is_half:
                rows.mix4_bf16(scores, at, count, size * width, out + i * 4)
            else:
                rows.mix4_f32(scores, at, count, size * width, out + i * 4)
            i += 64
        else:
            if is_half:
                rows.mix_bf16(scores, at, count, size * width, out + i * 4)
            else:
                rows.mix_f32(scores, at, count, size * width, out + i * 4)
            i += 16


@njit(nogil=True)
def _attend_head(job, layer, n, h, scores):
    """One query head of one row: softmax over the keys it sees, oldest first."""
    size, key_heads = job[HEAD_SIZE], job[KEY_HEADS]
    width = size * (2 if job[KEYS_BF16] else 4)
    end = words(job[ENDS], job[COUNT])[n]
    first = max(0, end - layer[WINDOW]) if layer[WINDOW] else 0
    keys = layer[STORE_BASE] + words(job[CACHE_ROWS], job[COUNT])[n] * layer[ROW_STRIDE]
    keys += (h % key_heads) * layer[HEAD_STRIDE]
    values = keys + key_heads * layer[HEAD_STRIDE]
    q = job[QKV] + n * job[QKV_STRIDE] + h * size * 4
    out = job[MIXED] + (n * job[HEADS] + h) * size * 4
    count = end - first
    # In a ring what is seen may go on at its beginning.
    slot = first % layer[SLOTS]
    before = min(count, layer[SLOTS] - slot)
    _attend_span(job, q, keys + slot * width, values, before, scores, out, True)
    if before < count:
        _attend_span(job, q, keys, values, count - before, scores + before * 4, out, True)
    blocks = (count + 15) // 16
    tail = floats(scores, blocks * 16)
    for t in range(count, blocks * 16):
        tail[t] = -math.inf
    total = rows.softmax(scores, blocks)
    head = floats(out, size)
    for i in range(size):
        head[i] = 0.0
    _attend_span(job, q, keys, values + slot * width, before, scores, out, False)
    if before < count:
        _attend_span(job, q, keys, values, count - before, scores + before * 4, out, False)
    rows.scale(out, size // 16, 1.0 / total)


@njit(nogil=True)
def _attend(job, layer, counter, scores):
    items = job[COUNT] * job[HEADS]
    item = fetch_add(counter, 1)
    while item < items:
        _attend_head(job, layer, item // job[HEADS], item % job[HEADS], scores)
        item = fetch_add(counter, 1)


@njit(nogil=True)
def _tap(job, tap, thread, threads):
    """X of this thread's rows to place ``tap`` of the features [COUNT, TAP_COUNT, HIDDEN]."""
    stride = 4 * job[HIDDEN]
    for n in range(thread, job[COUNT], threads):
        to = job[TAPS] + (n * job[TAP_COUNT] + tap) * stride
        rows.copy_f32(job[X] + n * stride, job[HIDDEN] // 16, to)


@njit(nogil=True)
def run_stack(job_address, place, thread, threads):
    """All layers and the last norm, of thread ``thread``."""
    job = words(job_address, CONTEXT_BYTES + 1)
    count, hidden, wide = job[COUNT], job[HIDDEN], 4 * job[HIDDEN]
    own = job[SCRATCH] + thread * job[SCRATCH_STRIDE]
    scores = own + SCRATCH_BYTES
    normed = scores + job[CONTEXT_BYTES]
    packed = normed + count * wide
    counter = place + 8 * COUNTERS
    heads_size = job[HEADS] * job[HEAD_SIZE]
    for index in range(job[LAYERS]):
        layer = words(job[TABLE] + index * LAYER_WORDS * 8, LAYER_WORDS)
        _norm_rows(job, layer[INPUT_NORM], normed)
        _multiply(
            job, layer[QKV_MATRIX], normed, hidden, packed, STORE, job[QKV], job[QKV_STRIDE], counter, threads, own
        )
        meet(place, threads)
        _rotate_rows(job, layer, counter + 8)
        meet(place, threads)
        _attend(job, layer, counter + 16, scores)
        meet(place, threads)
        _multiply(job, layer[O_MATRIX], job[MIXED], heads_size, packed, ADD, job[X], wide, counter + 24, threads, own)
        meet(place, threads)
        _norm_rows(job, layer[POST_NORM], normed)
        _multiply(
            job, layer[GATE_UP], normed, hidden, packed, GATE, job[ACT], 4 * job[INNER], counter + 32, threads, own
        )
        meet(place, threads)
        _multiply(job, layer[DOWN], job[ACT], job[INNER], packed, ADD, job[X], wide, counter + 40, threads, own)
        meet(place, threads)
        if layer[TAP] >= 0:
            _tap(job, layer[TAP], thread, threads)
        counter += 8 * PHASES_A_LAYER
    eps = floats(job[EPS], 1)[0]
    for n in range(thread, count, threads):
        rows.norm(job[X] + n * wide, job[LAST_NORM], eps, hidden // 16, job[OUT] + n * wide)
