"""Decode attention in torch, one request after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sparkchat.kernels.rope.reference import locate


def decode_attention_reference(
    q: Tensor,
    cache: Tensor,
    starts: Tensor,
    rows: Tensor,
    positions: Tensor,
    ends: Tensor,
    out: Tensor,
    window: int | None,
    pages: Tensor | None,
) -> None:
    """See ``decode_attention``. Computes in float32 whatever the cache holds."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = cache.shape[1] // 2
    bounds = starts.tolist()
    for first, stop in pairwise(bounds):
        if stop <= first:
            continue
        end = int(ends[first:stop].max())
        keys_at = torch.arange(end, device=q.device)
        page, slot = locate(rows[first].long().expand(end), keys_at, cache.shape[2], pages)
        stored = cache[page, :, slot].float()  # [T, 2K, D]
        at = positions[first:stop, None]
        visible = keys_at < ends[first:stop, None]
        if window is not None:
            visible = visible & (keys_at > at - window)
        keys, values = stored.transpose(0, 1).split(kv_heads)
        queries = q[first:stop].float().view(stop - first, heads // kv_heads, kv_heads, dim)
        scores = torch.einsum("ngkd,ktd->ngkt", queries, keys) * dim**-0.5
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(dim=-1)
        values = values.nan_to_num() if not bool(visible.all()) else values
        mixed = torch.einsum("ngkt,ktd->ngkd", weights, values)
        out[first:stop] = mixed.reshape(stop - first, heads, dim).to(out.dtype)
