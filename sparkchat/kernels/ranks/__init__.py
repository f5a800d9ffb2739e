"""A message of this rank laid where all ranks read it, and the meeting behind it, in one launch.

Called for tensors of a GPU only; what it computes is ``mine.copy_(x)`` and a barrier of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 2048
"""Of 4 bytes, that one program lays out."""


_LEAST_SUM = 512


@dataclass(frozen=True)
class Meeting:
    """For a kernel that writes what other ranks read, and ends when all of them have written theirs (kernel.meet)."""

    pads: Tensor
    """[ranks] int64: the addresses of all ranks' counts"""
    rank: int


def num_pads(most_bytes: int, ranks: int) -> int:
    """Counts (int32) that every rank keeps for messages of up to ``most_bytes``: zero before the first of them."""
    return most_programs(most_bytes) * ranks


def most_programs(most_bytes: int) -> int:
    """Programs that may meet, of one launch."""
    return -(-most_bytes // (4 * WORDS))


def sum_block(count: int) -> int:
    """Numbers that one program adds up, of ``count``."""
    return _LEAST_SUM if count <= 128 * _LEAST_SUM else WORDS


def publish(x: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """Copy x to ``mine``, which other ranks read, and end when all ranks have done so with theirs.

    x and mine contiguous, of equal size, a multiple of 4 bytes; they may be the same memory. pads [ranks] int64: the
    addresses of all ranks' counts (``num_pads``). All ranks publish messages of the same sizes in the same order.
    Raises ValueError for other sizes.
    """
    if x.nbytes != mine.nbytes or x.nbytes % 4 or not (x.is_contiguous() and mine.is_contiguous()):
        raise ValueError(f"a message of {x.nbytes} bytes cannot be laid in {mine.nbytes}; sizes are multiples of 4")
    from sparkchat.kernels.ranks.kernel import launch_publish

    launch_publish(_words(x), _words(mine), pads, rank)


def publish_sum(parts: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """As ``publish`` of the sum of ``parts`` [P, ...] float32, added in order; mine [...] float32."""
    is_flat = parts.dtype == mine.dtype == torch.float32 and parts.is_contiguous() and mine.is_contiguous()
    if not is_flat or parts.shape[1:] != mine.shape:
        raise ValueError(f"parts {tuple(parts.shape)} of {parts.dtype} cannot be added into {tuple(mine.shape)}")
    from sparkchat.kernels.ranks.kernel import launch_publish_sum

    launch_publish_sum(parts.flatten(1), mine.flatten(), pads, rank)


def _words(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.int32)
