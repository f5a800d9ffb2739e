"""Attention of one row and some of the query heads that share a key head: every key and value is read once for all."""

from __future__ import annotations

import math

from numba import njit

from sparkchat.kernels.cpu import rows
from sparkchat.kernels.cpu.job import (
    CACHE_ROWS,
    CONTEXT_BYTES,
    COUNT,
    ENDS,
    HEAD_SIZE,
    HEAD_STRIDE,
    HEADS,
    KEY_HEADS,
    KEYS_BF16,
    MIXED,
    QKV,
    QKV_STRIDE,
    ROW_STRIDE,
    SLOTS,
    STORE_BASE,
    WINDOW,
)
from sparkchat.kernels.cpu.memory import fetch_add, floats, words

_MOST_HEADS = 4
"""Query heads at a time."""
SCORE_ROWS = _MOST_HEADS
"""Rows of scores that a thread needs room for."""
_SHARES = 3
"""Parts of the work that each thread takes on average, where heads can be taken apart for it."""


@njit(nogil=True)
def _score(job, heads, q, q_stride, keys, count, scores, score_stride):
    size = job[HEAD_SIZE]
    factor = 1.0 / math.sqrt(size)
    blocks = size // 16
    if job[KEYS_BF16]:
        if heads == 4:
            rows.scores_bf16_4(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        elif heads == 3:
            rows.scores_bf16_3(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        elif heads == 2:
            rows.scores_bf16_2(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        else:
            rows.scores_bf16_1(q, q_stride, keys, count, blocks, factor, scores, score_stride)
    else:
        if heads == 4:
            rows.scores_f32_4(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        elif heads == 3:
            rows.scores_f32_3(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        elif heads == 2:
            rows.scores_f32_2(q, q_stride, keys, count, blocks, factor, scores, score_stride)
        else:
            rows.scores_f32_1(q, q_stride, keys, count, blocks, factor, scores, score_stride)


@njit(nogil=True)
def _mix(job, heads, scores, score_stride, values, count, out, out_stride):
    size, width = job[HEAD_SIZE], 2 if job[KEYS_BF16] else 4
    for i in range(0, size, 16):
        at, to = values + i * width, out + i * 4
        if job[KEYS_BF16]:
            if heads == 4:
                rows.mix_bf16_4(scores, score_stride, at, count, size * width, to, out_stride)
            elif heads == 3:
                rows.mix_bf16_3(scores, score_stride, at, count, size * width, to, out_stride)
            elif heads == 2:
                rows.mix_bf16_2(scores, score_stride, at, count, size * width, to, out_stride)
            else:
                rows.mix_bf16_1(scores, score_stride, at, count, size * width, to, out_stride)
        else:
            if heads == 4:
                rows.mix_f32_4(scores, score_stride, at, count, size * width, to, out_stride)
            elif heads == 3:
                rows.mix_f32_3(scores, score_stride, at, count, size * width, to, out_stride)
            elif heads == 2:
                rows.mix_f32_2(scores, score_stride, at, count, size * width, to, out_stride)
            else:
                rows.mix_f32_1(scores, score_stride, at, count, size * width, to, out_stride)


@njit(nogil=True)
def _attend_heads(job, layer, n, key_head, first_head, heads, scores):
    """``heads`` query heads of row n from ``first_head`` on: softmax over the keys the row sees, oldest first."""
    size, key_heads = job[HEAD_SIZE], job[KEY_HEADS]
    width = size * (2 if job[KEYS_BF16] else 4)
    end = words(job[ENDS], job[COUNT])[n]
    first = max(0, end - layer[WINDOW]) if layer[WINDOW] else 0
    keys = layer[STORE_BASE] + words(job[CACHE_ROWS], job[COUNT])[n] * layer[ROW_STRIDE] + key_head * layer[HEAD_STRIDE]
    values = keys + key_heads * layer[HEAD_STRIDE]
    # Query heads lie group by group: those of one key head are ``key_heads`` apart.
    h, stride = first_head * key_heads + key_head, key_heads * size * 4
    q = job[QKV] + n * job[QKV_STRIDE] + h * size * 4
    out = job[MIXED] + (n * job[HEADS] + h) * size * 4
    count = end - first
    # In a ring what is seen may go on at its beginning.
    slot = first % layer[SLOTS]
    before = min(count, layer[SLOTS] - slot)
    score_stride = job[CONTEXT_BYTES]
    _score(job, heads, q, stride, keys + slot * width, before, scores, score_stride)
    if before < count:
        _score(job, heads, q, stride, keys, count - before, scores + before * 4, score_stride)
    blocks = (count + 15) // 16
    for i in range(heads):
        tail = floats(scores + i * score_stride, blocks * 16)
        for t in range(count, blocks * 16):
            tail[t] = -math.inf
        total = rows.softmax(scores + i * score_stride, blocks)
        rows.scale(scores + i * score_stride, blocks, 1.0 / total)
        head = floats(out + i * stride, size)
        for d in range(size):
            head[d] = 0.0
    _mix(job, heads, scores, score_stride, values + slot * width, before, out, stride)
    if before < count:
        _mix(job, heads, scores + before * 4, score_stride, values, count - before, out, stride)


@njit(nogil=True)
def attend(job, layer, counter, threads, scores):
    """This thread's share of all rows and heads; ``scores`` is room for SCORE_ROWS rows of CONTEXT_BYTES."""
    key_heads = job[KEY_HEADS]
    group = job[HEADS] // key_heads
    step = min(group, _MOST_HEADS)
    while step > 1 and job[COUNT] * key_heads * ((group + step - 1) // step) < _SHARES * threads:
        step = (step + 1) // 2
    parts = (group + step - 1) // step
    items = job[COUNT] * key_heads * parts
    item = fetch_add(counter, 1)
    while item < items:
        n, rest = item // (key_heads * parts), item % (key_heads * parts)
        first = rest // key_heads * step
        _attend_heads(job, layer, n, rest % key_heads, first, min(step, group - first), scores)
        item = fetch_add(counter, 1)
