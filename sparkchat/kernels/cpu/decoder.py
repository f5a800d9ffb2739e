"""Stacks of decoder layers, and what a drafter sees of its target: the jobs that ``stack`` and ``context`` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels.cpu import job as job_words
from sparkchat.kernels.cpu import stack
from sparkchat.kernels.cpu.attention import SCORE_ROWS
from sparkchat.kernels.cpu.context import CONTEXT_WORDS
from sparkchat.kernels.cpu.matrix import PackedMatrix, Part
from sparkchat.kernels.cpu.memory import scratch
from sparkchat.kernels.cpu.product import SCRATCH_BYTES
from sparkchat.kernels.cpu.rows import GROUP, GROUP_ROW_BYTES
from sparkchat.kernels.cpu.team import CONTEXT, MOST_COUNTERS, STACK, team

_STATIC = (
    job_words.INPUT_NORM,
    job_words.POST_NORM,
    job_words.QK_NORM,
    job_words.QKV_MATRIX,
    job_words.O_MATRIX,
    job_words.GATE_UP,
    job_words.DOWN,
)


@dataclass(frozen=True)
class LayerWeights:
    """One layer; norms float32 [d], qk_norm [H + K, D] or None, gate_up [gate; up]."""

    input_norm: Tensor
    post_norm: Tensor
    qk_norm: Tensor | None
    qkv: PackedMatrix
    o: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values lie."""

    data: Tensor
    """[rows, 2K, slots, D] bf16 or float32, keys before values; position p lies in slot p modulo slots."""
    window: int | None
    """Keys a row sees, counting its own; None for all."""


@dataclass(frozen=True)
class Rows:
    """Rows of any requests."""

    numbers: np.ndarray
    """[3, N] int64: position, end, cache row. Positions below the end are seen: position + 1, or the end of a drafter's
    block."""
    end: int
    """The largest end."""


class Decoder:
    """Layers of one shape, which must be a multiple of 16 in a head and of 32 in every matrix's inputs."""

    def __init__(
        self, layers: Sequence[LayerWeights], norm: Tensor, eps: float, heads: tuple[int, int], head_size: int
    ) -> None:
        """``heads``: of queries and of keys. Query head h attends to key head h modulo their count."""
        self._layers, self._norm, self._heads, self._size = list(layers), norm, heads, head_size
        self._eps = np.array([eps], np.float32)
        self._table = np.zeros((len(self._layers), job_words.LAYER_WORDS), np.int64)
        """What stays the same from call to call; what does not is filled into a copy."""
        for line, layer in zip(self._table, self._layers, strict=True):
            qk_norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            matrices = (layer.qkv.record, layer.o.record, layer.gate_up.record, layer.down.record)
            line[list(_STATIC)] = (layer.input_norm.data_ptr(), layer.post_norm.data_ptr(), qk_norm, *matrices)
        self._hidden, self._inner = norm.shape[0], layers[0].down.inputs
        self._longest = max(self._hidden, self._inner, heads[0] * head_size)
        self._filled: tuple[Sequence[LayerCache] | None, tuple[int, ...], np.ndarray] = (None, (), self._table)
        """What the last table was filled in for, and that table."""
        assert len(self._layers) * stack.PHASES_A_LAYER <= MOST_COUNTERS // 2

    def run(
        self, x: Tensor, rows: Rows, caches: Sequence[LayerCache], rope: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, d] float32, consumed -> hidden [N, d] float32 after the norm, and the outputs of the layers ``taps``
        [N, len(taps), d] float32.

        rope [P, D] float32, cosine and sine of each pair side by side, holds every position. ``caches`` is not changed
        once it was given.
        """
        part, hidden, features = self.plan(x, rows, caches, rope, taps)
        team(torch.get_num_threads()).run((part.work, part.job))
        return hidden, features

    def plan(
        self, x: Tensor, rows: Rows, caches: Sequence[LayerCache], rope: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Part, Tensor, Tensor | None]:
        """As ``run``, to be run by the team as a part of something larger: the results are filled in then."""
        count, threads = x.shape[0], torch.get_num_threads()
        assert x.is_contiguous() and rope.is_contiguous() and x.dtype == rope.dtype == torch.float32
        heads, key_heads = self._heads
        features = torch.empty((count, len(taps), self._hidden)) if taps else None
        out = torch.empty((count, self._hidden))
        qkv_bytes, mixed_bytes = 4 * self._layers[0].qkv.width, 4 * heads * self._size
        context = 4 * (-(-rows.end // 16) * 16)
        packed_bytes = -(-self._longest // GROUP) * GROUP_ROW_BYTES
        own_bytes = SCRATCH_BYTES + SCORE_ROWS * context + count * (4 * self._hidden + packed_bytes)
        own_bytes += -own_bytes % 64
        shared_bytes = count * (qkv_bytes + mixed_bytes + 4 * self._inner)
        room = scratch(threads * own_bytes + shared_bytes)
        own = room.ctypes.data
        qkv = own + threads * own_bytes
        table, numbers = self._table_for(caches, taps), rows.numbers.ctypes.data
        job = np.array(
            (
                count,
                self._hidden,
                heads,
                key_heads,
                self._size,
                self._inner,
                len(self._layers),
                table.ctypes.data,
                x.data_ptr(),
                numbers,
                numbers + 8 * count,
                numbers + 16 * count,
                rope.data_ptr(),
                0 if features is None else features.data_ptr(),
                len(taps),
                out.data_ptr(),
                self._norm.data_ptr(),
                self._eps.ctypes.data,
                caches[0].data.dtype == torch.bfloat16,
                qkv,
                qkv_bytes,
                qkv + count * qkv_bytes,
                qkv + count * (qkv_bytes + mixed_bytes),
                own,
                own_bytes,
                context,
            ),
            np.int64,
        )
        return Part(STACK, job, (x, rows, caches, rope, room, table)), out, features

    def _table_for(self, caches: Sequence[LayerCache], taps: tuple[int, ...]) -> np.ndarray:
        """The layers' lines with where the cache lies now, which may have grown."""
        if caches is not self._filled[0] or taps != self._filled[1]:
            table = self._table.copy()
            _place(table, caches, taps)
            self._filled = (caches, taps, table)
        return self._filled[2]


