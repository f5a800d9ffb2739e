"""Attention over one latent per position, key and value of all heads: over a window in a ring and compressed entries.

Shapes: N rows, H heads, c size of a latent, p of its trailing dimensions rotated in neighbouring pairs, r low rank.
One layer's latents are [cache rows, slots, c]: position n of a request lies in slot ``first_slot + n % ring``, its
entries from slot ``first_slot + ring`` on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.latent_attention.reference import latent_attention_reference, write_latents_reference

SPAN = 64
"""Keys of the shortest spans. A row's window is attended to in at most ``WINDOW_SPANS`` and its entries in at most
``MOST_SPANS`` spans of equal size, which is ``SPAN`` times the least power of two that makes them so few: a row's sums
depend on its own position alone."""
WINDOW_SPANS, MOST_SPANS = 2, 8


@dataclass(frozen=True)
class LatentShape:
    """Where the latents of a layer lie, and what is done with them."""

    first_slot: int
    ring: int
    ratio: int
    """Positions of an entry; 0 where there are none."""
    rope_dim: int
    """p"""
    eps: float
    """Of the norms"""
    topk: int = 0
    """Entries that a row looks at where it may see more, those of ``chosen``; 0: all."""
    has_roundings: bool = False
    """Whether latents are rounded as the published model was trained."""


@dataclass(frozen=True)
class LatentRows:
    """Latents and low ranks of a layer's rows, and where they are kept: see ``write_latents``."""

    latents: Tensor
    latent_norm: Tensor
    cache: Tensor
    shape: LatentShape
    low_rank: Tensor | None = None
    low_rank_norm: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True)
class LatentWorkspace:
    """What the spans of a row leave for the second launch."""

    mixed: Tensor
    """[N, H, spans, c] float32, not normalised"""
    stats: Tensor
    """[N, H, spans, 2] float32: largest score (base 2), sum of weights"""


def latent_spans(shape: LatentShape, context: int, span: int = SPAN) -> int:
    """Spans that a row below position ``context`` may have, the window's own among them."""
    entries = context // shape.ratio if shape.ratio else 0
    if shape.topk:
        entries = min(entries, shape.topk)
    return WINDOW_SPANS + min(MOST_SPANS, -(-entries // span))


def latent_workspace(max_rows: int, num_heads: int, size: int, spans: int, device: torch.device) -> LatentWorkspace:
    """Room for ``max_rows`` rows of ``spans`` (of ``latent_spans``, the most of all layers)."""
    return LatentWorkspace(
        torch.empty((max_rows, num_heads, spans, size), dtype=torch.float32, device=device),
        torch.empty((max_rows, num_heads, spans, 2), dtype=torch.float32, device=device),
    )


def write_latents(
    latents: Tensor,
    latent_norm: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    shape: LatentShape,
    *,
    low_rank: Tensor | None = None,
    low_rank_norm: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Keep the latents of rows in the window's ring, normed, turned, rounded where that is on; norm the low ranks.

    latents [N, c], or partial sums [P, N, c] float32; latent_norm [c] float32; positions [N]; rows [N] the cache row of
    each; rope [positions, p] float32, cosine and sine side by side; cache [cache rows, slots, c] of one layer.
    low_rank [N, r], or partial sums, of which out [N, r] receives the normed rows; low_rank_norm [r] float32.
    """
    if not latents.is_cuda:
        write_latents_reference(
            latents, latent_norm, positions, rows, rope, cache, shape, low_rank, low_rank_norm, out
        )  # fmt: skip
        return
    from sparkchat.kernels.latent_attention.kernel import launch_write_latents

    launch_write_latents(latents, latent_norm, positions, rows, rope, cache, shape, low_rank, low_rank_norm, out)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    out: Tensor,
    workspace: LatentWorkspace,
    shape: LatentShape,
    *,
    context: int,
    chosen: Tensor | None = None,
) -> None:
    """out [N, H, c] = attention of rows over their windows and visible entries, turned back by the rows' positions.

    q [N, H*c], or partial sums [P, N, H*c] float32, as projected: every head is made as long as sqrt(c), and turned.
    A row sees the ring's positions from ``first_seen`` [N] (it may be negative) below ``ends`` [N], and entries whose
    last token is no later than it; where those are more than ``topk``, the ``chosen`` [N, topk] int32 of them. sinks
    [H] float32 take weight and give nothing. Every row lies below ``context``: so many programs are started, and those
    that a row has nothing for end at once.
    """
    if not q.is_cuda:
        latent_attention_reference(
            q, cache, rows, positions, first_seen, ends, rope, sinks, out, shape, chosen
        )  # fmt: skip
        return
    from sparkchat.kernels.latent_attention.kernel import launch_latent_attention

    launch_latent_attention(
        q, cache, rows, positions, first_seen, ends, rope, sinks, out, workspace, shape, context, chosen
    )  # fmt: skip
