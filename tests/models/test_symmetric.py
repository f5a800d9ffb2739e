"""Messages through memory that ranks share: here threads, whose barriers are real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkchat.models.parallel import ALONE, ProcessGroup, add_parts
from sparkchat.models.symmetric import ROOM_BYTES, SymmetricGroup

SLOTS = 3


class Shared:
    """Memory of several ranks in one process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=30)
        self.memories = [torch.zeros(SLOTS * ROOM_BYTES, dtype=torch.uint8) for _ in range(size)]

    def run(self, work: Callable[[SymmetricGroup], Any]) -> list[Any]:
        """What ``work`` returns on each rank."""
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            found[rank] = work(group_of(self, rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class FakeHandle:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        return self._shared.memories[rank].view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int = 0) -> None:
        self._shared.barrier.wait()


def group_of(shared: Shared, rank: int) -> SymmetricGroup:
    group = object.__new__(SymmetricGroup)
    group.rank, group.size = rank, shared.size
    group._handle, group._one_shot, group._pads, group._turn = FakeHandle(shared), None, None, 0
    group._has_met, group._exchange = False, None
    group._addresses = group._find_addresses()
    return group


def part_of(rank: int, number: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(6, 64, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_have_the_same_bits_on_all_ranks_message_after_message(size: int, dtype: torch.dtype) -> None:
    def work(group: SymmetricGroup) -> list[Tensor]:
        return [group.sum(part_of(group.rank, number, dtype)) for number in range(20)]

    for number, sums in enumerate(zip(*Shared(size).run(work), strict=True)):
        wanted = add_parts([part_of(rank, number, dtype) for rank in range(size)])
        assert all(torch.equal(found, wanted) for found in sums)


def test_parts_stand_side_by_side_in_the_order_of_the_ranks() -> None:
    found = Shared(2).run(lambda group: group.join(part_of(group.rank, 1)))
    assert all(torch.equal(x, torch.cat([part_of(0, 1), part_of(1, 1)], dim=-1)) for x in found)


def test_a_part_may_be_written_where_it_is_read() -> None:
    def work(group: SymmetricGroup) -> list[Tensor]:
        found = []
        for number in range(6):
            x = part_of(group.rank, number)
            if number % 3:
                room = group.room(x.shape, x.dtype, x.device)
                x = room.copy_(x)
            found.append(add_parts(group.parts(x)))
        return found

    for number, sums in enumerate(zip(*Shared(3).run(work), strict=True)):
        assert all(torch.equal(found, add_parts([part_of(rank, number) for rank in range(3)])) for found in sums)
    for group in (ALONE, group_of(Shared(2), 1)):
        assert group.room((ROOM_BYTES, 2), torch.int8, torch.device("cpu")).shape == (ROOM_BYTES, 2)


def test_addresses_are_those_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: SymmetricGroup) -> bool:
        found = [group.parts(part_of(group.rank, number)) for number in range(4)]
        return all(group.addresses(parts).tolist() == [part.data_ptr() for part in parts] for parts in found)

    assert all(Shared(3).run(work))
    monkeypatch.setattr(ProcessGroup, "_gather", lambda self, x: torch.stack([x, x]))
    group = group_of(Shared(2), 0)
    for parts in (group.parts(torch.ones(ROOM_BYTES // 4 + 1)), ALONE.parts(torch.ones(2))):
        assert group.addresses(parts).tolist() == [part.data_ptr() for part in parts]


def test_a_part_may_be_a_sum_of_parts() -> None:
    def work(group: SymmetricGroup) -> list[Tensor]:
        parts = [torch.stack([part_of(group.rank, n + k, torch.float32) for k in range(3)]) for n in range(4)]
        return [add_parts(group.parts_of_sum(each)) for each in parts]

    for number, sums in enumerate(zip(*Shared(2).run(work), strict=True)):
        own = [add_parts([part_of(rank, number + k, torch.float32) for k in range(3)]) for rank in range(2)]
        assert all(torch.equal(found, add_parts(own)) for found in sums)


def test_a_message_whose_kernel_has_met_waits_for_nobody() -> None:
    shared = Shared(2)
    group = group_of(shared, 0)
    assert group.meeting(torch.zeros(4), 1) is None and not group.adds_parts
    group._pads = torch.zeros(2, dtype=torch.int64)
    x = torch.ones(4)
    for room, programs in ((torch.zeros(ROOM_BYTES // 4 + 1), 1), (x, 1 << 20)):
        assert group.meeting(room, programs) is None
    meeting = group.meeting(x, 1)
    assert meeting is not None and meeting.rank == 0 and group.adds_parts
    # The other rank is not there: whoever waited would wait for long.
    parts = group.parts(x)
    assert [part.data_ptr() for part in parts] == [memory.data_ptr() for memory in shared.memories]
    assert not group._has_met


def test_a_part_can_be_read_until_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within a graph, where a message has one barrier: the one before is then still whole for who is slow."""
    monkeypatch.setattr(SymmetricGroup, "_wait_outside_graphs", lambda self, x: None)
    may_read = threading.Event()

    def work(group: SymmetricGroup) -> bool:
        first = group.parts(part_of(group.rank, 1))
        if group.rank == 1:
            # Rank 0 has written its next message by now, and waits.
            may_read.wait(30)
            alike = all(torch.equal(first[rank], part_of(rank, 1)) for rank in range(2))
            group.parts(part_of(group.rank, 2))
            return alike
        threading.Timer(0.2, may_read.set).start()
        group.parts(part_of(group.rank, 2))
        return True

    assert all(Shared(2).run(work))


def test_all_follow_the_first() -> None:
    def work(group: SymmetricGroup) -> list[int]:
        found = []
        for number in range(10):
            x = torch.full((5,), 10 * number + group.rank, dtype=torch.int64)
            group.follow_first(x)
            group.sum(torch.zeros(1))
            found += x.tolist()
        return found

    first, *others = Shared(3).run(work)
    assert first == [10 * number for number in range(10) for _ in range(5)]
    assert all(other == first for other in others)


def test_a_longer_message_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroup, "_gather", lambda self, x: torch.stack([x, x]))
    group = group_of(Shared(2), 0)
    long = torch.ones(ROOM_BYTES // 4 + 1)
    assert torch.equal(group.sum(long), 2 * long)
    assert group.join(long).shape[0] == 2 * long.shape[0]


def test_one_rank_has_nobody_to_ask() -> None:
    x = torch.arange(3)
    ALONE.follow_first(x)
    assert ALONE.parts(x)[0] is x and ALONE.sum(x) is x and ALONE.join(x) is x
