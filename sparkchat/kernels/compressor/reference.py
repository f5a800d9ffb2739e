"""Compressed entries in torch: all rows kept, then one entry after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.latent_attention.reference import LATENT_BLOCK, normed, rounded_e4m3, turned
from sparkchat.kernels.norm.reference import sum_of_parts

if TYPE_CHECKING:
    from sparkchat.kernels.compressor import Pool, PoolShape

INDEX_BLOCK = 32
"""Dimensions of an index key that share a scale."""


def rounded_e2m1(x: Tensor, block: int) -> Tensor:
    """x [..., n], ``block`` dividing n, rounded to 4 bit floats under scales that are powers of two."""
    blocks = x.float().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=6.0 * 2.0**-126)
    mantissa, exponent = torch.frexp(amax / 6.0)
    scale = torch.ldexp(torch.ones_like(amax), torch.where(mantissa == 0.5, exponent - 1, exponent))
    # 0, .5, 1, 1.5, 2, 3, 4, 6: made on the device, as nothing may be asked of the host.
    code = torch.arange(8, device=x.device)
    levels = torch.where(code < 2, 0.5 * code, torch.ldexp(1.0 + 0.5 * (code % 2), code // 2 - 1))
    size = (blocks / scale).abs()
    above = torch.bucketize(size, levels).clamp(max=7)
    below = (above - 1).clamp(min=0)
    middle = (levels[below] + levels[above]) / 2
    # Halves go to the even code.
    is_above = (size > middle) | ((size == middle) & (above % 2 == 0))
    nearest = torch.where(is_above, levels[above], levels[below])
    return (torch.where(blocks < 0, -nearest, nearest) * scale).flatten(-2).to(x.dtype)


def finished(pooled: Tensor, pool: Pool, rope: Tensor, first: Tensor, shape: PoolShape) -> Tensor:
    """pooled [1, c], first [1] the position of an entry's first token -> the entry as it is kept."""
    dtype = pool.entries.dtype
    x = turned(normed(pooled.to(dtype), pool.norm, shape.eps), rope, first)
    if pool.is_index:
        return x if pool.rotation is None else rounded_e2m1(x @ pool.rotation, min(INDEX_BLOCK, x.shape[-1]))
    x = x.to(dtype)
    if pool.has_roundings:
        plain = x.shape[-1] - shape.rope_dim
        x[..., :plain] = rounded_e4m3(x[..., :plain], LATENT_BLOCK if plain % LATENT_BLOCK == 0 else plain)
    return x


def compress_rows_reference(
    pool: Pool, positions: Tensor, rows: Tensor, starts: Tensor, rope: Tensor, shape: PoolShape
) -> None:
    """See ``compress_rows``."""
    count, ratio, width = int(starts[-1]), shape.ratio, pool.norm.shape[0]
    positions, rows = positions[:count].long(), rows[:count].long()
    scores = sum_of_parts(pool.scores)[:count] + pool.bias[positions % ratio]
    kept = torch.cat([sum_of_parts(pool.kv)[:count], scores], dim=-1)
    ring = pool.raw.shape[1]
    pool.raw[rows, positions % ring] = kept
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        if (position + 1) % ratio:
            continue
        entry = position // ratio
        tokens = torch.arange((entry - shape.overlaps) * ratio, position + 1, device=positions.device)
        kv, scores = pool.raw[row, tokens % ring].chunk(2, dim=-1)
        if shape.overlaps:
            kv, scores = (torch.cat([x[:ratio, :width], x[ratio:, width:]]) for x in (kv, scores))
        is_there = (tokens >= 0)[:, None]
        weights = scores.masked_fill(~is_there, float("-inf")).softmax(dim=0)
        pooled = (weights * kv.masked_fill(~is_there, 0.0)).sum(dim=0, keepdim=True)
        made = finished(pooled, pool, rope, tokens[-ratio:][:1], shape)
        pool.entries[row, pool.first_slot + entry] = made[0].to(pool.entries.dtype)
