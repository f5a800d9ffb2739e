"""Requests that share the room of one cache: who starts, who waits, who is set aside, and that nothing is lost."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from engine.test_scheduler import names, state
from sparkchat.engine.request import RequestState
from sparkchat.engine.scheduler import Scheduler
from sparkchat.engine.slots import Reach, SlotTable
from sparkchat.models.kv_cache import KVCache
from sparkchat.models.page_table import PAGE_SIZE
from sparkchat.models.paged_cache import PagedCache

PAGES, CONTEXT, BLOCK = 10, 6 * PAGE_SIZE, 4


@pytest.fixture(autouse=True)
def _start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests start where they will soon find no room."""
    monkeypatch.setattr("sparkchat.engine.scheduler.ROOM_TO_RUN", 16)


class Machine:
    """A scheduler over two small caches, and requests that only grow: each writes its own number everywhere."""

    def __init__(self, concurrency: int, pages: int = PAGES, is_paged: bool = True) -> None:
        rows = concurrency + 1
        self.is_paged = is_paged
        self.caches = [self.make_cache(count, rows) for count in (pages, pages + concurrency)]
        self.slots = SlotTable(self.caches[0], self.caches[1])
        self.scheduler = Scheduler(concurrency, self.slots, CONTEXT)

    def make_cache(self, pages: int, rows: int) -> Any:
        sizes = {"max_rows": rows, "context": CONTEXT, "max_span": 64}
        kind = partial(PagedCache, num_pages=pages) if self.is_paged else partial(KVCache, tokens=pages * PAGE_SIZE)
        return kind([None], 1, 2, dtype=torch.float32, device=torch.device("cpu"), **sizes)

    def add(self, name: str, length: int, answer: int = CONTEXT, session: str | None = None) -> RequestState:
        made = state(name, session)
        made.prompt_ids, made.context = (int(name[1:]),) * length, min(CONTEXT - BLOCK - 1, length + answer)
        self.scheduler.add(made)
        return made

    def step(self) -> list[str]:
        """Start, fill, and decode a token or a block; returns who was set aside."""
        begun = self.scheduler.admit()
        self.slots.publish()
        for one in begun:
            self.check(one)
        for one in self.scheduler.filling:
            one.prefilled, one.tokens = len(one.prompt_ids), [*one.prompt_ids, one.prompt_ids[0]]
            self.write(one, len(one.prompt_ids))
        gone = []
        while not self.scheduler.reserve(self.reach):
            oldest = self.scheduler.decoding[0]
            gone.append(self.scheduler.set_aside_last())
            assert gone[-1] is not oldest
        for one in self.scheduler.decoding:
            self.check(one)
            one.tokens += one.prompt_ids[:1] * min(BLOCK, one.context - len(one.tokens))
            self.write(one, one.kv_len)
            if len(one.tokens) == one.context:
                one.finish("length")
        self.scheduler.retire()
        return names(gone)

    def run(self) -> list[str]:
        """To the end of all; returns who was set aside on the way."""
        gone = []
        for _ in range(2000):
            if not self.scheduler.has_work:
                return gone
            gone += self.step()
        raise AssertionError("it never ends")

    @staticmethod
    def reach(one: RequestState) -> Reach:
        return Reach(one.kv_len + BLOCK + 1, one.kv_len + 2 * BLOCK + 1)

    def places(self, one: RequestState, end: int) -> list[tuple[Any, Any, Any]]:
        found = []
        for cache, row in zip(self.caches, (one.slot.row, one.slot.draft.row), strict=True):
            at, slot = cache.stores[0].locate(torch.full((end,), row), torch.arange(end))
            found.append((cache.stores[0].data, at, slot))
        return found

    def write(self, one: RequestState, end: int) -> None:
        for cache, row in zip(self.caches, (one.slot.row, one.slot.draft.row), strict=True):
            cache.reserve(row, end - cache.length(row))
        for data, at, slot in self.places(one, end):
            assert (at > 0).all() or not self.is_paged, "a position without a page"
            data[:, at, :, slot] = float(one.prompt_ids[0])
        for cache, row in zip(self.caches, (one.slot.row, one.slot.draft.row), strict=True):
            cache.advance(row, end)
        one.slot.draft.length = end

    def check(self, one: RequestState) -> None:
        """All that it wrote is there."""
        for data, at, slot in self.places(one, len(one.tokens_in_cache)):
            assert (data[:, at, :, slot] == one.prompt_ids[0]).all()

    def storage(self) -> int:
        """Tokens that the target's storage has room for now."""
        (store,) = self.caches[0].stores
        return store.data.shape[1] * store.data.shape[3]

    def num_free(self) -> list[int]:
        return [cache.table.num_free for cache in self.caches]


