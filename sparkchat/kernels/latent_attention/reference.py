"""Attention over latents in torch, one row after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.norm.reference import sum_of_parts

if TYPE_CHECKING:
    from sparkchat.kernels.latent_attention import LatentShape

LATENT_BLOCK = 64
"""Dimensions that share a scale where latents are rounded."""


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., n] -> float32 of length sqrt(n), times the weight [n]."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def turned(x: Tensor, rope: Tensor, positions: Tensor, is_back: bool = False) -> Tensor:
    """x [n, ..., c], rope [positions, p], positions [n] -> x with its last p dimensions turned, float32."""
    size = rope.shape[1]
    turns = torch.view_as_complex(rope[positions.long()].unflatten(-1, (-1, 2)))
    turns = turns.view(len(x), *[1] * (x.dim() - 2), -1)
    plain, pairs = x.float().split([x.shape[-1] - size, size], dim=-1)
    pairs = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
    pairs = pairs * (turns.conj() if is_back else turns)
    return torch.cat([plain, torch.view_as_real(pairs).flatten(-2)], dim=-1)


def rounded_e4m3(x: Tensor, block: int) -> Tensor:
    """x [..., n], ``block`` dividing n, rounded to 8 bit floats under scales that are powers of two."""
    blocks = x.float().unflatten(-1, (-1, block))
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / 448.0)
    scale = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return ((blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def kept_latents(x: Tensor, rope: Tensor, positions: Tensor, shape: LatentShape, dtype: torch.dtype) -> Tensor:
    """x [n, c] normed latents -> as they are kept: turned, and the other dimensions rounded where that is on."""
    x = turned(x.to(dtype), rope, positions).to(dtype)
    if shape.has_roundings:
        plain = x.shape[-1] - shape.rope_dim
        block = LATENT_BLOCK if plain % LATENT_BLOCK == 0 else plain
        x[..., :plain] = rounded_e4m3(x[..., :plain], block)
    return x


def write_latents_reference(
    latents: Tensor,
    latent_norm: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    shape: LatentShape,
    low_rank: Tensor | None,
    low_rank_norm: Tensor | None,
    out: Tensor | None,
) -> None:
    """See ``write_latents``."""
    x = normed(sum_of_parts(latents), latent_norm, shape.eps)
    slots = shape.first_slot + positions.long() % shape.ring
    cache[rows.long(), slots] = kept_latents(x, rope, positions, shape, cache.dtype)
    if low_rank is not None:
        assert out is not None
        out.copy_(normed(sum_of_parts(low_rank), low_rank_norm, shape.eps))


def latent_attention_reference(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    out: Tensor,
    shape: LatentShape,
    chosen: Tensor | None,
) -> None:
    """See ``latent_attention``. Computes in float32 whatever the cache holds."""
    count, heads, size = out.shape
    queries = turned(normed(sum_of_parts(q).view(count, heads, size), None, shape.eps), rope, positions)
    queries = queries.to(cache.dtype).float()
    mixed = torch.empty_like(queries)
    for n, (row, position, first, end) in enumerate(
        zip(rows.tolist(), positions.tolist(), first_seen.tolist(), ends.tolist(), strict=True)
    ):
        slots = shape.first_slot + torch.arange(max(0, first), end, device=q.device) % shape.ring
        seen = (position + 1) // shape.ratio if shape.ratio else 0
        entries = torch.arange(seen, device=q.device)
        if shape.topk and seen > shape.topk:
            assert chosen is not None
            entries = chosen[n].long()
        keys = cache[row, torch.cat([slots, shape.first_slot + shape.ring + entries])].float()
        scores = torch.cat([queries[n] @ keys.T * size**-0.5, sinks[:, None]], dim=1)
        mixed[n] = scores.softmax(dim=-1)[:, :-1] @ keys
    out.copy_(turned(mixed, rope, positions, is_back=True))
