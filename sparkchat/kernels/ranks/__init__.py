"""A message of this rank laid where all ranks read it, and the meeting behind it, in one launch.

Called for tensors of a GPU only; what it computes is ``mine.copy_(x)`` and a barrier of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 2048
"""Of 4 bytes, that one program lays out."""


def num_pads(most_bytes: int, ranks: int) -> int:
    """Flags (int32) that every rank keeps for messages of up to ``most_bytes``: zero before the first of them."""
    return -(-most_bytes // (4 * WORDS)) * ranks


def publish(x: Tensor, mine: Tensor, pads: Tensor, rank: int) -> None:
    """Copy x to ``mine``, which other ranks read, and end when all ranks have done so with theirs.

    x and mine contiguous, of equal size, a multiple of 4 bytes; they may be the same memory. pads [ranks] int64: the
    addresses of all ranks' flags (``num_pads``), which are zero again behind this. All ranks publish messages of one
    size in the same order. Raises ValueError for other sizes.
    """
    if x.nbytes != mine.nbytes or x.nbytes % 4 or not (x.is_contiguous() and mine.is_contiguous()):
        raise ValueError(f"a message of {x.nbytes} bytes cannot be laid in {mine.nbytes}; sizes are multiples of 4")
    from sparkchat.kernels.ranks.kernel import launch_publish

    launch_publish(_words(x), _words(mine), pads, rank)


def _words(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.int32)
