"""Split, normalise, rotate, store: in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.norm.reference import sum_of_parts


def write_qkv_reference(
    qkv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    q: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    pages: Tensor | None,
) -> None:
    """See ``write_qkv``."""
    num_rows, num_heads, dim = q.shape
    num_kv = cache.shape[1] // 2
    heads = sum_of_parts(qkv).view(num_rows, -1, dim).clone()
    turned = heads[:, : num_heads + num_kv]
    if qk_norm is not None:
        turned.mul_(torch.rsqrt(turned.square().mean(dim=-1, keepdim=True) + eps)).mul_(qk_norm)
    pairs = torch.view_as_complex(turned.reshape(num_rows, -1, dim // 2, 2))
    rotation = torch.view_as_complex(rope[positions.long()].view(num_rows, 1, dim // 2, 2))
    turned.copy_(torch.view_as_real(pairs * rotation).flatten(2))
    q.copy_(heads[:, :num_heads])
    stored = rows >= 0
    page, slot = locate(rows[stored].long(), positions[stored].long(), cache.shape[2], pages)
    cache[page, :, slot] = heads[stored][:, num_heads:].to(cache.dtype)


def write_context_reference(
    kv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    k_norm: Tensor | None,
    eps: float,
    pages: Tensor | None = None,
) -> None:
    """See ``write_context``."""
    layers, dim = cache.shape[0], cache.shape[-1]
    nothing = torch.empty((positions.shape[0], 0, dim), device=kv.device)
    for layer, part in enumerate(sum_of_parts(kv).chunk(layers, dim=1)):
        norm = None if k_norm is None else k_norm[layer]
        write_qkv_reference(part, positions, rows, rope, cache[layer], nothing, norm, eps, pages)


def locate(rows: Tensor, positions: Tensor, page_size: int, pages: Tensor | None) -> tuple[Tensor, Tensor]:
    """Page and slot in it of every position of a cache row."""
    if pages is None:
        return rows, positions % page_size
    return pages[rows, positions // page_size].long(), positions % page_size
