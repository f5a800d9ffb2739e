"""Which compressed entries a row attends to: scores of all that it sees, and the best of them.

Shapes: N rows, R requests, H index heads, c size of an index key, k entries chosen, E entries there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.indexer.reference import choose_entries_reference


@dataclass(frozen=True)
class IndexShape:
    """What is fixed for an indexer."""

    heads: int
    size: int
    """c"""
    rope_dim: int
    ratio: int
    """Positions of an entry"""
    topk: int
    """k"""


def index_scores_of(max_rows: int, context: int, shape: IndexShape, device: torch.device) -> Tensor:
    """Room for the scores of ``max_rows`` rows below position ``context``: [N, E] float32."""
    entries = max(1, context // shape.ratio)
    return torch.empty((max_rows, -(-entries // 64) * 64), dtype=torch.float32, device=device)


def choose_entries(
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
    *,
    context: int,
    most_per_request: int,
    rotation: Tensor | None = None,
) -> None:
    """chosen [N, k] int32: the entries with the highest scores, of equal ones the earliest, in increasing order.

    Row n scores entry w by the sum over heads of relu(q . key) times the head's weight. Rows that see no more than k
    entries look at all of them and are left alone. Rows behind starts[R] are copies of the row before them.

    q [N, H*c] as projected, or partial sums [P, N, H*c] float32: turned here, and where there is a ``rotation``
    [c, c] float32 multiplied by it and rounded to 4 bits. weights [N, H] float32 or half, as projected: the factor that
    does not change the order of scores is left out. keys [cache rows, slots, c]; rows [N]; starts [R+1] int32; scores
    [N, E] float32 to work in; rope as of ``write_latents``. Every row lies below ``context``, and no request has more
    than ``most_per_request`` rows.
    """
    if context // shape.ratio <= shape.topk:
        return
    if not q.is_cuda:
        choose_entries_reference(q, weights, keys, positions, rows, starts, rope, scores, chosen, shape, rotation)
        return
    from sparkchat.kernels.indexer.kernel import launch_choose_entries

    launch_choose_entries(
        q, weights, keys, positions, rows, starts, rope, scores, chosen, shape, context, most_per_request, rotation
    )  # fmt: skip
