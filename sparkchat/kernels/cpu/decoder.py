"""A stack of decoder layers over one cache: builds the job that ``stack.run_stack`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels.cpu import job as job_words
from sparkchat.kernels.cpu import stack
from sparkchat.kernels.cpu.attention import SCORE_ROWS
from sparkchat.kernels.cpu.matrix import PackedMatrix
from sparkchat.kernels.cpu.product import SCRATCH_BYTES
from sparkchat.kernels.cpu.rows import GROUP, GROUP_ROW_BYTES
from sparkchat.kernels.cpu.team import MOST_COUNTERS, STACK, team

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
    """Rows of any requests. All [N] int64 on the CPU."""

    positions: Tensor
    ends: Tensor
    """Positions below this are seen: position + 1, or the end of a drafter's block."""
    cache_rows: Tensor


class Decoder:
    """Layers of one shape, which must be a multiple of 16 in a head and of 32 in every matrix's inputs."""

    def __init__(
        self, layers: Sequence[LayerWeights], norm: Tensor, eps: float, heads: tuple[int, int], head_size: int
    ) -> None:
        """``heads``: of queries and of keys. Query head h attends to key head h modulo their count."""
        self._layers, self._norm, self._heads, self._size = list(layers), norm, heads, head_size
        self._eps = np.array([eps], np.float32)
        self._table = np.zeros((len(self._layers), job_words.LAYER_WORDS), np.int64)
        """What stays the same from call to call; every call fills up a copy."""
        for line, layer in zip(self._table, self._layers, strict=True):
            qk_norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            matrices = (layer.qkv.record, layer.o.record, layer.gate_up.record, layer.down.record)
            line[list(_STATIC)] = (layer.input_norm.data_ptr(), layer.post_norm.data_ptr(), qk_norm, *matrices)
        self._hidden = norm.shape[0]
        self._inner = layers[0].down.inputs
        assert len(self._layers) * stack.PHASES_A_LAYER <= MOST_COUNTERS

    def run(
        self, x: Tensor, rows: Rows, caches: Sequence[LayerCache], rope: Tensor, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, d] float32, consumed -> hidden [N, d] float32 after the norm, and the outputs of the layers ``taps``
        [N, len(taps), d] float32.

        rope [P, D] float32, cosine and sine of each pair side by side, holds every position.
        """
        count, threads = x.shape[0], torch.get_num_threads()
        assert x.is_contiguous() and rope.is_contiguous() and x.dtype == rope.dtype == torch.float32
        assert all(cache.data.dtype in (torch.bfloat16, torch.float32) for cache in caches)
        assert all(t.is_contiguous() for t in (rows.positions, rows.ends, rows.cache_rows))
        heads, key_heads = self._heads
        features = torch.empty((count, len(taps), self._hidden)) if taps else None
        out = torch.empty_like(x)
        qkv = torch.empty((count, self._layers[0].qkv.width))
        mixed = torch.empty((count, heads * self._size))
        act = torch.empty((count, self._inner))
        longest = max(self._hidden, self._inner, heads * self._size)
        context = 4 * (-(-int(rows.ends.max()) // 16) * 16)
        scratch_bytes = (
            SCRATCH_BYTES + SCORE_ROWS * context + count * (4 * self._hidden + -(-longest // GROUP) * GROUP_ROW_BYTES)
        )
        scratch_bytes += -scratch_bytes % 64
        scratch = torch.empty((threads, scratch_bytes), dtype=torch.uint8)
        table = self._table.copy()
        _place(table, caches, taps)
        job = np.zeros(job_words.CONTEXT_BYTES + 1, np.int64)
        job[:] = (
            count,
            self._hidden,
            heads,
            key_heads,
            self._size,
            self._inner,
            len(self._layers),
            table.ctypes.data,
            x.data_ptr(),
            rows.positions.data_ptr(),
            rows.ends.data_ptr(),
            rows.cache_rows.data_ptr(),
            rope.data_ptr(),
            0 if features is None else features.data_ptr(),
            len(taps),
            out.data_ptr(),
            self._norm.data_ptr(),
            self._eps.ctypes.data,
            caches[0].data.dtype == torch.bfloat16,
            qkv.data_ptr(),
            4 * qkv.shape[1],
            mixed.data_ptr(),
            act.data_ptr(),
            scratch.data_ptr(),
            scratch_bytes,
            context,
        )
        team(threads).run(STACK, job)
        return out, features


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
