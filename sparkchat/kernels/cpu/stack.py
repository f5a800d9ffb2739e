"""A decoder's layers in one call: every thread runs all of it, and they meet between the phases of a layer.

Phases of a layer: norm and qkv, rotation and storing, attention, o, norm and gate_up, down. What is cheap (norms) every
thread does for itself; products are shared out by lane blocks, attention by row and head.
"""

from __future__ import annotations

from numba import njit

from sparkchat.kernels.cpu import rows
from sparkchat.kernels.cpu.attention import SCORE_ROWS, attend
from sparkchat.kernels.cpu.job import (
    ACT,
    CACHE_ROWS,
    CONTEXT_BYTES,
    COUNT,
    DOWN,
    EPS,
    GATE_UP,
    HEAD_SIZE,
    HEAD_STRIDE,
    HEADS,
    HIDDEN,
    INNER,
    INPUT_NORM,
    KEY_HEADS,
    KEYS_BF16,
    LAST_NORM,
    LAYER_WORDS,
    LAYERS,
    MIXED,
    O_MATRIX,
    OUT,
    POSITIONS,
    POST_NORM,
    QK_NORM,
    QKV,
    QKV_MATRIX,
    QKV_STRIDE,
    ROPE,
    ROW_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOTS,
    STORE_BASE,
    TABLE,
    TAP,
    TAP_COUNT,
    TAPS,
    X,
)
from sparkchat.kernels.cpu.memory import exchange, fetch_add, floats, pause, peek, words, yield_processor
from sparkchat.kernels.cpu.product import ADD, GATE, KIND, RECORD_WORDS, SCRATCH_BYTES, STORE, multiply
from sparkchat.kernels.cpu.tiles import BF16

BARRIER, GENERATION, COUNTERS = 0, 8, 16
"""Words of the threads' meeting place; a line of the processor's cache apart. Counters of the phases come last."""
PHASES_A_LAYER = 6
_SPINS = 1000
"""How often a thread looks before it lets others have the processor: about twenty microseconds."""


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
        pause()
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
def _multiply(job, matrix, x, inputs, packed, epilogue, out, out_stride, counter, thread, threads, own):
    """This thread's share of x [COUNT, inputs] float32 times a matrix; ``packed``: room for rows as codes want them."""
    count, stride = job[COUNT], 4 * inputs
    if words(matrix, RECORD_WORDS)[KIND] != BF16:
        wide = inputs // rows.GROUP * rows.GROUP_ROW_BYTES
        for n in range(count):
            rows.pack(x + n * stride, inputs // rows.GROUP, packed + n * wide)
        x, stride = packed, wide
    multiply(matrix, x, stride, count, epilogue, out, out_stride, counter, thread, threads, own)


@njit(nogil=True)
def rotate(at, turn, size):
    """Turn a head's pairs by the cosines and sines at ``turn``."""
    head, turns = floats(at, size), floats(turn, size)
    for i in range(0, size, 2):
        a, b, c, s = head[i], head[i + 1], turns[i], turns[i + 1]
        head[i] = a * c - b * s
        head[i + 1] = a * s + b * c


@njit(nogil=True)
def keep(at, store, slot, size, is_bf16):
    """Put a head into its slot of a store [slots, size]."""
    if is_bf16:
        rows.copy_bf16(at, size // 16, store + slot * size * 2)
    else:
        rows.copy_f32(at, size // 16, store + slot * size * 4)


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
        turn = job[ROPE] + position * size * 4
        store = layer[STORE_BASE] + cache_rows[n] * layer[ROW_STRIDE]
        slot = position % layer[SLOTS]
        for h in range(total):
            at = job[QKV] + n * job[QKV_STRIDE] + h * size * 4
            if h < heads + key_heads:
                if layer[QK_NORM]:
                    rows.norm(at, layer[QK_NORM] + h * size * 4, eps, size // 16, at)
                rotate(at, turn, size)
            if h >= heads:
                keep(at, store + (h - heads) * layer[HEAD_STRIDE], slot, size, job[KEYS_BF16])
        item = fetch_add(counter, total)


@njit(nogil=True)
def _tap(job, tap, thread, threads):
    """X of this thread's rows to place ``tap`` of the features [COUNT, TAP_COUNT, HIDDEN]."""
    stride = 4 * job[HIDDEN]
    for n in range(thread, job[COUNT], threads):
        to = job[TAPS] + (n * job[TAP_COUNT] + tap) * stride
        rows.copy_f32(job[X] + n * stride, job[HIDDEN] // 16, to)


@njit(nogil=True)
def run_stack(job_address, place, counter, thread, threads):
    """All layers and the last norm, of thread ``thread``; from ``counter`` on PHASES_A_LAYER of them a layer."""
    job = words(job_address, CONTEXT_BYTES + 1)
    count, hidden, wide = job[COUNT], job[HIDDEN], 4 * job[HIDDEN]
    own = job[SCRATCH] + thread * job[SCRATCH_STRIDE]
    scores = own + SCRATCH_BYTES
    normed = scores + SCORE_ROWS * job[CONTEXT_BYTES]
    packed = normed + count * wide
    heads_size = job[HEADS] * job[HEAD_SIZE]
    for index in range(job[LAYERS]):
        layer = words(job[TABLE] + index * LAYER_WORDS * 8, LAYER_WORDS)
        _norm_rows(job, layer[INPUT_NORM], normed)
        _multiply(
            job,
            layer[QKV_MATRIX],
            normed,
            hidden,
            packed,
            STORE,
            job[QKV],
            job[QKV_STRIDE],
            counter,
            thread,
            threads,
            own,
        )
        meet(place, threads)
        _rotate_rows(job, layer, counter + 8)
        meet(place, threads)
        attend(job, layer, counter + 16, threads, scores)
        meet(place, threads)
        _multiply(
            job, layer[O_MATRIX], job[MIXED], heads_size, packed, ADD, job[X], wide, counter + 24, thread, threads, own
        )
        meet(place, threads)
        _norm_rows(job, layer[POST_NORM], normed)
        _multiply(
            job,
            layer[GATE_UP],
            normed,
            hidden,
            packed,
            GATE,
            job[ACT],
            4 * job[INNER],
            counter + 32,
            thread,
            threads,
            own,
        )
        meet(place, threads)
        _multiply(job, layer[DOWN], job[ACT], job[INNER], packed, ADD, job[X], wide, counter + 40, thread, threads, own)
        meet(place, threads)
        if layer[TAP] >= 0:
            _tap(job, layer[TAP], thread, threads)
        counter += 8 * PHASES_A_LAYER
    eps = floats(job[EPS], 1)[0]
    for n in range(thread, count, threads):
        rows.norm(job[X] + n * wide, job[LAST_NORM], eps, hidden // 16, job[OUT] + n * wide)