@pytest.mark.parametrize("is_paged", [True, False], ids=["pages", "growing"])
def test_nothing_is_lost_in_a_thousand_random_steps(is_paged: bool) -> None:
    generator, machine, waiting, number = random.Random(7), Machine(4, is_paged=is_paged), [], 0
    aside = finished = 0
    for _ in range(1000):
        if generator.random() < 0.2 and len(waiting) < 9:
            number += 1
            session = generator.choice([None, None, "a", "b"])
            length = generator.randint(1, 3 * PAGE_SIZE)
            waiting.append(machine.add(f"r{number}", length, generator.randint(1, 3 * PAGE_SIZE), session))
        if generator.random() < 0.03 and waiting:
            generator.choice(waiting).finish(generator.choice(("cancelled", "error")))
            machine.scheduler.retire()
        aside += len(machine.step())
        finished += sum(one.is_finished for one in waiting)
        waiting = [one for one in waiting if not one.is_finished]
        assert is_paged or machine.storage() <= PAGES * PAGE_SIZE
    assert aside > 20 and finished > 50
    machine.run()
    for name in list(machine.slots._idle):
        machine.slots._free(machine.slots._idle.pop(name))
    assert not machine.slots._open_slots
    assert not is_paged or machine.num_free() == [PAGES, PAGES + 4]


def test_the_oldest_ends_first_and_who_waits_comes_back_in_order() -> None:
    machine = Machine(3, pages=6)
    made = [machine.add(f"r{n}", 30) for n in (1, 2, 3, 4)]
    gone, ended = [], []
    for _ in range(500):
        gone += machine.step()
        ended += [one.id for one in made if one.is_finished and one.id not in ended]
    # The last to start gives way first; nobody starts before those that were set aside.
    assert gone[:2] == ["r3", "r2"] and ended == ["r1", "r2", "r3", "r4"]
    # Each comes back once there is room for a while: no more often than older requests end.
    assert all(one.times_aside <= n for n, one in enumerate(made)) and made[1].times_aside == 1


def test_one_who_finds_no_room_lets_nobody_pass() -> None:
    machine = Machine(3)
    machine.add("r1", 4 * PAGE_SIZE, 10)
    machine.step()
    machine.add("r2", 5 * PAGE_SIZE + 1, 10)
    machine.add("r3", 10, 10)
    machine.step()
    assert names(machine.scheduler.decoding) == ["r1"]


def test_idle_sessions_give_way_before_anybody_is_set_aside() -> None:
    machine = Machine(2)
    for number, session in ((1, "a"), (2, "b")):
        machine.add(f"r{number}", 2 * PAGE_SIZE, 5, session)
        machine.run()
    assert machine.num_free()[0] == PAGES - 6
    machine.add("r3", 2 * PAGE_SIZE, 10)
    machine.step()
    machine.add("r4", 2 * PAGE_SIZE - 20, 120)
    assert machine.run() == [] and list(machine.slots._idle) == ["b"]


def test_a_request_starts_where_its_session_is_kept_although_little_is_free() -> None:
    machine = Machine(2)
    machine.add("r1", 5 * PAGE_SIZE, 5, "a")
    machine.run()
    other = machine.add("r2", 3 * PAGE_SIZE, 40)
    machine.step()
    again = machine.add("r1", 5 * PAGE_SIZE + 3, 10, "a")
    machine.step()
    assert machine.scheduler.decoding == [other, again]
    assert again.cached_tokens == 5 * PAGE_SIZE + 2


@pytest.mark.parametrize("end", ["cancelled", "error"])
def test_who_ends_aside_gives_back_what_the_host_held(end: str) -> None:
    machine = Machine(2, pages=6)
    machine.add("r1", 100)
    second = machine.add("r2", 100)
    assert any(machine.step() for _ in range(100))
    assert second.aside is not None and second.aside.num_bytes > 0 and second.slot is None
    second.finish(end)
    assert machine.scheduler.retire() == [second]
    assert second.aside is None
    assert machine.run() == []
    assert machine.num_free() == [6, 8]
