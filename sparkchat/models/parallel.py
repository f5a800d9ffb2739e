"""What the ranks of a tensor-parallel group say to each other: one process a rank, all of one node.

Every rank gets the same bits from the same call, and the bits of a row do not depend on the rows beside it: parts are
gathered whole and added in the order of the ranks. (A ring that adds chunk by chunk gives neither at every size.) The
messages of decode steps are small, so that what counts is the number of trips, which is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparkchat.kernels.experts import add_parts as add_up
from sparkchat.kernels.ranks import Meeting
from sparkchat.kernels.ranks.exchange import Exchange


class Group(Protocol):
    """One rank's end. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Added over the ranks in float32, in x's shape and dtype."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """x [..., n] of every rank, side by side in the order of the ranks -> [..., size * n]"""
        ...

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """x of every rank, in the order of the ranks, for a kernel that adds them itself; as x in shape and dtype.

        They may lie in the memory of other devices, and hold until this rank's next call of the group.
        """
        ...

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to write this rank's next part into, so that ``parts`` has nothing to copy; for that one call."""
        ...

    def meeting(self, room: Tensor, programs: int) -> Meeting | None:
        """For a kernel of so many programs that writes the next part into ``room``, so that ``parts`` has nobody to
        wait for; None where ranks meet otherwise."""
        ...

    def exchange(self, rows: int, width: int) -> Exchange | None:
        """For kernels that add rows over the ranks while they read them; None where that is done otherwise."""
        ...

    @property
    def adds_parts(self) -> bool:
        """Whether ``parts_of_sum`` takes no launch more than ``parts``."""
        ...

    def parts_of_sum(self, parts: Tensor) -> Sequence[Tensor]:
        """As ``parts`` of the sum of this rank's partial sums ``parts`` [P, ...] float32, added in order."""
        ...

    def addresses(self, parts: Sequence[Tensor]) -> Tensor:
        """[size] int64 on the device: where ``parts`` lie. Nothing is copied from the host, so it can be captured."""
        ...

    def follow_first(self, x: Tensor) -> None:
        """Make x, contiguous, what rank 0's is."""
        ...


class _NoSharedMemory:
    """What a group does where ranks read nothing of each other's memory."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def meeting(self, room: Tensor, programs: int) -> Meeting | None:
        return None

    def exchange(self, rows: int, width: int) -> Exchange | None:
        return None

    @property
    def adds_parts(self) -> bool:
        return False

    def parts_of_sum(self, parts: Tensor) -> Sequence[Tensor]:
        mine = self.room(parts.shape[1:], parts.dtype, parts.device)
        add_up(parts, mine)
        return self.parts(mine)

    def addresses(self, parts: Sequence[Tensor]) -> Tensor:
        return even_addresses(parts)

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError


class Alone(_NoSharedMemory):
    """A group of one."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        return x

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        return (x,)

    def follow_first(self, x: Tensor) -> None:
        pass


ALONE = Alone()

# torch 2.13 renamed it.
_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup(_NoSharedMemory):
    """A group over the processes that torch.distributed was started with."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        return add_parts(self.parts(x))

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parts(x)), dim=-1)

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        return self._gather(x).unbind(0)

    def follow_first(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """From rank 0 to all others, which call ``receive``."""
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        return tensor

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        _gather_whole(parts.flatten(0, 1) if x.dim() else parts, x)
        return parts


def add_parts(parts: Sequence[Tensor]) -> Tensor:
    """Added in their order in float32, in their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def even_addresses(parts: Sequence[Tensor]) -> Tensor:
    """[n] int64 on the device: where tensors lie that stand at equal distances in one piece of memory."""
    first = parts[0].data_ptr()
    step = parts[1].data_ptr() - first if len(parts) > 1 else 0
    return torch.arange(len(parts), device=parts[0].device) * step + first
