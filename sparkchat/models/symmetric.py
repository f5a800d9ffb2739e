"""Small messages of ranks on GPUs of one host through memory that all of them can read: one launch, one trip.

A message of up to ``ROOM_BYTES`` goes through a piece of symmetric memory (torch's), anything longer through NCCL.
Every rank adds in the order of the ranks, so all get the same bits. Multicast is never used: it needs rights that
containers often lack, and can take the GPUs from others who use them.

Everything here can be captured into a graph. Ranks replay the same graphs in the same order, so the host needs no part
in their meeting: they wait for each other on the device, at barriers.

**When a slot may be written again.** A message lies in one of two slots, in turn, and there is a barrier between its
being written and its being read. Who writes the same slot again has passed the barrier of the message between, at
which all ranks arrive only when they have read the message before. That holds within a captured stage; a stage starts
with ``follow_first``, whose barrier is behind everything that the stage before has read, whichever stage that was.
Outside of graphs each message has a second barrier, before it is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparkchat.kernels.experts import add_parts as add_up
from sparkchat.kernels.ranks import Meeting, most_programs, num_pads, publish, publish_sum
from sparkchat.kernels.ranks.exchange import MOST_ROWS, Exchange, inbox_words, no_turns
from sparkchat.models.kv_cache import round_up
from sparkchat.models.parallel import ProcessGroup, add_parts
from sparkchat.switches import word_of

SWITCH = "SPARKCHAT_SHARED_SUMS"
"""In the environment: 0 leaves all messages to NCCL, torch takes barriers of torch's, a launch each; with 1, push or
nothing ranks meet at the end of the kernel that writes a message (``kernels.ranks``), and what is read within a kernel
they push to each other (``kernels.ranks.exchange``)."""
ROOM_BYTES = 4 << 20
"""Of a message in a slot: the logits of a verified block, or rows of several requests."""
INBOX_BYTES = 4 << 20
"""Of the rows that one of two ranks of DeepSeek-V4-Flash pushes into another's memory, two turns of them: 3 MB."""
MOST_ONE_SHOT = 1 << 20
"""A longer sum is faster by NCCL, which does not send every part to every rank."""
_MESSAGE_SLOTS = 2
_FIRST_SLOT = _MESSAGE_SLOTS
"""What ``follow_first`` sends has a slot of its own."""


class Handle(Protocol):
    """One rank's end of memory that all ranks can read, as of torch.distributed._symmetric_memory.rendezvous."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """The memory of a rank; ``storage_offset`` in elements."""
        ...

    def barrier(self, channel: int = 0) -> None:
        """What is behind it on this rank's stream runs when all ranks have come to it."""
        ...


