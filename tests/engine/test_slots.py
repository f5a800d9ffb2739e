"""Cache rows and pending features: what is kept of a session is exactly what its next prompt shares with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sparkchat.engine.slots import DraftContext, Slot, SlotTable, flush_contexts
from sparkchat.models.kv_cache import KVCache

CPU = torch.device("cpu")


def cache(rows: int, window: int | None = None, max_span: int = 8) -> KVCache:
    return KVCache([window], 1, 4, max_rows=rows, context=256, max_span=max_span, dtype=torch.float32, device=CPU)


def table(rows: int, window: int | None = None) -> tuple[SlotTable, KVCache, KVCache]:
    target, draft = cache(rows, window), cache(rows)
    return SlotTable(target, draft), target, draft


def fill(slot: Slot, target: KVCache, draft: KVCache, length: int, projected: int) -> None:
    """Run the request up to ``length`` cached tokens, the first ``projected`` of them known to the drafter."""
    for end in range(target.length(slot.row) + 1, length + 1):
        target.advance(slot.row, end)
    assert slot.draft is not None
    if projected > slot.draft.length:
        draft.advance(slot.draft.row, projected)
        slot.draft.length = projected
    if length > slot.draft.length:
        slot.draft.add(torch.arange(slot.draft.length, length).float()[:, None])


def context_of(slot: Slot) -> tuple[int, list[float]]:
    """Projected rows, and the positions written into the pending rows by ``fill``."""
    assert slot.draft is not None
    pending = torch.cat(slot.draft.pending)[:, 0].tolist() if slot.draft.pending else []
    assert len(pending) == slot.draft.num_pending
    return slot.draft.length, pending


PROMPT = tuple(range(20))


@pytest.mark.parametrize(
    ("next_prompt", "cached", "context"),
    [
        ((*PROMPT, 50, 51), 20, (12, [*range(12, 20)])),  # goes on
        (PROMPT, 19, (12, [*range(12, 19)])),  # the last prompt token is always run again
        ((*PROMPT[:15], 99, 98), 15, (12, [12, 13, 14])),  # edited within the pending rows
        ((*PROMPT[:5], 99), 5, (5, [])),  # edited within the projected rows
        (PROMPT[:7], 6, (6, [])),  # shorter
        ((99, 98), 0, (0, [])),  # another conversation
    ],
)
def test_a_session_goes_on_from_the_common_prefix(
    next_prompt: tuple[int, ...], cached: int, context: tuple[int, list[int]]
) -> None:
    slots, target, draft = table(2)
    slot, found = slots.acquire("s", PROMPT)
    assert found == 0
    fill(slot, target, draft, 20, 12)
    slots.release(slot, "s", list(PROMPT))
    again, found = slots.acquire("s", next_prompt)
    assert (again.row, found) == (slot.row, cached)
    assert context_of(again) == context
    assert target.length(again.row) == cached
    assert draft.length(again.draft.row) == context[0]


def test_a_ring_that_cannot_go_back_starts_anew() -> None:
    slots, target, draft = table(2, window=8)
    slot, _ = slots.acquire("s", PROMPT)
    fill(slot, target, draft, 120, 100)
    tokens = [*PROMPT, *range(200, 300)]
    slots.release(slot, "s", tokens)
    # A few tokens back the ring still holds what is needed, far back it does not.
    near, found = slots.acquire("s", (*tokens[:116], 7))
    assert (near.row, found) == (slot.row, 116)
    slots.release(near, "s", tokens[:116])
    far, found = slots.acquire("s", (*tokens[:30], 7))
    assert found == 0
    assert context_of(far) == (0, [])
    assert target.length(far.row) == draft.length(far.draft.row) == 0


def test_the_least_recently_used_session_gives_way() -> None:
    slots, target, draft = table(3)
    for name in ("a", "b", "c", "a"):
        slot, _ = slots.acquire(name, PROMPT)
        fill(slot, target, draft, 20, 0)
        slots.release(slot, name, list(PROMPT))
    other, _ = slots.acquire(None, PROMPT)
    assert slots.acquire("a", (*PROMPT, 9))[1] == 20
    assert slots.acquire("b", (*PROMPT, 9))[1] == 0
    assert slots.acquire("d", PROMPT) is None
    slots.release(other, None, [])
    assert slots.acquire("d", PROMPT)[1] == 0


def test_the_other_sessions_are_left_alone() -> None:
    slots, target, draft = table(3)
    for name in ("a", "b"):
        slot, _ = slots.acquire(name, PROMPT)
        fill(slot, target, draft, 20, 4)
        slots.release(slot, name, list(PROMPT))
    slots.release(slots.acquire(None, PROMPT)[0], None, list(PROMPT))
    assert slots.acquire("a", (*PROMPT, 9))[1] == 20
    assert slots.acquire("b", (*PROMPT, 9))[1] == 20


def test_no_row_is_ever_lost() -> None:
    rng = random.Random(5)
    slots, target, draft = table(4, window=8)
    running: list[tuple[str | None, Slot, tuple[int, ...]]] = []
    for _ in range(600):
        if len(running) < 3 and rng.random() < 0.6:
            session = rng.choice([None, "a", "b", "c", "d", "e"])
            if session in [name for name, _, _ in running if name]:
                continue
            prompt = tuple(rng.choice([1, 2]) for _ in range(rng.randint(1, 40)))
            slot, found = slots.acquire(session, prompt)
            assert slot.row not in [held.row for _, held, _ in running]
            assert found < len(prompt)
            assert target.length(slot.row) == found == sum(context_of(slot)[:1]) + slot.draft.num_pending
            fill(slot, target, draft, len(prompt), rng.randint(0, len(prompt)))
            running.append((session, slot, prompt))
        elif running:
            session, slot, prompt = running.pop(rng.randrange(len(running)))
            slots.release(slot, rng.choice([session, None]), list(prompt))


class RecordingDrafter:
    """Keeps the batches whose features it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def extend_context(self, features: torch.Tensor, batch: Any, store: KVCache) -> None:
        self.calls.append((features[:, 0].tolist(), batch.positions.tolist(), batch.cache_rows, batch.row_starts))


def test_pending_rows_of_all_requests_are_projected_in_one_pass() -> None:
    drafter: Any = RecordingDrafter()
    first, second, idle, few = DraftContext(0, 3), DraftContext(2), DraftContext(1, 9), DraftContext(3)
    first.add(torch.tensor([[3.0], [4.0]]))
    first.add(torch.tensor([[5.0]]))
    second.add(torch.tensor([[0.0], [1.0], [2.0]]))
    few.add(torch.tensor([[0.0]]))
    flush_contexts(drafter, cache(4), [first, second, idle, few], at_least=3)
    assert drafter.calls == [([3, 4, 5, 0, 1, 2], [3, 4, 5, 0, 1, 2], (0, 2), (0, 3, 6))]
    assert (first.length, first.num_pending, first.pending) == (6, 0, [])
    assert (few.length, few.num_pending) == (0, 1)
    flush_contexts(drafter, cache(4), [first, second, idle])
    assert len(drafter.calls) == 1


def test_a_slice_of_a_batch_does_not_keep_the_batch() -> None:
    batch = torch.randn(1000, 8)
    context = DraftContext(0)
    context.add(batch[10:12])
    context.add(batch)
    assert context.pending[0].untyped_storage().nbytes() == 2 * 8 * 4
    assert context.pending[1].data_ptr() == batch.data_ptr()
    assert torch.equal(context.pending[0], batch[10:12])
