"""What rows see whose every number lies on the device: ``Sight`` for captured steps, which ask the host nothing.

All shapes depend on the number of rows and on the size of the caches alone, never on where the rows are: every row is
looked at as one that closes an entry, and what it would write goes to a spare row where it closes none.

Shapes: N rows, Q copies of a row that fill a tile, T slots, E entries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.cache import SINK_SLOTS, RatioStore, StateCache
from sparkchat.models.deepseek_v4.config import WINDOW_ONLY
from sparkchat.models.deepseek_v4.rope import Ropes
from sparkchat.models.deepseek_v4.sight import ClosingEntries, RatioSight, Sight, padded_count
from sparkchat.models.rows import RowBatch


class RowRectangle:
    """Every row a span of its own; on the CPU repeated, so that with its heads it fills whole tiles."""

    def __init__(self, cache_rows: Tensor, num_heads: int) -> None:
        self.cache_rows = cache_rows
        self.height = cache_rows.shape[0]
        self.width = padded_count(1, num_heads) if cache_rows.device.type == "cpu" else 1

    def spread(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, Q, ...]"""
        return x.unsqueeze(1).expand(-1, self.width, *x.shape[1:])

    def collect(self, x: Tensor) -> Tensor:
        """[N, Q, ...] -> [N, ...]"""
        return x[:, 0]


class RowRatioSight(RatioSight):
    """The part of a pass that is the same for all layers of one ratio."""

    def __init__(self, store: RatioStore, rows: RowBatch, rectangle: RowRectangle, ropes: Ropes) -> None:
        self.store, ratio, positions = store, store.ratio, rows.positions
        self.rotations = ropes.at(ratio, positions)
        self.latent_slots = SINK_SLOTS + positions % store.ring
        self.raw_slots = positions % store.raw_ring if ratio else positions
        self.phases = positions % ratio if ratio else positions
        self.closing = _closing_entries(store, rows, ropes) if ratio else None
        # How many there are is not asked: all that there is room for are looked at.
        self.most_visible = self.num_entries = store.num_entries
        query = rectangle.spread(positions).unsqueeze(-1)
        entry = torch.arange(self.num_entries, device=positions.device)
        self.is_visible = entry < (query + 1) // ratio if ratio else entry < query


class RowSight(Sight):
    """A batch of rows over a cache that has its final size (``StateCache.fill``)."""

    def __init__(
        self, cache: StateCache, rows: RowBatch, ropes: Ropes, num_heads: int, *, block: int | None = None
    ) -> None:
        """``block``: rows come in blocks of so many, which see all of their block up to ``rows.ends`` and the window
        before it. Ratio 0 only. Positions lie below what ``ropes.prepare`` was given."""
        self.rows, self.cache_rows = rows, rows.cache_rows
        self._cache = cache
        self.rectangle = RowRectangle(rows.cache_rows, num_heads)  # type: ignore[assignment]
        self.first_seen = _first_seen(cache, rows, block)
        """[N] the first position in the window's ring that a row sees; it may be negative. The last is ``ends`` - 1."""
        self._ratios = {
            ratio: RowRatioSight(store, rows, self.rectangle, ropes)  # type: ignore[arg-type]
            for ratio, store in cache.stores.items()
        }
        self._masks = {ratio: self._row_mask(plan) for ratio, plan in self._ratios.items()}

    @property
    def asks_host(self) -> bool:
        return False

    def _row_mask(self, plan: RatioSight) -> Tensor:
        """[N, Q, T] float: 0 where a row sees a slot, -inf elsewhere."""
        spread = self.rectangle.spread
        last = spread(self.rows.ends - 1).unsqueeze(-1)
        # A slot holds the newest position that a row can see, or one a lap later, whose own is then out of sight: the
        # ring has room for the window and for all that may be written behind it (RatioStore.ring).
        slot = torch.arange(plan.store.ring, device=last.device)
        position = last - (last - slot) % plan.store.ring
        hidden = (position < spread(self.first_seen).unsqueeze(-1)) | (position < 0)
        hidden = plan.hidden_slots(hidden)
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device=last.device)
        return mask.masked_fill_(hidden, float("-inf"))


def repeat_last(rows: RowBatch) -> RowBatch:
    """Rows of nobody become copies of the last row of somebody, so that they need no expert that is not needed anyway.

    What a copy writes is what the row writes that it copies.
    """
    assert rows.starts is not None
    index = torch.arange(rows.positions.shape[0], device=rows.positions.device)
    index = torch.minimum(index, (rows.starts[-1].long() - 1).clamp(min=0))
    return replace(
        rows,
        token_ids=rows.token_ids[index],
        positions=rows.positions[index],
        cache_rows=rows.cache_rows[index],
        ends=rows.ends[index],
    )


def _first_seen(cache: StateCache, rows: RowBatch, block: int | None) -> Tensor:
    window = next(iter(cache.stores.values())).window
    if block is None:
        return rows.positions - window + 1
    assert set(cache.stores) == {WINDOW_ONLY}
    starts = rows.positions.view(-1, block)[:, :1]
    return (starts - window).expand(-1, block).flatten()


def _closing_entries(store: RatioStore, rows: RowBatch, ropes: Ropes) -> ClosingEntries:
    """Of every row, in its own cache row where it closes one and in the spare row where not."""
    ratio, positions = store.ratio, rows.positions
    closes = (positions + 1) % ratio == 0
    entries = torch.where(closes, positions // ratio, 0)
    steps = torch.arange(-(store.depth - 1) * ratio, ratio, device=positions.device)
    tokens = entries.unsqueeze(1) * ratio + steps
    return ClosingEntries(
        torch.where(closes, rows.cache_rows, rows.spare_row),
        entries,
        tokens % store.raw_ring,
        tokens < 0,
        ropes.at(ratio, entries * ratio),
    )