class SymmetricGroup(ProcessGroup):
    """A ``ProcessGroup`` whose small messages go through symmetric memory."""

    name = "symmetric"

    def __init__(
        self, handle: Handle, one_shot: Any = None, pads: Tensor | None = None, inboxes: Tensor | None = None
    ) -> None:
        """``one_shot``: x -> the sum, over memory of its own; None to add parts by hand.

        ``pads``: the addresses of all ranks' flags, with which messages are laid out by ``kernels.ranks``;
        ``inboxes``: those of memory of INBOX_BYTES, zero at first, that kernels push rows into.
        """
        super().__init__()
        self._handle, self._one_shot, self._pads, self._turn = handle, one_shot, pads, 0
        self._exchange = None if inboxes is None else Exchange(inboxes, no_turns(inboxes.device), self.rank)
        self._width: int | None = None
        """Of the rows that are exchanged: of one model, so that a word's place is always that of the same number."""
        self._has_met = False
        """Whether the kernel that writes the next message ends when all ranks have written theirs."""
        self._addresses = self._find_addresses()

    def sum(self, x: Tensor) -> Tensor:
        if x.nbytes > MOST_ONE_SHOT:
            return super().sum(x)
        if self._one_shot is None:
            return add_parts(self.parts(x))
        return self._one_shot(x.contiguous())

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        if x.nbytes > ROOM_BYTES:
            return super().parts(x)
        slot, self._turn = self._turn, (self._turn + 1) % _MESSAGE_SLOTS
        mine = self._room(self.rank, slot, x)
        is_there = x.data_ptr() == mine.data_ptr()
        has_met, self._has_met = self._has_met, False
        if has_met:
            return [self._room(rank, slot, x) for rank in range(self.size)]
        if not is_there:
            self._wait_outside_graphs(x)
        if self._pads is not None and x.nbytes % 4 == 0:
            publish(x.contiguous(), mine, self._pads, self.rank)
            return [self._room(rank, slot, x) for rank in range(self.size)]
        if not is_there:
            mine.copy_(x)
        self._handle.barrier()
        return [self._room(rank, slot, x) for rank in range(self.size)]

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if torch.Size(shape).numel() * dtype.itemsize > ROOM_BYTES:
            return super().room(shape, dtype, device)
        mine = self._slot(self.rank, self._turn, shape, dtype)
        self._wait_outside_graphs(mine)
        return mine

    def meeting(self, room: Tensor, programs: int) -> Meeting | None:
        if self._pads is None or room.nbytes > ROOM_BYTES or programs > most_programs(ROOM_BYTES):
            return None
        self._has_met = True
        return Meeting(self._pads, self.rank)

    def exchange(self, rows: int, width: int) -> Exchange | None:
        if self._exchange is None or rows > MOST_ROWS or 8 * inbox_words(self.size, width) > INBOX_BYTES:
            return None
        self._width = self._width or width
        return self._exchange if self._width == width else None

    @property
    def adds_parts(self) -> bool:
        return self._pads is not None

    def parts_of_sum(self, parts: Tensor) -> Sequence[Tensor]:
        mine = self.room(parts.shape[1:], parts.dtype, parts.device)
        if mine.nbytes > ROOM_BYTES or self._pads is None:
            add_up(parts, mine)
        else:
            publish_sum(parts, mine, self._pads, self.rank)
            self._has_met = True
        return self.parts(mine)

    def addresses(self, parts: Sequence[Tensor]) -> Tensor:
        found = self._addresses.get(parts[0].data_ptr())
        return super().addresses(parts) if found is None else found

    def _find_addresses(self) -> dict[int, Tensor]:
        """By that of rank 0: where the slots of messages lie on every rank."""
        found = {}
        for slot in range(_MESSAGE_SLOTS):
            rooms = [self._handle.get_buffer(rank, (1,), torch.uint8, slot * ROOM_BYTES) for rank in range(self.size)]
            where = torch.tensor([room.data_ptr() for room in rooms], dtype=torch.int64)
            found[rooms[0].data_ptr()] = where.to(rooms[self.rank].device)
        return found

    def follow_first(self, x: Tensor) -> None:
        if x.nbytes > ROOM_BYTES:
            super().follow_first(x)
            return
        self._wait_outside_graphs(x)
        if self.rank == 0:
            self._room(0, _FIRST_SLOT, x).copy_(x)
        self._handle.barrier()
        if self.rank:
            x.copy_(self._room(0, _FIRST_SLOT, x))

    def _room(self, rank: int, slot: int, like: Tensor) -> Tensor:
        return self._slot(rank, slot, like.shape, like.dtype)

    def _slot(self, rank: int, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(rank, tuple(shape), dtype, slot * ROOM_BYTES // dtype.itemsize)

    def _wait_outside_graphs(self, x: Tensor) -> None:
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._handle.barrier()


def open_group(device: torch.device) -> ProcessGroup:
    """The group of the ranks that torch.distributed was started with; all of them call this.

    On GPUs that cannot read each other's memory, it is NCCL's alone.
    """
    if device.type == "cpu" or dist.get_world_size() == 1:
        return ProcessGroup()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    way = word_of(SWITCH)
    if way == "0" or not _all_reach_each_other(device):
        return ProcessGroup()
    import torch.distributed._symmetric_memory as symmetric

    world = dist.group.WORLD
    assert world is not None
    size, flags_at = dist.get_world_size(), (_MESSAGE_SLOTS + 1) * ROOM_BYTES
    inbox_at = round_up(flags_at + 4 * num_pads(ROOM_BYTES, size), 256)
    memory = symmetric.empty(inbox_at + INBOX_BYTES, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, world.group_name)
    pads, inboxes = (
        torch.tensor(
            [handle.get_buffer(rank, (1,), torch.uint8, at).data_ptr() for rank in range(size)],
            dtype=torch.int64,
            device=device,
        )
        for at in (flags_at, inbox_at)
    )
    # The operation writes its memory before it first waits, so that must be no slot that somebody may still read.
    sums = symmetric.empty(MOST_ONE_SHOT, dtype=torch.uint8, device=device)
    symmetric.rendezvous(sums, world.group_name)

    def one_shot(x: Tensor) -> Tensor:
        room = sums[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(room, x, "sum", world.group_name)

    group = SymmetricGroup(handle, one_shot, *((None, None) if way == "torch" else (pads, inboxes)))
    # The first use on every rank, before any graph: what it sets up must not be captured. NCCL's barrier first: flags
    # that a rank has not yet lowered for the first time must not be raised.
    dist.barrier()
    group.sum(torch.ones(8, device=device))
    return group


def _all_reach_each_other(device: torch.device) -> bool:
    """Whether every rank's GPU can read those of all others: all ranks find the same."""
    first = (device.index or 0) - dist.get_rank()
    others = [first + rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    is_near = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    found = torch.tensor([is_near], dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found.item())
