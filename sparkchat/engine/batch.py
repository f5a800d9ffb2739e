"""From requests to packed rows: the one place where a ForwardBatch is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkchat.models.base import ForwardBatch


def pack_rows(
    token_runs: Sequence[Sequence[int]],
    first_positions: Sequence[int],
    cache_rows: Sequence[int],
    device: torch.device,
) -> ForwardBatch:
    """Lay runs of consecutive tokens side by side.

    token_runs[r] holds the tokens of request r at positions first_positions[r], +1, ...; requests
    with different run lengths sit next to each other without padding.
    """
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for run, first in zip(token_runs, first_positions, strict=True):
        ids.extend(run)
        positions.extend(range(first, first + len(run)))
        starts.append(len(ids))
    packed = torch.tensor([ids, positions], dtype=torch.int64).to(device)
    return ForwardBatch(packed[0], packed[1], tuple(cache_rows), tuple(starts))
