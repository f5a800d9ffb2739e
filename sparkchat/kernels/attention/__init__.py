"""Attention of a handful of rows per request over their cached keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.attention.reference import decode_attention_reference

UNIT = 64
"""Keys of the shortest spans. Keys are attended to a span at a time: 64 below position 2048, then 16 spans to every
doubling, so that what a row's sums look like depends on its own position alone."""


def spans_of(context: int) -> int:
    """Spans that ``context`` positions touch."""
    unit = max(context - 1, 0) // UNIT
    doublings = max(unit.bit_length() - 5, 0)
    return 16 * doublings + (unit >> doublings) + 1


@dataclass(frozen=True)
class AttentionWorkspace:
    """What the spans of a row leave for the second pass."""

    mixed: Tensor
    """[N, H, spans, D] float32, not normalised"""
    stats: Tensor
    """[N, H, spans, 2] float32: largest score (base 2), sum of weights"""


def attention_workspace(
    max_rows: int, num_heads: int, head_dim: int, context: int, device: torch.device
) -> AttentionWorkspace:
    """Room for ``max_rows`` token rows that see up to ``context`` positions."""
    spans = spans_of(context)
    return AttentionWorkspace(
        torch.empty((max_rows, num_heads, spans, head_dim), dtype=torch.float32, device=device),
        torch.empty((max_rows, num_heads, spans, 2), dtype=torch.float32, device=device),
    )


def attention_bytes(max_rows: int, num_heads: int, head_dim: int, context: int) -> int:
    """Of ``attention_workspace``."""
    return 4 * max_rows * num_heads * spans_of(context) * (head_dim + 2)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    starts: Tensor,
    rows: Tensor,
    positions: Tensor,
    ends: Tensor,
    out: Tensor,
    workspace: AttentionWorkspace,
    *,
    max_rows: int,
    window: int | None = None,
    pages: Tensor | None = None,
    is_settled: bool = False,
) -> None:
    """out [N, H, D] = attention of q [N, H, D] over the cached positions from max(0, position - window + 1) below end.

    cache [pages, 2K, slots, D] of one layer; starts [R+1] int32; rows [N] int32; positions, ends [N]; at most
    ``max_rows`` rows a request; pages [cache rows, n] int32, None where cache row and page are one, and then a page
    has whole tiles (``UNIT`` does). Rows from starts[R] on are left alone. ``is_settled``: a product lies between what
    wrote starts, rows, positions and ends and this launch (launch.reads_ahead). Raises ValueError where a shape is not
    one the kernel takes.
    """
    if not q.is_cuda:
        decode_attention_reference(q, cache, starts, rows, positions, ends, out, window, pages)
        return
    from sparkchat.kernels.attention.kernel import launch_decode_attention

    launch_decode_attention(
        q, cache, starts, rows, positions, ends, out, workspace, max_rows, window, pages, None, is_settled
    )
