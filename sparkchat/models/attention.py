"""Attention of ragged spans over their cached keys, one call per layer for all requests.

Shapes: N rows, R cache rows looked at, Q query rows each (padded), G query heads per key head, K key heads,
T key slots, D head dimension. Query heads are ordered [G, K] (weights.py), so that the heads of a group are rows
of one matrix product with their key head: queries are [R, K, Q*G, D] without a copy and keys are never repeated.

A row's result does not depend on the rows beside it, bit for bit: key lengths are those of ``key_slots``, and no
product has a count of query rows that takes another path through this processor's matrix library.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.kv_cache import KVCache, LayerStore, key_slots
from sparkchat.models.paged_cache import PagedStore

_QUERY_TILE = 32
"""Rows of the matrix products inside scaled_dot_product_attention on the CPU."""
_PROBE_KEYS = 256
MOST_COPIED = 1 << 28
"""Bytes of pages that are copied to be attended to at a time; engine/cache_plan.py leaves room for them."""


@dataclass(frozen=True)
class Span:
    """Rows of one request in a batch."""

    cache_row: int
    first: int
    """Index of its first row in the batch."""
    count: int
    start: int
    """Position of its first row."""

    @property
    def end(self) -> int:
        return self.start + self.count


def open_spans(cache_rows: Sequence[int], row_starts: Sequence[int], cache: KVCache) -> list[Span]:
    """Reserve cache room for every span of a batch. Raises ValueError when a span does not fit."""
    return [
        Span(row, first, stop - first, cache.reserve(row, stop - first))
        for row, first, stop in zip(cache_rows, row_starts, row_starts[1:], strict=False)
    ]


def padded_count(count: int, group_size: int, head_dim: int, device: torch.device) -> int:
    """Return how many query positions to compute for ``count`` of them; see the module docstring."""
    if device.type == "cpu":
        odd_tiles = deviating_tiles(head_dim)
    else:
        odd_tiles = frozenset(range(1, max(2, head_dim // 24 + 1)))
    while (count * group_size) % _QUERY_TILE in odd_tiles:
        count += 1
    return count


@functools.cache
def deviating_tiles(head_dim: int) -> frozenset[int]:
    """Counts of query rows below a tile whose products this processor computes in another order, found by trying.

    With AVX-512 (MKL on Intel) these are the counts below head_dim / 24; with AVX2 those below 4, and all odd ones
    where heads are narrower than 12.
    """
    random = torch.Generator().manual_seed(0)
    # Two heads: a single one would be split over threads inside the product, which several never are.
    queries, keys, values = torch.randn(3, 1, 2, _PROBE_KEYS, head_dim, generator=random).unbind(0)
    queries, mask = queries[:, :, :_QUERY_TILE], torch.zeros(1, 1, _QUERY_TILE, _PROBE_KEYS)
    mask[..., -1] = float("-inf")
    whole = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    def deviates(rows: int) -> bool:
        part = F.scaled_dot_product_attention(queries[:, :, :rows], keys, values, attn_mask=mask[:, :, :rows])
        return not torch.equal(part, whole[:, :, :rows])

    return frozenset(rows for rows in range(1, _QUERY_TILE) if deviates(rows))


class Padding:
    """Lays the spans out as a [R, Q] rectangle over a range of cache rows, and takes them out again."""

    def __init__(
        self, spans: Sequence[Span], group_size: int, head_dim: int, device: torch.device, *, is_copied: bool = False
    ) -> None:
        """``is_copied``: rows of the cache are copied in any case, so none is taken along for lying between others."""
        low, high = min(s.cache_row for s in spans), max(s.cache_row for s in spans) + 1
        self.rows: slice | Tensor = slice(low, high)
        if is_copied or high - low > 2 * len(spans):
            # Rows far apart: copying them costs less than attending from every row between.
            chosen = sorted(s.cache_row for s in spans)
            self.rows = torch.tensor(chosen, device=device)
            slot_of = {row: i for i, row in enumerate(chosen)}
        else:
            slot_of = {row: row - low for row in range(low, high)}
        self.num_rows = len(slot_of)
        self.width = padded_count(max(s.count for s in spans), group_size, head_dim, device)
        # Padding repeats row 0 of the batch or of the span: any row with something to see will do.
        index = [0] * (self.num_rows * self.width)
        back = [0] * sum(s.count for s in spans)
        self.spans: list[Span] = [spans[0]] * self.num_rows
        for span in spans:
            base = slot_of[span.cache_row] * self.width
            self.spans[slot_of[span.cache_row]] = span
            for i in range(self.width):
                index[base + i] = span.first + min(i, span.count - 1)
            back[span.first : span.first + span.count] = range(base, base + span.count)
        self.is_identity = index == list(range(len(back)))
        self.index = torch.tensor(index, device=device)
        self.back = torch.tensor(back, device=device)

    def spread(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R*Q, ...]"""
        return x if self.is_identity else x.index_select(0, self.index)

    def collect(self, x: Tensor) -> Tensor:
        """[R*Q, ...] -> [N, ...]"""
        return x if self.is_identity else x.index_select(0, self.back)


