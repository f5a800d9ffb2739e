"""Scores of entries and the choice among them in torch, one row after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparkchat.kernels.compressor.reference import INDEX_BLOCK, rounded_e2m1
from sparkchat.kernels.latent_attention.reference import turned
from sparkchat.kernels.norm.reference import sum_of_parts

if TYPE_CHECKING:
    from sparkchat.kernels.indexer import IndexShape


def index_queries(q: Tensor, positions: Tensor, rope: Tensor, shape: IndexShape, rotation: Tensor | None) -> Tensor:
    """q [N, H*c], or partial sums -> [N, H, c] float32: turned, and rounded where there is a rotation."""
    queries = turned(sum_of_parts(q).unflatten(-1, (shape.heads, shape.size)), rope, positions)
    if rotation is None:
        return queries
    return rounded_e2m1(queries @ rotation, min(INDEX_BLOCK, shape.size))


def choose_entries_reference(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    rope: Tensor,
    scores: Tensor,
    chosen: Tensor,
    shape: IndexShape,
    rotation: Tensor | None,
) -> None:
    """See ``choose_entries``."""
    queries = index_queries(q, positions, rope, shape, rotation).to(keys.dtype).float()
    total = int(starts[-1])
    for n in range(total):
        seen = (int(positions[n]) + 1) // shape.ratio
        if seen <= shape.topk:
            continue
        held = keys[int(rows[n]), :seen].float()
        scores[n, :seen] = ((queries[n] @ held.T).relu() * weights[n].float()[:, None]).sum(dim=0)
        # A stable order leaves equal scores as they lie.
        order = scores[n, :seen].argsort(descending=True, stable=True)[: shape.topk]
        chosen[n, : shape.topk] = order.sort().values.int()
    chosen[total:] = chosen[max(total - 1, 0)]
