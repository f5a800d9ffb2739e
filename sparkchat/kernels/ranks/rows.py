"""Rows of tables that ranks share, looked up and put together without operations of torch between.

Called for tensors of a GPU; on a CPU the same is computed by torch, but for ``look_up``, which meets other ranks.

Shapes: N rows, d width of a row, P ranks, n columns of a rank, S streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.kernels.ranks import Meeting


def look_up(table: Tensor, ids: Tensor, first: int, mine: Tensor, meeting: Meeting) -> None:
    """mine [N, d], which other ranks read, = the rows of ``table`` [held, d] of those ids [N] int64 that lie in it,
    whose first is id ``first``, and zeros for others. Ends when all ranks have written theirs: N programs meet."""
    if not (table.is_contiguous() and mine.is_contiguous() and ids.is_contiguous()) or mine.dtype != table.dtype:
        raise ValueError(f"rows of {tuple(table.shape)} cannot be looked up into {tuple(mine.shape)} {mine.dtype}")
    from sparkchat.kernels.ranks.rows_kernel import launch_look_up

    launch_look_up(table, ids, first, mine, meeting)


def spread_rows(parts: Sequence[Tensor], addresses: Tensor, out: Tensor) -> None:
    """out [N, S, d]: in every stream the sum of parts [N, d], contiguous and alike, that lie at ``addresses`` [P]."""
    if not out.is_cuda:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        out.copy_(total.unsqueeze(1).expand_as(out))
        return
    from sparkchat.kernels.ranks.rows_kernel import launch_spread_rows

    launch_spread_rows(parts, addresses, out)


def join_columns(parts: Sequence[Tensor], addresses: Tensor, out: Tensor) -> None:
    """out [N, P * n] float32: parts [N, n], contiguous and alike, side by side, that lie at ``addresses`` [P]."""
    if not out.is_cuda:
        torch.cat([part.float() for part in parts], dim=-1, out=out)
        return
    from sparkchat.kernels.ranks.rows_kernel import launch_join_columns

    launch_join_columns(parts, addresses, out)
