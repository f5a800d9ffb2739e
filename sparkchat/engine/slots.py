"""Who holds which cache rows: running requests, and idle sessions whose prefix may be used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparkchat.models.base import ForwardBatch

if TYPE_CHECKING:
    from sparkchat.engine.pair import LoadedPair
    from sparkchat.models.base import KVCache
    from sparkchat.models.dspark.drafter import Drafter
    from sparkchat.models.kv_cache import SavedRow

FLUSH_ROWS = 256
"""Pending features are projected at the latest when this many rows wait, so that memory stays flat."""
_EVERYTHING = 1 << 62
"""More positions than any row has."""


@dataclass
class DraftContext:
    """Target features on their way into the drafter's cache.

    The drafter's context is positions ``0 .. length + pending rows - 1``. Projection waits until a
    block is drafted, so that a request in mode ``off`` pays nothing for staying switchable.
    """

    row: int
    length: int = 0
    """Rows already projected into the drafter's cache."""
    pending: list[Tensor] = field(default_factory=list)
    """[rows, taps * hidden] each, consecutive positions from ``length``."""
    num_pending: int = 0

    def add(self, features: Tensor) -> None:
        """features [rows, taps * hidden] of the next positions, kept until they are flushed."""
        # A slice would keep the whole batch it was cut from in memory.
        is_part = features.untyped_storage().nbytes() > features.nbytes
        self.pending.append(features.clone() if is_part else features)
        self.num_pending += features.shape[0]

    def truncate(self, length: int) -> None:
        """Forget positions from ``length`` on."""
        keep = max(0, length - self.length)
        if keep < self.num_pending:
            rows = torch.cat(self.pending)[:keep] if keep else None
            self.pending, self.num_pending = ([] if rows is None else [rows]), keep
        self.length = min(self.length, length)


def flush_contexts(drafter: Drafter, cache: KVCache, contexts: list[DraftContext], at_least: int = 1) -> None:
    """Project the pending rows of contexts with ``at_least`` of them into the drafter's cache, all in one pass."""
    taken = take_pending(contexts, at_least)
    if taken is not None:
        drafter.extend_context(*taken, cache)


def take_pending(contexts: list[DraftContext], at_least: int = 1) -> tuple[Tensor, ForwardBatch] | None:
    """The pending rows of contexts with ``at_least`` of them, which now count as projected; None if there are none."""
    waiting = [context for context in contexts if context.num_pending >= at_least]
    if not waiting:
        return None
    starts = [0]
    for context in waiting:
        starts.append(starts[-1] + context.num_pending)
    tensors = [rows for context in waiting for rows in context.pending]
    features = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    positions = [p for c in waiting for p in range(c.length, c.length + c.num_pending)]
    numbers = torch.tensor([[0] * len(positions), positions]).to(features.device)
    batch = ForwardBatch(
        token_ids=numbers[0],
        positions=numbers[1],
        cache_rows=tuple(context.row for context in waiting),
        row_starts=tuple(starts),
    )
    for context in waiting:
        context.length += context.num_pending
        context.pending, context.num_pending = [], 0
    return features, batch


class Reach(NamedTuple):
    """How far a request will write: positions of the target's row and of the drafter's lie below these."""

    target: int
    draft: int


_NO_ROOM = Reach(0, 0)


@dataclass
class Slot:
    """Cache rows of one request or idle session."""

    row: int
    draft: DraftContext | None
    tokens: list[int] = field(default_factory=list)
    """The tokens whose KV is in the target's cache, while the slot is idle."""
    room: Reach = _NO_ROOM
    """How far it holds room already."""
    kept: int = 0
    """Length of the prompt at whose end the caches kept their rings; 0 where they have none, or kept nothing."""


@runtime_checkable
class KeepsRings(Protocol):
    """A cache that forgets old positions, and can keep what it holds at one length of a row."""

    def keep(self, row: int) -> None: ...


def keep_prompt(pair: LoadedPair, slot: Slot, length: int) -> None:
    """At the end of a prompt of ``length`` tokens whose session may go on: make sure that it can go on from here.

    The next turn often differs from what is cached right behind this prompt: an answer is asked for again, or its
    thinking is left out.
    """
    if not isinstance(pair.cache, KeepsRings):
        return
    if slot.draft is not None and pair.drafter is not None and isinstance(pair.draft_cache, KeepsRings):
        flush_contexts(pair.drafter, pair.draft_cache, [slot.draft])
        pair.draft_cache.keep(slot.draft.row)
    pair.cache.keep(slot.row)
    slot.kept = length


