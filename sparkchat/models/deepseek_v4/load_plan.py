"""What a checkpoint asks of each GPU, from its headers alone: nothing of the data is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.deepseek_v4.formats import FP4_BLOCK, FP8_BLOCK, num_bytes, scale_blocks
from sparkchat.models.deepseek_v4.headers import Headers
from sparkchat.models.deepseek_v4.layout import Layout, TensorSpec, trunk_layout
from sparkchat.models.deepseek_v4.weights import (
    DRAFTER_PREFIX,
    check_headers,
    check_ranks,
    drafter_layout,
    split_axis,
    stored_form,
)

RANK_COUNTS = (1, 2, 4, 8)
WORKING_BYTES = 4 << 30
"""Beside weights and caches: activations, kernels, communication buffers, the room that weights are expanded in
(kernels/fp8/plan.py: 0.13 GB), the CUDA context. An estimate."""


@dataclass(frozen=True)
class LoadPlan:
    """Bytes of the weights, as they are stored."""

    num_ranks: int
    num_tensors: int
    total_bytes: int
    """Of all tensors in the files."""
    drafter_bytes: int
    """Of these, under ``mtp.*``."""
    rank_bytes: int
    """On the fullest rank."""
    replicated_bytes: int
    """Of these, what every rank holds as well."""

    def memory_need(self, config: DeepseekV4Config, context: int, num_requests: int = 1) -> int:
        """Bytes on each GPU with the caches of ``num_requests`` requests of ``context`` positions."""
        return self.rank_bytes + num_requests * cache_bytes(config, context) + WORKING_BYTES


def plan_load(headers: Headers, config: DeepseekV4Config, num_ranks: int) -> LoadPlan:
    """Raises DamagedFile where the headers are not those of the config, UsageError where it cannot be shared so."""
    return plan_all(headers, config, (num_ranks,))[0]


def plan_all(headers: Headers, config: DeepseekV4Config, counts: Sequence[int] = RANK_COUNTS) -> tuple[LoadPlan, ...]:
    """As ``plan_load``, for several numbers of GPUs."""
    for num_ranks in counts:
        check_ranks(config, num_ranks)
    check_headers(headers, config, with_drafter=False)
    layout = trunk_layout(config) | drafter_layout(config)
    kinds = Counter((split_axis(name), spec) for name, spec in layout.items() if name in headers.tensors)
    whole = {kind: count for kind, count in kinds.items() if kind[0] is None}
    drafter = sum(tensor.num_bytes for name, tensor in headers.tensors.items() if name.startswith(DRAFTER_PREFIX))
    return tuple(
        LoadPlan(
            num_ranks=num_ranks,
            num_tensors=len(headers.tensors),
            total_bytes=headers.num_bytes,
            drafter_bytes=drafter,
            rank_bytes=max(_rank_bytes(kinds, rank, num_ranks) for rank in range(num_ranks)),
            replicated_bytes=_rank_bytes(whole, 0, 1),
        )
        for num_ranks in counts
    )


def _rank_bytes(kinds: Mapping[tuple[int | None, TensorSpec], int], rank: int, num_ranks: int) -> int:
    """Stored bytes of a rank's part of tensors counted by how they are shared and what they are."""
    return sum(count * _part_bytes(axis, spec, rank, num_ranks) for (axis, spec), count in kinds.items())


def _part_bytes(axis: int | None, spec: TensorSpec, rank: int, num_ranks: int) -> int:
    """Bytes of a rank's part of one tensor, scales included."""
    block = FP4_BLOCK if spec.storage == "fp4" else FP8_BLOCK
    shape = list(spec.shape)
    if axis is not None and num_ranks > 1:
        shape[axis] //= num_ranks
        block = scale_blocks(block, axis, rank * shape[axis], (rank + 1) * shape[axis])
    (_, dtype, stored), *scales = stored_form({"weight": TensorSpec(tuple(shape), spec.storage)})
    total = num_bytes(dtype, stored)
    return total + math.prod(-(-size // step) for size, step in zip(shape, block, strict=True)) if scales else total


def unpacked_bytes(layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of all tensors with codes unpacked to ``dtype``, tables of ids as int64 and the rest as float32."""
    sizes = {"fp4": dtype.itemsize, "fp8": dtype.itemsize, "i64": 8}
    return sum(sizes.get(spec.storage, 4) * math.prod(spec.shape) for spec in layout.values())


def packed_bytes(layout: Layout, rank: int = 0, num_ranks: int = 1) -> int:
    """Bytes of a rank's part of all tensors of a layout, as they are stored."""
    kinds = Counter((split_axis(name), spec) for name, spec in layout.items())
    return _rank_bytes(kinds, rank, num_ranks)


def cache_bytes(config: DeepseekV4Config, context: int) -> int:
    """Cache of one request at its longest, the drafter's included: rings, compressed entries, compressor inputs.

    Every rank holds it whole: there is one latent key head.
    """
    item = config.kv_dtype.itemsize
    num_rings = config.num_layers + len(config.drafter_ratios)
    rings = num_rings * config.window * config.head_dim * item
    partial = 0
    for ratio in config.compress_ratios:
        if ratio == WINDOW_ONLY:
            continue
        width = config.head_dim + (config.index_head_dim if ratio == SPARSE_RATIO else 0)
        # Key and gate of every position of the open window, and of the one before where entries overlap; fp32.
        partial += 2 * 4 * ratio * width * (4 if ratio == SPARSE_RATIO else 1)
    return rings + partial + config.kv_bytes_per_token * context
