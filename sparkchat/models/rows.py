"""Packed rows whose every number lies on the device, and their attention: what a captured step runs.

Nothing here asks the host anything, so the same launches fit any requests. Shapes: N rows, H = G*K query heads, K key
heads, T key slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.kv_cache import KVCache, LayerStore
from sparkchat.models.paged_cache import PagedStore


@dataclass(frozen=True)
class RowBatch:
    """Rows of any requests in any order; all tensors [N] int64. Unlike ``ForwardBatch`` it holds no host numbers."""

    token_ids: Tensor
    positions: Tensor
    cache_rows: Tensor
    ends: Tensor
    """Positions below this are seen: position + 1, or for rows of a block, which see each other, the block's end."""
    starts: Tensor | None = None
    """[R+1] int32: rows starts[r]:starts[r+1] are request r's, rows behind starts[R] nobody's."""
    spare_row: int = 0
    """A cache row that is nobody's, for what has to be written somewhere."""


class RowAttention:
    """Everything about one batch of rows that its layers share.

    The storage must have its final size (``KVCache.fill``): a captured launch keeps the addresses it was made with.
    """

    def __init__(self, cache: KVCache, rows: RowBatch, group_size: int) -> None:
        self._cache, self._rows, self._group_size = cache, rows, group_size
        self._places = [store.locate(rows.cache_rows, rows.positions) for store in cache.stores]
        self._readers = [
            store.reader(rows.cache_rows, store.slots) if isinstance(store, PagedStore) else None
            for store in cache.stores
        ]
        self._masks = [self._mask(store) for store in cache.stores]

    def _mask(self, store: LayerStore) -> Tensor:
        """[N, 1, 1, T]: 0 where a row sees a slot, -inf elsewhere."""
        slot = torch.arange(store.slots, device=self._rows.ends.device)
        ends = self._rows.ends[:, None]
        if store.window is None:
            hidden = slot >= ends
        else:
            # The newest position that can be in the slot, as in attention.StoreView.
            position = ends - 1 - (ends - 1 - slot) % store.slots
            hidden = (position <= ends - 1 - store.window) | (position < 0)
        mask = torch.zeros(hidden.shape, dtype=store.data.dtype, device=slot.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [N, 2K, D] (keys, then values), then attend from q [N, G*K, D] -> [N, G*K*D]."""
        place, index = self._cache.places[layer]
        data = self._cache.stores[place].data[index]
        at, slot = self._places[place]
        data[at, :, slot] = kv.to(data.dtype)
        reader = self._readers[place]
        held = data.index_select(0, at) if reader is None else reader.read(index)
        keys, values = held.chunk(2, dim=1)
        count, heads = q.shape[0], keys.shape[1]
        grouped = q.to(keys.dtype).view(count, self._group_size, heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._masks[place])
        return mixed.transpose(1, 2).reshape(count, -1)
