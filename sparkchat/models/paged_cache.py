"""Keys and values in pages that all rows share: a row holds as many as its positions need, wherever they lie.

Full-attention layers of a target or drafter on a device with captured steps. Layers with a sliding window keep their
rings, a row each: their size is fixed and small. All storage is there from the start, so addresses never change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sparkchat.models.kv_cache import KVCache, LayerStore, key_slots
from sparkchat.models.page_table import PAGE_SIZE, PageTable, pages_of, to_device


class PagedStore(LayerStore):
    """Storage of full-attention layers: [layers, pages, 2 * kv_heads, PAGE_SIZE, head_dim], keys before values.

    The first page stays blank, the last one is for rows that are nobody's.
    """

    def __init__(
        self, num_layers: int, width: tuple[int, int], table: PageTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_layers, width, None, PAGE_SIZE, table.width * PAGE_SIZE)
        self._table = table
        self.pages = table.numbers
        self.create(table.num_pages + 2, dtype, device)

    @property
    def slots(self) -> int:
        """Positions that a row may have."""
        return self._table.width * PAGE_SIZE

    @property
    def spare_page(self) -> int:
        return self._table.num_pages + 1

    def grow(self, rows: int, slots: int) -> None:
        """There is no more to be had."""

    def clear(self, row: int, written: int) -> None:
        """Pages are made zeros when they are taken (PagedCache.publish)."""

    def locate(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._table.numbers[rows, positions // PAGE_SIZE].long(), positions % PAGE_SIZE

    def reader(self, rows: Tensor, length: int) -> PageReader:
        """Reads the first ``length`` positions of these rows [R]."""
        return PageReader(self.data, self._table.numbers[rows, : pages_of(length)], length)

    def save(self, row: int, length: int) -> Tensor:
        """[layers, n, 2K, PAGE_SIZE, D] of the row's first pages; a layer at a time, as room may be short."""
        pages = self._row_pages(row, pages_of(length))
        return torch.stack([layer.index_select(0, pages).cpu() for layer in self.data])

    def restore(self, row: int, part: Tensor) -> None:
        pages = self._row_pages(row, part.shape[1])
        for layer, saved in zip(self.data, part, strict=True):
            layer.index_copy_(0, pages, saved.to(layer.device))

    def _row_pages(self, row: int, count: int) -> Tensor:
        return torch.tensor(self._table.held(row)[:count], dtype=torch.int64, device=self.data.device)


class PageReader:
    """Gathers what rows hold, one layer after the other, in one launch each."""

    def __init__(self, data: Tensor, pages: Tensor, length: int) -> None:
        """data [layers, pages, 2K, PAGE_SIZE, D]; pages [R, n] int32."""
        heads = data.shape[2]
        # A page of one head is one piece: [pages * 2K, PAGE_SIZE, D].
        self._data = data.flatten(1, 2)
        head = torch.arange(heads, device=pages.device)[:, None]
        self._index = pages.long()[:, None] * heads + head
        self._shape = (heads, pages.shape[1] * PAGE_SIZE, data.shape[4])
        self._length = length
        self.bytes_per_row = heads * self._shape[1] * self._shape[2] * data.itemsize

    def read(self, index: int, low: int = 0, high: int | None = None) -> Tensor:
        """[R, 2K, length, D] of layer ``index`` of the store; of the rows from ``low`` to ``high``."""
        picked = self._index[low:high].flatten()
        return self._data[index].index_select(0, picked).view(-1, *self._shape)[:, :, : self._length]


class PagedCache(KVCache):
    """As ``KVCache``; full-attention layers lie in ``num_pages`` pages of all rows together."""

    def __init__(
        self,
        windows: Sequence[int | None],
        num_kv_heads: int,
        head_dim: int,
        *,
        num_pages: int,
        max_rows: int,
        context: int,
        max_span: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError where not even one row would fit."""
        width = pages_of(key_slots(context))
        if num_pages < pages_of(context):
            raise ValueError(f"{num_pages} pages do not hold a context of {context}")
        self.table = PageTable(max_rows, width, num_pages, device)
        super().__init__(
            windows,
            num_kv_heads,
            head_dim,
            max_rows=max_rows,
            context=context,
            max_span=max_span,
            dtype=dtype,
            device=device,
        )
        for store in self.stores:
            if store.is_ring:
                store.grow(max_rows, store.slots)

    def _make_store(
        self, num_layers: int, window: int | None, slots: int, dtype: torch.dtype, device: torch.device
    ) -> LayerStore:
        if window is not None:
            return super()._make_store(num_layers, window, slots, dtype, device)
        return PagedStore(num_layers, (self.num_kv_heads, self.head_dim), self.table, dtype, device)

    @property
    def num_tokens(self) -> int:
        """Positions that all rows may hold together."""
        return self.table.num_pages * PAGE_SIZE

    @property
    def num_free_tokens(self) -> int:
        return self.table.num_free * PAGE_SIZE

    def fill(self) -> None:
        """All storage was taken in the beginning."""

    def allocate_spare(self) -> int:
        """A row that is nobody's, whose positions all lie in one page."""
        row = self.allocate()
        self.lend(row, 0)
        return row

    def lend(self, row: int, tokens: int) -> None:
        """Spread the first ``tokens`` positions of a row that is nobody's over pages that are free now, as far as there
        are some; with 0, all of them lie in one page again. Nobody may take pages in between."""
        spare = next(store.spare_page for store in self.stores if isinstance(store, PagedStore))
        self.table.fold(row, self.table.free_pages(pages_of(tokens)) or [spare])
        self.publish()

    def free(self, row: int) -> None:
        super().free(row)
        self.table.give_back(row)

    def can_take(self, row: int | None, end: int, without: Collection[int] = ()) -> bool:
        gained = sum(len(self.table.held(r)) for r in without)
        return super().can_take(row, end, without) and self.table.missing(row, end) <= self.table.num_free + gained

    def close_gaps(self) -> dict[int, int]:
        """A page is as good as any other."""
        return {}

    def take(self, row: int, end: int) -> int:
        """Raises ValueError when too few pages are free."""
        self.table.take(row, end)
        return len(self.table.held(row)) * PAGE_SIZE

    def trim(self, row: int) -> None:
        self.table.give_back(row, self._lengths[row])

    def publish(self) -> None:
        """Pages that were somebody else's become zeros first: a damaged model may have left NaN in them."""
        stale = self.table.publish()
        if stale:
            device = self.table.numbers.device
            pages = to_device(torch.tensor(stale, dtype=torch.int64), device)
            for store in self.stores:
                if isinstance(store, PagedStore):
                    store.data.index_fill_(1, pages, 0.0)

    def _make_room(self, row: int, end: int) -> None:
        self.take(row, end)
        self.publish()
