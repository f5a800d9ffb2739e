"""Rows that ranks add up within the kernel that reads the sum: each pushes its own into the memory of all others.

Every number lies beside the number of its turn in one word of 8 bytes, so that whoever waits for it needs no flag.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_ROWS = 24
"""Of a message; of more, parts are laid out and read (``publish_sum``)."""
MOST_PROGRAMS = 128
_SLOTS = 2


@dataclass(frozen=True)
class Exchange:
    """Where a kernel pushes rows to, and finds those of others.

    A row has two places in turn. A rank comes to its next turn when it has read the others' words of the last one, so
    whoever pushes a word of the turn after next has been told by a word of the next that its place is read.
    """

    inboxes: Tensor
    """[ranks] int64: the addresses of all ranks' inboxes, each [2, ranks, MOST_ROWS, width] int64"""
    turns: Tensor
    """[MOST_ROWS, MOST_PROGRAMS] int32: how often each program of a row has met by now, zero at first"""
    rank: int

    @property
    def ranks(self) -> int:
        return self.inboxes.shape[0]


@dataclass(frozen=True)
class Sent:
    """An output whose sum over the ranks is made where it is read."""

    parts: Tensor
    """[N, d], or partial sums [P, N, d], of this rank: added in float32, in order"""
    exchange: Exchange


def inbox_words(ranks: int, width: int) -> int:
    """Words of 8 bytes of a rank's inbox."""
    return _SLOTS * ranks * MOST_ROWS * width


def no_turns(device: torch.device) -> Tensor:
    """``turns`` before the first of them."""
    return torch.zeros((MOST_ROWS, MOST_PROGRAMS), dtype=torch.int32, device=device)
