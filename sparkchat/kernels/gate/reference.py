"""Routing in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.experts.plan import row_tile
from sparkchat.kernels.gate.routing import Routing
from sparkchat.kernels.norm.reference import sum_of_parts

_SOFTPLUS_LINEAR = 20.0


def route_reference(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, scale: float, routing: Routing
) -> None:
    """See ``route``."""
    per_row = routing.weights.shape[1]
    total = sum_of_parts(logits)
    soft = torch.log1p(torch.exp(total.clamp(max=_SOFTPLUS_LINEAR)))
    scores = torch.where(total > _SOFTPLUS_LINEAR, total, soft).sqrt()
    if table is not None:
        assert token_ids is not None
        chosen = table[token_ids.clamp(0, table.shape[0] - 1)]
    else:
        assert bias is not None
        chosen = (scores + bias).argsort(dim=-1, descending=True, stable=True)[:, :per_row]
    chosen = chosen.sort(dim=-1).values
    weights = scores.gather(1, chosen)
    routing.weights.copy_(weights / weights.sum(dim=-1, keepdim=True) * scale)
    routing.chosen.copy_(chosen)
    list_choices(routing)


def list_choices(routing: Routing) -> None:
    """Fill ``lists``, ``counts`` and ``items`` from ``chosen``."""
    tile, items = row_tile(routing.chosen.shape[0]), []
    flat = routing.chosen.flatten()
    for expert in range(routing.lists.shape[0]):
        numbers = (flat == expert).nonzero().flatten()
        routing.lists[expert, : len(numbers)] = numbers
        routing.counts[1 + expert] = len(numbers)
        items += [expert + 65536 * first for first in range(0, len(numbers), tile)]
    routing.counts[0] = len(items)
    routing.items[: len(items)] = torch.tensor(items, dtype=torch.int32)
