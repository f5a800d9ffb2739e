"""Compressed entries: every row keeps what entries are made of, and makes the one that its token closes.

Shapes: N rows, c width of an entry, h = 2 where entries overlap (every token has a half for the entry after its own and
one for its own) and 1 where not, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkchat.kernels.compressor.reference import compress_rows_reference
from sparkchat.kernels.latent_attention import LatentRows, write_latents


@dataclass(frozen=True)
class Pool:
    """One compressor of a layer, and where what it makes is kept."""

    kv: Tensor
    """[N, h*c] as projected, or partial sums [P, N, h*c] float32"""
    scores: Tensor
    """[N, h*c], or partial sums, laid out as ``kv``"""
    bias: Tensor
    """[ratio, h*c] float32, added to the scores of a token by its place in its entry"""
    norm: Tensor
    """[c] float32"""
    raw: Tensor
    """[cache rows, ring, 2*h*c] float32: values and biased scores of a position, at it modulo the ring"""
    entries: Tensor
    """[cache rows, slots, c]: where entries are kept"""
    first_slot: int
    """Slot of entry 0"""
    is_index: bool = False
    """Whether entries are index keys, which are rounded to 4 bits, rather than latents."""
    rotation: Tensor | None = None
    """[c, c] float32 that index keys are multiplied by before they are rounded; None: they are not rounded."""
    has_roundings: bool = False
    """Whether latents are rounded as the published model was trained."""


@dataclass(frozen=True)
class PoolShape:
    """What the compressors of a layer have in common."""

    ratio: int
    """Tokens of an entry"""
    overlaps: bool
    rope_dim: int
    eps: float


def compress_rows(
    pools: Sequence[Pool],
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    span_starts: Tensor,
    rope: Tensor,
    shape: PoolShape,
    *,
    written: LatentRows | None = None,
) -> None:
    """Keep every row in the ring, and write the entries whose last tokens are among the rows.

    One or two ``pools``. positions [N] of neighbouring tokens within a request; rows [N] their cache rows; starts [R+1]
    int32, of which the last counts the rows: those behind it are left alone; span_starts [N] the position of the first
    row of each row's request. What an entry is made of is read from the ring where it lies before that position, and
    from the rows themselves from there on, so the order in which rows are done does not matter; the ring must hold all
    tokens of an entry beside the longest span. rope as of ``write_latents``.

    ``written``: what ``write_latents`` would do for all N rows is done in the same launch.
    """
    if not positions.is_cuda:
        if written is not None:
            w = written
            write_latents(
                w.latents, w.latent_norm, positions, rows, rope, w.cache, w.shape,
                low_rank=w.low_rank, low_rank_norm=w.low_rank_norm, out=w.out,
            )  # fmt: skip
        for pool in pools:
            compress_rows_reference(pool, positions, rows, starts, rope, shape)
        return
    from sparkchat.kernels.compressor.kernel import launch_compress_rows

    launch_compress_rows(pools, positions, rows, starts, span_starts, rope, shape, written)
