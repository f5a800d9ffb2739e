"""Rows' places in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def place_rows_reference(
    token_ids: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    ends: Tensor,
    starts: Tensor,
    window: int,
    is_block: bool,
    repeats_last: bool,
) -> tuple[Tensor, ...]:
    """See ``place_rows``: the fields of ``RowPlaces`` in their order."""
    index = torch.arange(positions.shape[0], dtype=starts.dtype, device=starts.device)
    if repeats_last:
        source = torch.minimum(index, (starts[-1] - 1).clamp(min=0)).long()
        token_ids, positions, cache_rows, ends = (t[source] for t in (token_ids, positions, cache_rows, ends))
    owner = torch.searchsorted(starts, index, right=True).sub_(1).clamp_(max=starts.shape[0] - 2)
    span_starts = positions[starts[owner].long()]
    first_seen = span_starts - window if is_block else positions - (window - 1)
    return token_ids, positions, cache_rows, ends, span_starts, first_seen
