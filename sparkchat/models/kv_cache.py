"""Keys and values of past positions: rows are requests, storage grows, sliding windows are rings.

Layers of one window share one tensor, so a forward pass takes the views of all of them at once. Positions are slots
in a growing store; in a ring, position p lives in slot p modulo the capacity. Storage that grows may have a limit, and
then takes no more in advance than it allows. On devices with captured steps rows share pages instead (paged_cache.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_STEP = 16
_SUM_BLOCK, _SUM_PART = 512, 256
_FIRST_SLOTS = 256


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def key_slots(n: int) -> int:
    """Return how many slots attention runs over for ``n`` keys, the rest being masked.

    Sums over the keys must come out the same whatever is masked behind them, so that a row's result does not depend
    on how far its neighbours reach. On the CPU they are taken in blocks of 512 keys, a last block of 257 to 511 keys
    in halves of whatever size; so such a block is made whole.
    """
    n = round_up(n, SLOT_STEP)
    return n if n % _SUM_BLOCK <= _SUM_PART else round_up(n, _SUM_BLOCK)


@dataclass(frozen=True)
class SavedRow:
    """A row's contents on the host, while the row is somebody else's."""

    length: int
    written: int
    parts: tuple[Tensor, ...]
    """The bytes of each store, layers first."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class LayerStore:
    """Storage of the layers of one window: [layers, rows, 2 * kv_heads, slots, head_dim], keys before values."""

    pages: Tensor | None = None
    """[rows, n] int32 on the device where positions lie in pages (paged_cache.py)."""

    def __init__(self, num_layers: int, width: tuple[int, int], window: int | None, slots: int, limit: int) -> None:
        self.num_layers, self._width, self.window = num_layers, width, window
        self._slots, self._limit = slots, limit
        self.data: Tensor

    @property
    def slots(self) -> int:
        return self.data.shape[3]

    @property
    def is_ring(self) -> bool:
        return self.window is not None

    def create(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = self._zeros(rows, self._slots, dtype, device)

    def _zeros(self, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Zeros, not empty: masked slots are still multiplied, and 0 x NaN would spread.
        heads, head_dim = self._width
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.zeros((self.num_layers, rows, 2 * heads, slots, head_dim), dtype=dtype, device=device)

    def grow(self, rows: int, slots: int) -> None:
        """Make room for ``rows`` rows and, in a store that is no ring, ``slots`` positions; doubles at least."""
        old = self.data
        have_rows, have_slots = old.shape[1], old.shape[3]
        if self.is_ring:
            slots = have_slots
        if rows <= have_rows and slots <= have_slots:
            return
        if slots > have_slots:
            slots = max(slots, min(2 * have_slots, self._limit))
        slots = max(key_slots(slots), have_slots)
        self.data = self._zeros(max(rows, have_rows), slots, old.dtype, old.device)
        self.data[:, :have_rows, :, :have_slots] = old

    def resize(self, rows: int, slots: int) -> None:
        """Exactly so many rows and slots; what lies beyond is gone."""
        old = self.data
        self.data = self._zeros(rows, slots, old.dtype, old.device)
        rows, slots = min(rows, old.shape[1]), min(slots, old.shape[3])
        self.data[:, :rows, :, :slots] = old[:, :rows, :, :slots]

    def clear(self, row: int, written: int) -> None:
        """Zeros in the place of all that was written below ``written``: a damaged model may have left NaN there."""
        self.data[:, row, :, : min(written, self.slots)].zero_()

    def locate(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where positions of cache rows lie: indices of the second and the fourth dimension of ``data``."""
        return rows, positions % self.slots

    def save(self, row: int, length: int) -> Tensor:
        """What the row holds of positions below ``length``, on the host; a ring as it is."""
        slots = self.slots if self.is_ring else length
        return self.data[:, row, :, :slots].cpu().clone()

    def restore(self, row: int, part: Tensor) -> None:
        self.data[:, row, :, : part.shape[2]].copy_(part)


class KVCache:
    """The cached positions of up to ``max_rows`` requests.

    Rollback is ``truncate``: rows behind the length are stale, are never visible, and are written over.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_kv_heads: int,
        head_dim: int,
        *,
        max_rows: int,
        context: int,
        max_span: int,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
    ) -> None:
        """``windows`` has one entry per layer; ``max_span`` is the most rows one span may have; ``tokens`` is the most
        that storage which grows may come to, rows times slots, where it must not come to all of them."""
        self._most = None if tokens is None else max(tokens, key_slots(context))
        self._ends: dict[int, int] = {}
        """Row -> how many positions it holds room for, where room is limited."""
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.max_rows, self.context, self.max_span = max_rows, context, max_span
        limit = key_slots(context)
        # A window that the context cannot leave is no window.
        windows = [None if w is None or w >= limit else w for w in windows]
        self.stores: list[LayerStore] = []
        self.places: list[tuple[int, int]] = []
        """[layer] -> (store, index in it)"""
        for window in dict.fromkeys(windows):
            # A ring must hold the window of the span's first row and the whole span.
            slots = min(limit, _FIRST_SLOTS if window is None else key_slots(window - 1 + max_span))
            num_layers = sum(w == window for w in windows)
            self.stores.append(self._make_store(num_layers, window, slots, dtype, device))
        counts = [0] * len(self.stores)
        for window in windows:
            index = next(i for i, store in enumerate(self.stores) if store.window == window)
            self.places.append((index, counts[index]))
            counts[index] += 1
        self._lengths: dict[int, int] = {}
        self._written = [0] * max_rows
        """[max_rows] one more than the highest position ever written in the row."""

    def _make_store(
        self, num_layers: int, window: int | None, slots: int, dtype: torch.dtype, device: torch.device
    ) -> LayerStore:
        width, limit = (self.num_kv_heads, self.head_dim), key_slots(self.context)
        store = LayerStore(num_layers, width, window, slots, limit)
        store.create(1, dtype, device)
        return store

    def allocate(self) -> int:
        """Take the lowest free row, empty. Raises ValueError when all rows are taken."""
        row = next((r for r in range(self.max_rows) if r not in self._lengths), None)
        if row is None:
            raise ValueError(f"all {self.max_rows} cache rows are taken")
        have = self.stores[0].data.shape[1] if self.stores else 1
        rows = min(self.max_rows, max(row + 1, have if row < have else 2 * have))
        self._lengths[row] = self._ends[row] = 0
        for store in self.stores:
            self._grow(store, rows, store.slots)
            if self._written[row]:
                store.clear(row, self._written[row])
        self._written[row] = 0
        return row

    def _grow(self, store: LayerStore, rows: int, slots: int) -> None:
        """Room for ``rows`` rows of ``slots``, and some in advance; only what is needed where room is limited."""
        have_rows, have_slots = store.data.shape[1], store.slots
        if self._most is None or store.is_ring or (rows <= have_rows and slots <= have_slots):
            store.grow(rows, slots)
            return
        slots = max(have_slots, slots if slots <= have_slots else max(slots, 2 * have_slots))
        slots = min(key_slots(slots), key_slots(self.context))
        if max(rows, have_rows) * slots > self._most:
            rows, slots = self._needed()
            slots = max(slots, self._most // rows // _SUM_BLOCK * _SUM_BLOCK)
        store.resize(max(rows, self._needed()[0]), slots)

    def _needed(self) -> tuple[int, int]:
        """Rows up to the last that is held, and slots of the longest."""
        return max(self._lengths, default=0) + 1, key_slots(max(1, *self._ends.values()))

    def fill(self) -> None:
        """Take all the storage there can be, so that addresses never change again."""
        for store in self.stores:
            store.grow(self.max_rows, self.context)

    def free(self, row: int) -> None:
        del self._lengths[row]
        self._ends.pop(row, None)

    def can_take(self, row: int | None, end: int, without: Collection[int] = ()) -> bool:
        """Whether there is room for the positions below ``end`` of a row (None: of a new one), once the rows
        ``without`` are free."""
        if row is None and len(self._lengths) - len(without) >= self.max_rows:
            return False
        if self._most is None or all(store.is_ring for store in self.stores):
            return True
        ends = [held for other, held in self._ends.items() if other not in without]
        return (len(ends) + (row is None)) * key_slots(max(end, 1, *ends)) <= self._most

    def take(self, row: int, end: int) -> int:
        """Hold room for the positions of the row below ``end``; returns how far it holds room now."""
        self._ends[row] = max(self._ends[row], end)
        return self.context if self._most is None else self._ends[row]

    def trim(self, row: int) -> None:
        """Give back room behind the row's length."""
        self._ends[row] = self._lengths[row]

    def close_gaps(self) -> dict[int, int]:
        """Where room is limited and rows that are free lie between others: move the last ones there, so that storage
        may end behind those that are held. Returns where each moved row lies now."""
        moved: dict[int, int] = {}
        while self._most is not None and len(self._lengths) <= (source := max(self._lengths, default=-1)):
            target = next(row for row in range(source) if row not in self._lengths)
            for store in self.stores:
                store.data[:, target] = store.data[:, source]
            self._lengths[target], self._ends[target] = self._lengths.pop(source), self._ends.pop(source)
            self._written[target] = self._written[source]
            moved[source] = target
        return moved

    def publish(self) -> None:
        """Bring the device up to date on who holds what."""

    def save(self, row: int) -> SavedRow:
        """The row's contents as they are, for ``restore``."""
        length = self._lengths[row]
        return SavedRow(length, self._written[row], tuple(store.save(row, length) for store in self.stores))

    def restore(self, saved: SavedRow) -> int:
        """A row with these contents. Raises ValueError where there is no room."""
        row = self.allocate()
        self._make_room(row, saved.length)
        for store, part in zip(self.stores, saved.parts, strict=True):
            store.restore(row, part)
        self._lengths[row], self._written[row] = saved.length, saved.written
        return row

    def _make_room(self, row: int, end: int) -> None:
        """Storage for positions below ``end`` of the row."""
        self.take(row, end)
        for store in self.stores:
            self._grow(store, store.data.shape[1], end)

    def length(self, row: int) -> int:
        """Positions 0..length-1 of the row are cached."""
        return self._lengths[row]

    def can_truncate(self, row: int, length: int) -> bool:
        """Whether the row can go on from ``length``: a ring may have written over what is needed."""
        if not 0 <= length <= self._lengths[row]:
            return False
        return all(
            max(0, length - store.window + 1) >= self._written[row] - store.slots
            for store in self.stores
            if store.window is not None
        )

    def truncate(self, row: int, length: int) -> None:
        """Forget the positions from ``length`` on. Raises ValueError where ``can_truncate`` says no."""
        if not self.can_truncate(row, length):
            raise ValueError(f"cache row {row} holds {self._lengths[row]} positions and cannot go back to {length}")
        self._lengths[row] = length

    def reserve(self, row: int, count: int) -> int:
        """Make room for ``count`` more positions of the row and return the first of them."""
        start = self._lengths[row]
        if count > self.max_span and any(store.is_ring for store in self.stores):
            raise ValueError(f"a span of {count} rows does not fit rings made for {self.max_span}")
        if start + count > self.context:
            raise ValueError(f"position {start + count - 1} is outside the context of {self.context}")
        self._make_room(row, start + count)
        return start

    def mark_written(self, row: int, end: int) -> None:
        """Positions below ``end`` of the row have been stored; what a ring held ``slots`` earlier is gone."""
        self._written[row] = max(self._written[row], end)

    def advance(self, row: int, end: int) -> None:
        """Positions below ``end`` of the row are now cached."""
        self.mark_written(row, end)
        self._lengths[row] = end

    @property
    def num_bytes(self) -> int:
        """Storage held now."""
        return sum(store.data.nbytes for store in self.stores)