@runtime_checkable
class SharesRoom(Protocol):
    """A cache whose rows take room from one storage, and can be set aside."""

    def can_take(self, row: int | None, end: int, without: Collection[int] = ()) -> bool: ...

    def take(self, row: int, end: int) -> int: ...

    def trim(self, row: int) -> None: ...

    def close_gaps(self) -> dict[int, int]: ...

    def publish(self) -> None: ...

    def save(self, row: int) -> SavedRow: ...

    def restore(self, saved: SavedRow) -> int: ...


@dataclass(frozen=True)
class SetAside:
    """What a request's slot held, on the host, until there is room again."""

    target: SavedRow
    draft: SavedRow | None
    length: int
    """Rows that the drafter's cache has of the features."""
    pending: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        saved = self.target.num_bytes + (0 if self.draft is None else self.draft.num_bytes)
        return saved + sum(rows.nbytes for rows in self.pending)


class SlotTable:
    """Hands out cache rows and room in them; the least recently used idle session gives way when either is short."""

    def __init__(self, cache: KVCache, draft_cache: KVCache | None) -> None:
        self._cache = cache
        self._draft_cache = draft_cache
        self._idle: OrderedDict[str, Slot] = OrderedDict()
        self._open_slots: list[Slot] = []
        """Those of running requests and idle sessions."""
        caches = [cache for cache in (cache, draft_cache) if cache is not None]
        self._shares_room = all(isinstance(cache, SharesRoom) for cache in caches)
        """Rows take room from one storage, and can be set aside; else it is enough that there is a row."""

    def acquire(self, session: str | None, prompt_ids: tuple[int, ...], spare: int = 0) -> tuple[Slot, int] | None:
        """A slot with room for this prompt, and the number of its tokens that are already cached; None while there is
        no room for the prompt and ``spare`` positions behind it."""
        reach = Reach(len(prompt_ids) + spare, len(prompt_ids) + spare)
        slot = self._idle.get(session) if session is not None else None
        common = None if slot is None else self._common(slot, prompt_ids)
        if slot is None or common is None:
            if not self._give_way(None, reach, first=session):
                return None
            slot, common = self._open(), 0
        else:
            if not self._give_way(slot, reach):
                return None
            assert session is not None
            del self._idle[session]
            self._rewind(slot, common)
        self._take(slot, Reach(len(prompt_ids), len(prompt_ids)))
        return slot, common

    def reserve(self, slot: Slot, reach: Reach) -> bool:
        """Hold room so far; False where there is none, although no idle session holds any."""
        if reach.target <= slot.room.target and reach.draft <= slot.room.draft:
            return True
        if not self._give_way(slot, reach):
            return False
        self._take(slot, reach)
        return True

    def publish(self) -> None:
        """Bring the device up to date on who holds what."""
        if self._shares_room:
            self._cache.publish()
            if self._draft_cache is not None:
                self._draft_cache.publish()

    def release(self, slot: Slot, session: str | None, tokens: list[int]) -> None:
        """``tokens``: those whose KV the target cache holds, in order."""
        if session is None:
            self._free(slot)
            return
        old = self._idle.pop(session, None)
        if old is not None:
            self._free(old)
        slot.tokens = tokens
        if self._shares_room:
            for cache, row in self._rows(slot):
                cache.trim(row)
        slot.room = _NO_ROOM
        self._idle[session] = slot

    def set_aside(self, slot: Slot) -> SetAside:
        """Take everything a slot holds to the host, byte for byte, and give its room back."""
        assert self._shares_room
        target, draft = self._cache.save(slot.row), None
        length, pending = 0, ()
        if slot.draft is not None and self._draft_cache is not None:
            draft = self._draft_cache.save(slot.draft.row)
            length, pending = slot.draft.length, tuple(rows.cpu() for rows in slot.draft.pending)
        self._free(slot)
        return SetAside(target, draft, length, pending)

    def bring_back(self, saved: SetAside, end: int, spare: int) -> Slot | None:
        """A slot that holds what was set aside, with room for positions below ``end``; None while there is no room for
        these and ``spare`` positions more."""
        if not self._give_way(None, Reach(end + spare, end + spare)):
            return None
        row, draft = self._cache.restore(saved.target), None
        if saved.draft is not None and self._draft_cache is not None:
            draft = DraftContext(self._draft_cache.restore(saved.draft), saved.length)
            device = self._draft_cache.stores[0].data.device
            for rows in saved.pending:
                draft.add(rows.to(device))
        slot = self._opened(Slot(row, draft))
        self._take(slot, Reach(end, end))
        return slot

    def _open(self) -> Slot:
        while True:
            try:
                row = self._cache.allocate()
                break
            except ValueError:
                if not self._idle:
                    raise
                self._free(self._idle.popitem(last=False)[1])
        draft = None if self._draft_cache is None else DraftContext(self._draft_cache.allocate())
        return self._opened(Slot(row, draft))

    def _opened(self, slot: Slot) -> Slot:
        self._open_slots.append(slot)
        return slot

    def _close_gaps(self) -> None:
        """Rows of limited storage move together before more of it is taken."""
        if not self._shares_room:
            return
        moved = self._cache.close_gaps()
        drafts = {} if self._draft_cache is None else self._draft_cache.close_gaps()
        if moved or drafts:
            for slot in self._open_slots:
                slot.row = moved.get(slot.row, slot.row)
                if slot.draft is not None:
                    slot.draft.row = drafts.get(slot.draft.row, slot.draft.row)

    def _give_way(self, slot: Slot | None, reach: Reach, first: str | None = None) -> bool:
        """Let as few idle sessions as possible go, ``first`` before others, so that a slot (None: a new one) has room;
        none where all of them would not be enough."""
        if slot is not None and self._has_room(slot, reach, []):
            self._close_gaps()
            return True
        names = [name for name, idle in self._idle.items() if idle is not slot and name != first]
        going = [first] if first in self._idle and slot is None else []
        while not self._has_room(slot, reach, [self._idle[name] for name in going]):
            if not names:
                return False
            going.append(names.pop(0))
        for name in going:
            self._free(self._idle.pop(name))
        self._close_gaps()
        return True

    def _has_room(self, slot: Slot | None, reach: Reach, going: list[Slot]) -> bool:
        if not self._shares_room:
            return True
        row = None if slot is None else slot.row
        if not self._cache.can_take(row, reach.target, [s.row for s in going]):
            return False
        if self._draft_cache is None:
            return True
        row = None if slot is None or slot.draft is None else slot.draft.row
        return self._draft_cache.can_take(row, reach.draft, [s.draft.row for s in going if s.draft is not None])

    def _take(self, slot: Slot, reach: Reach) -> None:
        if not self._shares_room:
            slot.room = Reach(_EVERYTHING, _EVERYTHING)
            return
        target, draft = self._cache.take(slot.row, reach.target), _EVERYTHING
        if slot.draft is not None and self._draft_cache is not None:
            draft = self._draft_cache.take(slot.draft.row, reach.draft)
        slot.room = Reach(target, draft)

    def _rows(self, slot: Slot) -> list[tuple[KVCache, int]]:
        """The slot's rows with their caches."""
        rows = [(self._cache, slot.row)]
        if slot.draft is not None and self._draft_cache is not None:
            rows.append((self._draft_cache, slot.draft.row))
        return rows

    def _common(self, slot: Slot, prompt_ids: tuple[int, ...]) -> int | None:
        """How many tokens of the prompt an idle slot can go on from; None where it cannot go back to any."""
        # The last prompt token is always run again: its logits give the first token of the answer.
        common, limit = 0, min(len(slot.tokens), len(prompt_ids) - 1)
        while common < limit and slot.tokens[common] == prompt_ids[common]:
            common += 1
        return next((n for n in (common, min(common, slot.kept)) if self._can_rewind(slot, n)), None)

    def _rewind(self, slot: Slot, length: int) -> None:
        if slot.draft is not None and self._draft_cache is not None:
            slot.draft.truncate(length)
            self._draft_cache.truncate(slot.draft.row, slot.draft.length)
        self._cache.truncate(slot.row, length)

    def _can_rewind(self, slot: Slot, length: int) -> bool:
        if not self._cache.can_truncate(slot.row, length):
            return False
        if slot.draft is None or self._draft_cache is None:
            return True
        return self._draft_cache.can_truncate(slot.draft.row, min(length, slot.draft.length))

    def _free(self, slot: Slot) -> None:
        for cache, row in self._rows(slot):
            cache.free(row)
        self._open_slots = [other for other in self._open_slots if other is not slot]
