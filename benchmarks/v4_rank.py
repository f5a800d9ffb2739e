"""One rank of several by itself, for benchmarks/v4_decode.py on fewer GPUs than a model is shared by.

It holds its part of the weights and does all that a rank does but wait for the others: where their parts are added, its
own stands in for each. So times lack the meetings of the ranks, and numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from sparkchat.engine import loading
from sparkchat.kernels.experts import add_parts
from sparkchat.kernels.ranks import Meeting
from sparkchat.kernels.ranks.exchange import Exchange
from sparkchat.models.deepseek_v4.loading import load_trunk

ROOM_BYTES = 4 << 20


class LoneRank:
    """Rank 0 of a group whose other ranks are not there."""

    name = "lone rank"
    rank = 0

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._turn = size, 0
        self._slots = torch.empty((2, ROOM_BYTES), dtype=torch.uint8, device=device)
        self._where = [torch.full((size,), slot.data_ptr(), dtype=torch.int64, device=device) for slot in self._slots]

    def sum(self, x: Tensor) -> Tensor:
        return x.clone()

    def join(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > ROOM_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return self._slots[self._turn, :size].view(dtype).view(tuple(shape))

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        mine = self.room(x.shape, x.dtype, x.device)
        self._turn ^= 1
        if mine.data_ptr() != x.data_ptr():
            mine.copy_(x)
        return [mine] * self.size

    def meeting(self, room: Tensor, programs: int) -> Meeting | None:
        return None

    def exchange(self, rows: int, width: int) -> Exchange | None:
        return None

    @property
    def adds_parts(self) -> bool:
        return True

    def parts_of_sum(self, parts: Tensor) -> Sequence[Tensor]:
        mine = self.room(parts.shape[1:], parts.dtype, parts.device)
        add_parts(parts, mine)
        return self.parts(mine)

    def addresses(self, parts: Sequence[Tensor]) -> Tensor:
        at = parts[0].data_ptr()
        for slot, where in zip(self._slots, self._where, strict=True):
            if slot.data_ptr() == at:
                return where
        return torch.full((self.size,), at, dtype=torch.int64, device=parts[0].device)

    def follow_first(self, x: Tensor) -> None:
        pass


@contextmanager
def lone_rank(size: int) -> Iterator[None]:
    """Within the block, engines of one device load rank 0 of ``size``."""

    def load(path, *, device, dtype, is_dummy):  # type: ignore[no-untyped-def]
        return load_trunk(path, device=device, dtype=dtype, group=LoneRank(size, device), is_dummy=is_dummy)

    with mock.patch.object(loading, "load_target", load):
        yield
