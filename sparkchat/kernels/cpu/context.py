"""What a drafter sees of its target, in one call: features become the keys and values of all its layers.

Phases: the first product, norm, the second product, and norm, rotation and storing of each head.
"""

from __future__ import annotations

from numba import njit

from sparkchat.kernels.cpu import rows
from sparkchat.kernels.cpu.memory import fetch_add, floats, words
from sparkchat.kernels.cpu.product import KIND, RECORD_WORDS, STORE, multiply
from sparkchat.kernels.cpu.stack import keep, meet, rotate
from sparkchat.kernels.cpu.tiles import BF16

# fmt: off
(COUNT, INPUTS, FEATURES, FC, HIDDEN, NORMED, NORM, EPS, KV_MATRIX, KV, K_NORM, LAYERS, KEY_HEADS, HEAD_SIZE, POSITIONS,
 CACHE_ROWS, ROPE, STORE_BASE, LAYER_STRIDE, ROW_STRIDE, HEAD_STRIDE, SLOTS, KEYS_BF16, PACKED, SCRATCH,
 SCRATCH_STRIDE) = range(26)
# fmt: on
"""Words of the job: addresses, sizes and strides in bytes. FEATURES [COUNT, INPUTS], NORMED [COUNT, HIDDEN] and
KV [COUNT, LAYERS * 2 * KEY_HEADS * HEAD_SIZE] float32, K_NORM [LAYERS, KEY_HEADS, HEAD_SIZE]."""
CONTEXT_WORDS = 26
CONTEXT_COUNTERS = 3


@njit(nogil=True)
def _multiply(job, matrix, x, inputs, out, out_stride, place, counter, thread, threads):
    """x [COUNT, inputs] float32 times a matrix, rows packed first where it has codes."""
    count, stride = job[COUNT], 4 * inputs
    if words(matrix, RECORD_WORDS)[KIND] != BF16:
        wide = inputs // rows.GROUP * rows.GROUP_ROW_BYTES
        for n in range(thread, count, threads):
            rows.pack(x + n * stride, inputs // rows.GROUP, job[PACKED] + n * wide)
        meet(place, threads)
        x, stride = job[PACKED], wide
    own = job[SCRATCH] + thread * job[SCRATCH_STRIDE]
    multiply(matrix, x, stride, count, STORE, out, out_stride, counter, thread, threads, own)
    meet(place, threads)


@njit(nogil=True)
def _store(job, counter):
    layers, key_heads, size, count = job[LAYERS], job[KEY_HEADS], job[HEAD_SIZE], job[COUNT]
    positions, cache_rows = words(job[POSITIONS], count), words(job[CACHE_ROWS], count)
    eps = floats(job[EPS], 1)[0]
    item = fetch_add(counter, 1)
    while item < count * layers:
        n, layer = item // layers, item % layers
        position = positions[n]
        store = job[STORE_BASE] + layer * job[LAYER_STRIDE] + cache_rows[n] * job[ROW_STRIDE]
        for h in range(2 * key_heads):
            at = job[KV] + ((n * layers + layer) * 2 * key_heads + h) * size * 4
            if h < key_heads:
                rows.norm(at, job[K_NORM] + (layer * key_heads + h) * size * 4, eps, size // 16, at)
                rotate(at, job[ROPE] + position * size * 4, size)
            keep(at, store + h * job[HEAD_STRIDE], position % job[SLOTS], size, job[KEYS_BF16])
        item = fetch_add(counter, 1)


@njit(nogil=True)
def run_context(job_address, place, counter, thread, threads):
    """This thread's part; CONTEXT_COUNTERS counters from ``counter`` on."""
    job = words(job_address, CONTEXT_WORDS)
    hidden, eps = job[HIDDEN], floats(job[EPS], 1)[0]
    _multiply(job, job[FC], job[FEATURES], job[INPUTS], job[NORMED], 4 * hidden, place, counter, thread, threads)
    for n in range(thread, job[COUNT], threads):
        at = job[NORMED] + n * 4 * hidden
        rows.norm(at, job[NORM], eps, hidden // 16, at)
    if words(job[KV_MATRIX], RECORD_WORDS)[KIND] == BF16:
        # Whole rows are read at once; packing has its own meeting.
        meet(place, threads)
    width = job[LAYERS] * 2 * job[KEY_HEADS] * job[HEAD_SIZE]
    _multiply(job, job[KV_MATRIX], job[NORMED], hidden, job[KV], 4 * width, place, counter + 8, thread, threads)
    _store(job, counter + 16)
