"""What layers ask of packed rows beside their positions: which request's they are, where that begins, what is seen.

Shapes: N rows, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.row_places.reference import place_rows_reference


@dataclass(frozen=True)
class RowPlaces:
    """Numbers of N rows, [N] each."""

    token_ids: Tensor
    positions: Tensor
    cache_rows: Tensor
    ends: Tensor
    """Positions below it are seen"""
    span_starts: Tensor
    """Position of the first row of each row's request"""
    first_seen: Tensor
    """First position of a window's ring that a row sees; it may be negative"""


def place_rows(
    token_ids: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    ends: Tensor,
    starts: Tensor,
    *,
    window: int,
    is_block: bool,
    repeats_last: bool,
) -> RowPlaces:
    """token_ids, positions, cache_rows, ends [N] integers, starts [R+1] int32: rows starts[r]:starts[r+1] are request
    r's, rows behind starts[R] nobody's.

    ``is_block``: rows see the window before their request's first, otherwise the window that ends with themselves.
    ``repeats_last``: rows of nobody become copies of the last row of somebody.
    """
    given = tuple(t.contiguous() for t in (token_ids, positions, cache_rows, ends))
    if not positions.is_cuda:
        return RowPlaces(*place_rows_reference(*given, starts, window, is_block, repeats_last))
    from sparkchat.kernels.row_places.kernel import launch_place_rows

    places = RowPlaces(*(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (*given, positions, positions)))
    launch_place_rows(*given, starts, places, window, is_block, repeats_last)
    return places
