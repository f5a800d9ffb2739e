"""What the rows of one batch see, and where their state is written: built once per pass and shared by all layers.

Shapes: N rows, R spans, Q rows of each (padded), H heads, c head dimension, T slots looked at, E entries looked at,
W entries that close in this pass. The heads of a row are rows of one matrix product, [R, Q*H, c] by [R, T, c]: there is
one latent for all heads and it is never repeated.

A row's bits do not depend on the rows beside it on the CPU: products have a multiple of 16 rows, and sums run over
whole blocks of slots (cache.SUM_SLOTS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.attention import Span
from sparkchat.models.deepseek_v4.cache import SINK_SLOTS, RatioStore, StateCache
from sparkchat.models.deepseek_v4.config import WINDOW_ONLY
from sparkchat.models.deepseek_v4.rope import Ropes, Rotations
from sparkchat.models.kv_cache import SLOT_STEP, round_up

ROW_TILE = 16


class Rectangle:
    """Lays ragged rows out as [R, Q] with the last row of a span repeated, and takes them out again."""

    def __init__(self, spans: Sequence[Span], num_heads: int, device: torch.device) -> None:
        rows = [span.cache_row for span in spans]
        # Neighbouring cache rows are a view; others are copied.
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        self.cache_rows: slice | Tensor = slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows, device=device)
        self.height, self.width = len(spans), padded_count(max(s.count for s in spans), num_heads)
        index = [span.first + min(i, span.count - 1) for span in spans for i in range(self.width)]
        back = [r * self.width + i for r, span in enumerate(spans) for i in range(span.count)]
        self._is_identity = index == back
        self._index, self._back = torch.tensor(index, device=device), torch.tensor(back, device=device)

    def spread(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R, Q, ...]"""
        x = x if self._is_identity else x.index_select(0, self._index)
        return x.unflatten(0, (self.height, self.width))

    def collect(self, x: Tensor) -> Tensor:
        """[R, Q, ...] -> [N, ...]"""
        x = x.flatten(0, 1)
        return x if self._is_identity else x.index_select(0, self._back)


def padded_count(count: int, num_heads: int) -> int:
    """Rows to compute for ``count`` of them, so that with their heads they fill whole tiles."""
    while count * num_heads % ROW_TILE:
        count += 1
    return count


@dataclass(frozen=True)
class ClosingEntries:
    """Entries whose last token is in this pass."""

    cache_rows: Tensor
    """[W]"""
    entries: Tensor
    """[W] their numbers"""
    slots: Tensor
    """[W, tokens] where the compressor rows of their tokens are"""
    is_absent: Tensor
    """[W, tokens] tokens before the first of the text"""
    rotations: Rotations
    """[W] of their first token"""


class RatioSight:
    """The part of a pass that is the same for all layers of one ratio."""

    def __init__(
        self, store: RatioStore, spans: Sequence[Span], positions: Tensor, rectangle: Rectangle, ropes: Ropes
    ) -> None:
        self.store = store
        ratio, end = store.ratio, max(s.end for s in spans)
        self.rotations = ropes.rows(ratio, positions, end)
        self.latent_slots = SINK_SLOTS + positions % store.ring
        self.raw_slots = positions % store.raw_ring if ratio else positions
        self.phases = positions % ratio if ratio else positions
        """[N] place of each row's token in its entry"""
        self.closing = _closing_entries(store, spans, positions.device, ropes)
        self.most_visible = end // ratio if ratio else 0
        self.num_entries = round_up(self.most_visible, SLOT_STEP)
        """E"""
        query = rectangle.spread(positions).unsqueeze(-1)
        entry = torch.arange(self.num_entries, device=positions.device)
        self.is_visible = entry < (query + 1) // ratio if ratio else entry < query
        """[R, Q, E] entries whose last token is no later than the row"""

    def hidden_slots(self, window_hidden: Tensor) -> Tensor:
        """window_hidden [R, Q, ring] -> [R, Q, T] slots that no head of a row may look at, but for the sink's."""
        hidden = torch.cat([window_hidden, ~self.is_visible], dim=-1)
        behind = self.store.num_slots(self.num_entries) - SINK_SLOTS - hidden.shape[-1]
        return F.pad(hidden, (SINK_SLOTS, behind), value=True)


