"""Target, drafter and caches of rank 0 as the engine sees them: every call is told to the other ranks, then made here.

What only reads, or needs no other rank's part, is not told. Nothing is handed on that is not named here: a call that
the other ranks did not make would wait for them for ever.
"""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.ranks import Team
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.drafter import DsparkDrafter
from sparkchat.models.deepseek_v4.loading import load_part
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.mtp import MtpDrafter, MtpState
from sparkchat.params import LoadSpec


class SharedCaches:
    """Numbers for caches that all ranks have, and word of those that are gone."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._numbers = itertools.count()
        self._gone: list[int] = []

    def open(self, of: str, inner: StateCache, sizes: tuple[int, ...]) -> SharedCache:
        number = next(self._numbers)
        gone = self._gone[:]
        del self._gone[: len(gone)]
        if gone:
            self.team.call("drop_caches", caches=gone)
        self.team.call("new_cache", cache=number, of=of, sizes=sizes)
        cache = SharedCache(self.team, inner, number)
        # Told with the next cache that is made: a finaliser may run in any thread.
        weakref.finalize(cache, self._gone.append, number)
        return cache


class SharedCache:
    """A cache of which every rank has one that is used alike; the calls are those of ``KVCache``."""

    def __init__(self, team: Team, inner: StateCache, number: int) -> None:
        self._team, self.inner, self.number = team, inner, number
        self._written: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        """Row -> what captured steps wrote and kept, of which the other ranks have no count yet."""

    @property
    def context(self) -> int:
        return self.inner.context

    def fill(self) -> None:
        self.inner.fill()
        self._tell("fill")

    def mark_written(self, row: int, end: int) -> None:
        self.inner.mark_written(row, end)
        self._written[row] = max(self._written.get(row, 0), end)

    def advance(self, row: int, end: int) -> None:
        self.inner.advance(row, end)
        self._lengths[row] = end

    def settle(self) -> None:
        """Tell the other ranks how far captured steps came; counts are asked for by other calls alone."""
        if not self._written and not self._lengths:
            return
        written, lengths = list(self._written.items()), list(self._lengths.items())
        self._written.clear()
        self._lengths.clear()
        self._team.call("count_rows", cache=self.number, written=written, lengths=lengths)

    def allocate(self) -> int:
        row = self.inner.allocate()
        self._tell("allocate")
        return row

    def free(self, row: int) -> None:
        self.inner.free(row)
        self._tell("free", row)

    def keep(self, row: int) -> None:
        self.inner.keep(row)
        self._tell("keep", row)

    def truncate(self, row: int, length: int) -> None:
        self.inner.truncate(row, length)
        self._tell("truncate", row, length)

    def length(self, row: int) -> int:
        return self.inner.length(row)

    def can_truncate(self, row: int, length: int) -> bool:
        return self.inner.can_truncate(row, length)

    @property
    def num_bytes(self) -> int:
        """Storage held now on this rank."""
        return self.inner.num_bytes

    def _tell(self, change: str, *args: int) -> None:
        self.settle()
        self._team.call("change_row", cache=self.number, change=change, args=args)


class SharedTarget:
    """A target of which every rank has a part; the calls are those of ``TargetModel``."""

    def __init__(self, inner: DeepseekV4, caches: SharedCaches) -> None:
        self.inner, self._caches, self._team = inner, caches, caches.team
        self.config, self.embedding, self.device = inner.config, inner.embedding, inner.device

    def new_cache(self, max_rows: int, context: int, max_block: int) -> SharedCache:
        inner = self.inner.new_cache(max_rows, context, max_block)
        return self._caches.open("target", inner, (max_rows, context, max_block))

    def forward(
        self, batch: ForwardBatch, cache: SharedCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        self._team.call("forward", batch.token_ids, taps=tap_layers, **_spans(batch, cache))
        with self._team.partners():
            return self.inner.forward(batch, cache.inner, tap_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        self._team.call("logits", hidden)
        with self._team.partners():
            return self.inner.logits(hidden)


class SharedDrafter:
    """A drafter of which every rank has a part; the calls are those of ``models.dspark.drafter.Drafter``."""

    draft_to_target = None

    def __init__(self, inner: DsparkDrafter | MtpDrafter, caches: SharedCaches) -> None:
        self._caches, self._team = caches, caches.team
        self.inner: Any = inner
        self.config, self.has_confidence = inner.config, inner.has_confidence
        self._numbers = itertools.count()

    def new_cache(self, max_rows: int, context: int) -> SharedCache:
        return self._caches.open("drafter", self.inner.new_cache(max_rows, context), (max_rows, context))

    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: SharedCache) -> None:
        self._team.call("extend_context", features, **_spans(batch, cache))
        with self._team.partners():
            self.inner.extend_context(features, batch, cache.inner)

    def backbone(self, batch: ForwardBatch, cache: SharedCache) -> Tensor:
        self._team.call("backbone", batch.token_ids, **_spans(batch, cache))
        with self._team.partners():
            return self.inner.backbone(batch, cache.inner)

    def base_logits(self, hidden: Tensor) -> Tensor:
        self._team.call("base_logits", hidden)
        with self._team.partners():
            return self.inner.base_logits(hidden)

    def initial_state(self, count: int) -> SharedState:
        state = SharedState(self, self.inner.initial_state(count))
        self._team.call("initial_state", state=state.number, count=count)
        return state

    def markov_step(self, previous_ids: Tensor, hidden: Tensor, state: SharedState) -> tuple[Tensor, SharedState]:
        following = SharedState(self, state.inner)
        self._team.call("markov_step", previous_ids, state=following.number, of=state.number)
        with self._team.partners():
            bias, following.inner = self.inner.markov_step(previous_ids, hidden, state.inner)
        return bias, following

    def select(self, state: SharedState, keep: Tensor) -> SharedState:
        chosen = SharedState(self, state.inner[keep])
        self._team.call("select_state", state=chosen.number, of=state.number, keep=keep.tolist())
        return chosen

    def next_number(self) -> int:
        return next(self._numbers)


class SharedBlockDrafter(SharedDrafter):
    """One that knows a block's laws before its tokens: DSpark."""

    def markov_vector(self, previous_ids: Tensor, hidden: Tensor, state: SharedState) -> tuple[Tensor, SharedState]:
        """W1 is whole on every rank, and there is no state to keep."""
        return self.inner.markov_vector(previous_ids, hidden, state.inner)[0], state

    def markov_rows(self, columns: Tensor) -> Tensor:
        self._team.call("markov_rows", columns)
        with self._team.partners():
            return self.inner.markov_rows(columns)

    def confidence(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        return self.inner.confidence(previous_ids, hidden)


class SharedState:
    """A sequential head's state, by a number that the other ranks know it by until the next block."""

    def __init__(self, drafter: SharedDrafter, inner: Tensor | MtpState) -> None:
        self._drafter, self.inner = drafter, inner
        self.number = drafter.next_number()

    def __getitem__(self, keep: Tensor) -> SharedState:
        """The state of the requests at ``keep`` [n]."""
        return self._drafter.select(self, keep)


def load_shared(team: Team, spec: LoadSpec, dtype: torch.dtype | None) -> tuple[SharedTarget, SharedDrafter | None]:
    """Load every rank's parts of target and drafter. Raises as ``load_part`` does, on whichever rank."""
    paths = (spec.model_path, spec.drafter_path)
    team.load(paths, dtype, torch.get_num_threads(), is_dummy=spec.dummy_weights)
    model, drafter_path = (None if path is None else Path(path) for path in paths)
    assert model is not None
    target, drafter = load_part(
        model, drafter_path, device=team.device, dtype=dtype, group=team.group, is_dummy=spec.dummy_weights
    )
    team.wait_until_loaded()
    caches = SharedCaches(team)
    if drafter is None:
        return SharedTarget(target, caches), None
    kind = SharedBlockDrafter if isinstance(drafter, DsparkDrafter) else SharedDrafter
    return SharedTarget(target, caches), kind(drafter, caches)


def _spans(batch: ForwardBatch, cache: SharedCache) -> dict[str, Any]:
    cache.settle()
    return {"cache": cache.number, "cache_rows": batch.cache_rows, "row_starts": batch.row_starts}