class ContextWeights:
    """What turns features into a drafter's keys and values; see ``context``."""

    def __init__(self, fc: PackedMatrix, kv: PackedMatrix, norm: Tensor, k_norm: Tensor, eps: float) -> None:
        """norm [d] and k_norm [L, K, D] float32, contiguous."""
        self._fc, self._kv, self._norm, self._k_norm = fc, kv, norm, k_norm
        self._eps = np.array([eps], np.float32)
        self._longest = max(fc.inputs, kv.inputs)

    def plan(self, features: Tensor, rows: Rows, store: Tensor, rope: Tensor) -> Part:
        """features [N, fc inputs] float32 into store [L, cache rows, 2K, slots, D] bf16 or float32."""
        count, threads = features.shape[0], torch.get_num_threads()
        assert features.is_contiguous() and rope.is_contiguous() and features.dtype == rope.dtype == torch.float32
        layers, key_heads, size = self._k_norm.shape
        width = store.element_size()
        normed_bytes, kv_bytes = 4 * count * self._kv.inputs, 4 * count * self._kv.width
        packed_bytes = count * (self._longest // GROUP) * GROUP_ROW_BYTES
        room = scratch(normed_bytes + kv_bytes + packed_bytes + threads * SCRATCH_BYTES)
        normed, numbers = room.ctypes.data, rows.numbers.ctypes.data
        job = np.array(
            (
                count,
                self._fc.inputs,
                features.data_ptr(),
                self._fc.record,
                self._kv.inputs,
                normed,
                self._norm.data_ptr(),
                self._eps.ctypes.data,
                self._kv.record,
                normed + normed_bytes,
                self._k_norm.data_ptr(),
                layers,
                key_heads,
                size,
                numbers,
                numbers + 16 * count,
                rope.data_ptr(),
                store.data_ptr(),
                store.stride(0) * width,
                store.stride(1) * width,
                store.stride(2) * width,
                store.shape[3],
                store.dtype == torch.bfloat16,
                normed + normed_bytes + kv_bytes,
                normed + normed_bytes + kv_bytes + packed_bytes,
                SCRATCH_BYTES,
            ),
            np.int64,
        )
        assert len(job) == CONTEXT_WORDS
        return Part(CONTEXT, job, (features, rows, store, rope, room))


def _place(table: np.ndarray, caches: Sequence[LayerCache], taps: Sequence[int]) -> None:
    """Write into the layers' lines where the cache lies now, which may have grown."""
    for index, (line, cache) in enumerate(zip(table, caches, strict=True)):
        data = cache.data
        width = data.element_size()
        line[job_words.STORE_BASE] = data.data_ptr()
        line[job_words.ROW_STRIDE] = data.stride(0) * width
        line[job_words.HEAD_STRIDE] = data.stride(1) * width
        line[job_words.SLOTS] = data.shape[2]
        line[job_words.WINDOW] = cache.window or 0
        line[job_words.TAP] = list(taps).index(index) if index in taps else -1