class Sight:
    """One batch over one cache."""

    def __init__(
        self,
        cache: StateCache,
        spans: Sequence[Span],
        positions: Tensor,
        ropes: Ropes,
        num_heads: int,
        *,
        is_block: bool = False,
    ) -> None:
        """``is_block``: the rows of a span see all of the span and the window before it. Ratio 0 only."""
        device = positions.device
        self._cache, self._spans = cache, spans
        self.rectangle = Rectangle(spans, num_heads, device)
        self.cache_rows = torch.tensor([s.cache_row for s in spans for _ in range(s.count)], device=device)
        """[N]"""
        self._ratios = {
            ratio: RatioSight(store, spans, positions, self.rectangle, ropes) for ratio, store in cache.stores.items()
        }
        self._masks = {ratio: self._mask(plan, positions, is_block) for ratio, plan in self._ratios.items()}

    def _mask(self, plan: RatioSight, positions: Tensor, is_block: bool) -> Tensor:
        """[R, Q, T] float: 0 where a row sees a slot, -inf elsewhere."""
        assert not is_block or plan.store.ratio == WINDOW_ONLY
        query = self.rectangle.spread(positions).unsqueeze(-1)
        ring, window = plan.store.ring, plan.store.window
        last = torch.tensor([s.end - 1 for s in self._spans], device=positions.device).view(-1, 1, 1)
        # The newest position that can be in the slot; rejected rows behind the last query count as positions one
        # lap earlier, which lie outside every window (RatioStore.can_resume).
        slot = torch.arange(ring, device=positions.device)
        position = last - (last - slot) % ring
        if is_block:
            start = torch.tensor([s.start for s in self._spans], device=positions.device).view(-1, 1, 1)
            hidden = (position < start - window).expand(-1, query.shape[1], -1)
        else:
            hidden = (position > query) | (position <= query - window)
        hidden = plan.hidden_slots(hidden | (position < 0))
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device=positions.device)
        return mask.masked_fill_(hidden, float("-inf"))

    @property
    def asks_host(self) -> bool:
        """Whether shapes may depend on what is in the batch; captured steps may not (RowSight)."""
        return True

    def of(self, ratio: int) -> RatioSight:
        return self._ratios[ratio]

    def write_latents(self, layer: int, latents: Tensor) -> None:
        """Keep the window latents [N, c] of a layer."""
        ratio, index = self._cache.places[layer]
        plan = self._ratios[ratio]
        data = plan.store.latents.data[index]
        data[self.cache_rows, plan.latent_slots] = latents.to(data.dtype)

    def index_of(self, layer: int) -> int:
        """A layer's place among those of its ratio."""
        return self._cache.places[layer][1]

    def attend(self, layer: int, q: Tensor, sinks: Tensor, chosen: Tensor | None = None) -> Tensor:
        """q [N, H, c], sinks [H], chosen [R, Q, E] bool or None for every visible entry -> [N, H, c].

        One softmax over the window, the entries and the sink, which takes weight and gives nothing.
        """
        ratio, index = self._cache.places[layer]
        plan, mask = self._ratios[ratio], self._masks[ratio]
        if chosen is not None:
            mask = mask.clone()
            entries = mask[..., plan.store.first_entry :][..., : plan.num_entries]
            entries.masked_fill_(~chosen, float("-inf"))
        latents = plan.store.latents.data[index][self.rectangle.cache_rows, : mask.shape[-1]]
        return self.rectangle.collect(attend_with_sinks(self.rectangle.spread(q), latents, mask, sinks))

    def advance(self) -> None:
        """Count the rows of all spans as cached."""
        for span in self._spans:
            self._cache.advance(span.cache_row, span.end)

    def discard(self) -> None:
        """Leave the lengths as they were; what was stored behind them is stale."""
        for span in self._spans:
            self._cache.mark_written(span.cache_row, span.end)


def attend_with_sinks(q: Tensor, latents: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """q [R, Q, H, c], latents [R, T, c] as keys and values, slot 0 of them zero, mask [R, Q, T], sinks [H]
    -> [R, Q, H, c] in the latents' dtype. Scores are divided by the root of c, sinks are not.
    """
    count, width, heads, size = q.shape
    q = q.reshape(count, width * heads, size).to(latents.dtype)
    # A zero key scores 0, and the mask makes the sink of it; a zero value adds nothing.
    full = mask.unsqueeze(2).repeat(1, 1, heads, 1)
    full[..., 0] = sinks
    full = full.flatten(1, 2)
    if latents.dtype == torch.float32:
        keys = latents.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys, attn_mask=full.unsqueeze(1))
    else:
        # The mask would be rounded with the queries, and the sinks in it.
        scores = (q @ latents.transpose(1, 2)).float() * size**-0.5 + full
        mixed = scores.softmax(dim=-1).to(latents.dtype) @ latents
    return mixed.reshape(count, width, heads, size)


def _closing_entries(
    store: RatioStore, spans: Sequence[Span], device: torch.device, ropes: Ropes
) -> ClosingEntries | None:
    ratio = store.ratio
    if not ratio:
        return None
    closing = [(s.cache_row, w) for s in spans for w in range(s.start // ratio, s.end // ratio)]
    if not closing:
        return None
    rows, entries = torch.tensor(closing, device=device).unbind(1)
    steps = torch.arange(-(store.depth - 1) * ratio, ratio, device=device)
    tokens = entries.unsqueeze(1) * ratio + steps
    last = max(w for _, w in closing) * ratio
    return ClosingEntries(
        rows, entries, tokens % store.raw_ring, tokens < 0, ropes.rows(ratio, entries * ratio, last + 1)
    )
