"""Words of a stack's job, and of a layer's line in its table: addresses, sizes and strides in bytes."""

from __future__ import annotations

# fmt: off
(COUNT, HIDDEN, HEADS, KEY_HEADS, HEAD_SIZE, INNER, LAYERS, TABLE, X, POSITIONS, ENDS, CACHE_ROWS, ROPE, TAPS,
 TAP_COUNT, OUT, LAST_NORM, EPS, KEYS_BF16, QKV, QKV_STRIDE, MIXED, ACT, SCRATCH, SCRATCH_STRIDE,
 CONTEXT_BYTES) = range(26)
# fmt: on
(
    INPUT_NORM,
    POST_NORM,
    QK_NORM,
    QKV_MATRIX,
    O_MATRIX,
    GATE_UP,
    DOWN,
    STORE_BASE,
    ROW_STRIDE,
    HEAD_STRIDE,
    SLOTS,
    WINDOW,
    TAP,
) = range(13)  # fmt: skip
"""Words of a layer's line in the table."""
LAYER_WORDS = 13
