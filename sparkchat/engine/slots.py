"""Who holds which cache rows: running requests, and idle sessions whose prefix may be used again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparkchat.models.base import ForwardBatch

if TYPE_CHECKING:
    from sparkchat.engine.pair import LoadedPair
    from sparkchat.models.base import KVCache
    from sparkchat.models.dspark.drafter import Drafter

FLUSH_ROWS = 256
"""Pending features are projected at the latest when this many rows wait, so that memory stays flat."""


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


@dataclass
class Slot:
    """Cache rows of one request or idle session."""

    row: int
    draft: DraftContext | None
    tokens: list[int] = field(default_factory=list)
    """The tokens whose KV is in the target's cache, while the slot is idle."""
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


class SlotTable:
    """Hands out cache rows; the least recently used idle session gives way when none is free."""

    def __init__(self, cache: KVCache, draft_cache: KVCache | None) -> None:
        self._cache = cache
        self._draft_cache = draft_cache
        self._idle: OrderedDict[str, Slot] = OrderedDict()

    def acquire(self, session: str | None, prompt_ids: tuple[int, ...]) -> tuple[Slot, int]:
        """A slot for this prompt and the number of its tokens that are already cached."""
        slot = self._idle.pop(session, None) if session is not None else None
        if slot is not None:
            cached = self._rewind(slot, prompt_ids)
            if cached is not None:
                return slot, cached
            self._free(slot)
        while True:
            try:
                row = self._cache.allocate()
                break
            except ValueError:
                if not self._idle:
                    raise
                self._free(self._idle.popitem(last=False)[1])
        draft = None if self._draft_cache is None else DraftContext(self._draft_cache.allocate())
        return Slot(row, draft), 0

    def release(self, slot: Slot, session: str | None, tokens: list[int]) -> None:
        """``tokens``: those whose KV the target cache holds, in order."""
        if session is None:
            self._free(slot)
            return
        old = self._idle.pop(session, None)
        if old is not None:
            self._free(old)
        slot.tokens = tokens
        self._idle[session] = slot

    def _rewind(self, slot: Slot, prompt_ids: tuple[int, ...]) -> int | None:
        # The last prompt token is always run again: its logits give the first token of the answer.
        common, limit = 0, min(len(slot.tokens), len(prompt_ids) - 1)
        while common < limit and slot.tokens[common] == prompt_ids[common]:
            common += 1
        length = next((n for n in (common, min(common, slot.kept)) if self._can_rewind(slot, n)), None)
        if length is None:
            return None
        if slot.draft is not None and self._draft_cache is not None:
            slot.draft.truncate(length)
            self._draft_cache.truncate(slot.draft.row, slot.draft.length)
        self._cache.truncate(slot.row, length)
        return length

    def _can_rewind(self, slot: Slot, length: int) -> bool:
        if not self._cache.can_truncate(slot.row, length):
            return False
        if slot.draft is None or self._draft_cache is None:
            return True
        return self._draft_cache.can_truncate(slot.draft.row, min(length, slot.draft.length))

    def _free(self, slot: Slot) -> None:
        self._cache.free(slot.row)
        if slot.draft is not None and self._draft_cache is not None:
            self._draft_cache.free(slot.draft.row)