class StoreView:
    """The keys, values, write targets and mask of one store in one forward pass."""

    def __init__(
        self, store: LayerStore, spans: Sequence[Span], padding: Padding, positions: Tensor, is_block: bool
    ) -> None:
        self._store, self._padding = store, padding
        ends = [s.end for s in padding.spans]
        self.length = min(key_slots(max(ends)), store.slots)
        self._writes = self._write_targets(spans, positions)
        heads = store.data.shape[2] // 2
        self._reader = None
        self.parts = [(0, padding.num_rows)]
        """Rows of the padding that are attended to at a time: all, unless copying them took too much room."""
        if isinstance(store, PagedStore):
            assert isinstance(padding.rows, Tensor)
            self._reader = store.reader(padding.rows, self.length)
            step = max(1, MOST_COPIED // self._reader.bytes_per_row)
            self.parts = [(n, min(n + step, padding.num_rows)) for n in range(0, padding.num_rows, step)]
        is_view = self._reader is None and isinstance(padding.rows, slice)
        reach = store.data[:, padding.rows] if is_view else None
        self._keys = None if reach is None else reach[:, :, :heads, : self.length].unbind(0)
        self._values = None if reach is None else reach[:, :, heads:, : self.length].unbind(0)
        self._positions = positions
        self._mask = self._build_mask(torch.tensor(ends, device=positions.device), is_block)

    def _write_targets(self, spans: Sequence[Span], positions: Tensor) -> tuple[Tensor, ...] | None:
        """Views [2K, n, D] of each layer where one span lands in a row of slots; None where it is scattered."""
        span, slots = spans[0], self._store.slots
        slot = span.start % slots
        if len(spans) > 1 or slot + span.count > slots or self._store.pages is not None:
            rows = torch.tensor([s.cache_row for s in spans for _ in range(s.count)], device=positions.device)
            self._rows, self._slots = self._store.locate(rows, positions)
            return None
        return self._store.data[:, span.cache_row, :, slot : slot + span.count].unbind(0)

    def _build_mask(self, ends: Tensor, is_block: bool) -> Tensor:
        """ends [R] -> additive mask [R, Q, T]: 0 where a query sees a slot, -inf elsewhere."""
        padding, store = self._padding, self._store
        query = padding.spread(self._positions).view(padding.num_rows, padding.width, 1)
        last = (ends - 1).view(-1, 1, 1)
        slot = torch.arange(self.length, device=ends.device)
        if not store.is_ring:
            # Rows of a block see each other in both directions (paper section 3).
            hidden = slot > (last.expand_as(query) if is_block else query)
        else:
            # The newest position that can be in the slot; rejected rows behind the last query count as
            # positions one lap earlier, which lie outside every window (KVCache.can_truncate).
            position = last - (last - slot) % store.slots
            hidden = (position > query) | (position <= query - store.window) | (position < 0)
        mask = torch.zeros(hidden.shape, dtype=store.data.dtype, device=ends.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def grouped_mask(self, group_size: int) -> Tensor:
        """[R, 1, Q*G, T]"""
        rows, width, length = self._mask.shape
        spread = self._mask.unsqueeze(2).expand(rows, width, group_size, length)
        return spread.reshape(rows, 1, width * group_size, length)

    def write(self, index: int, kv: Tensor) -> None:
        """Store keys and values kv [N, 2K, D] of layer ``index`` of the store."""
        if self._writes is not None:
            self._writes[index].copy_(kv.transpose(0, 1))
        else:
            self._store.data[index][self._rows, :, self._slots] = kv.to(self._store.data.dtype)

    def read(self, index: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, K, T, D] of layer ``index`` of the store; ``low`` and ``high`` from ``parts``."""
        if self._keys is not None and self._values is not None:
            return self._keys[index], self._values[index]
        if self._reader is not None:
            keys, values = self._reader.read(index, low, high).chunk(2, dim=1)
            return keys, values
        data = self._store.data[index].index_select(0, self._padding.rows)[:, :, : self.length]
        keys, values = data.chunk(2, dim=1)
        return keys, values


class SpanAttention:
    """Everything about one batch that its layers share; built once per forward pass."""

    def __init__(
        self, cache: KVCache, spans: Sequence[Span], positions: Tensor, group_size: int, *, is_block: bool = False
    ) -> None:
        """``is_block``: the rows of a span see all of the span, not only what is before them."""
        cache.publish()
        self._cache, self._spans, self._group_size = cache, spans, group_size
        is_copied = any(isinstance(store, PagedStore) for store in cache.stores)
        self._padding = Padding(spans, group_size, cache.head_dim, positions.device, is_copied=is_copied)
        self._views = [StoreView(store, spans, self._padding, positions, is_block) for store in cache.stores]
        self._masks = [view.grouped_mask(group_size) for view in self._views]

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [N, 2K, D] (keys, then values), then attend from q [N, G*K, D] -> [N, G*K*D]."""
        store, index = self._cache.places[layer]
        view = self._views[store]
        view.write(index, kv)
        padding, heads = self._padding, kv.shape[1] // 2
        q = padding.spread(q.to(self._cache.stores[store].data.dtype))
        q = q.reshape(padding.num_rows, padding.width * self._group_size, heads, -1).transpose(1, 2)
        mixed_parts = []
        for low, high in view.parts:
            keys, values = view.read(index, low, high)
            mask = self._masks[store][low:high]
            mixed_parts.append(F.scaled_dot_product_attention(q[low:high], keys, values, attn_mask=mask))
        mixed = mixed_parts[0] if len(mixed_parts) == 1 else torch.cat(mixed_parts)
        mixed = mixed.transpose(1, 2).reshape(padding.num_rows * padding.width, -1)
        return padding.collect(mixed)

    def advance(self) -> None:
        """Count the rows of all spans as cached."""
        for span in self._spans:
            self._cache.advance(span.cache_row, span.end)

    def discard(self) -> None:
        """Leave the lengths as they were; what was stored behind them is stale."""
        for span in self._spans:
            self._cache.mark_written(span.cache_row, span.end)
