"""Per-request state of DeepSeek V4: latents, compressed entries, and what unfinished entries are made of.

Window latents and per-token compressor rows are rings addressed by position with room for a whole span beside what
the span's first row needs, so that taking back rows of a span takes back nothing else: rollback is ``truncate``.
Entries are a function of the tokens they cover: those behind the length are stale, are never visible, and are written
again when their last token comes again.

Shapes: L layers of one ratio, R cache rows, c head dimension. A layer's latents are [R, slots, c] in one piece, so that
attention reads one view: slots 0 to 15 stay zero (slot 0 stands for the sink), then the window's ring, then entries,
then in float32 as many that stay zero as fill the last block of slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.kv_cache import SLOT_STEP, round_up

SINK_SLOTS = SLOT_STEP
SUM_SLOTS = 512
"""Float32 attention on the CPU sums over keys in blocks of so many. A smaller last block may be summed in parts whose
sizes depend on its own, so all are made whole: what is masked behind a row's keys then changes none of its bits."""
_FIRST_ENTRIES = 64


class GrowingRows:
    """A tensor [L, R, slots, width] of zeros that grows in rows and, where it may, in slots."""

    def __init__(self, layers: int, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not empty: masked slots are still multiplied, and 0 x NaN would spread.
        self.data = torch.zeros((layers, 1, slots, width), dtype=dtype, device=device)

    def grow(self, rows: int, slots: int) -> None:
        layers, have_rows, have_slots, width = self.data.shape
        if rows <= have_rows and slots <= have_slots:
            return
        shape = (layers, max(rows, have_rows), max(slots, have_slots), width)
        old, self.data = self.data, self.data.new_zeros(shape)
        self.data[:, :have_rows, :have_slots] = old


class RatioStore:
    """Everything kept for the layers of one ratio."""

    def __init__(
        self,
        config: DeepseekV4Config,
        ratio: int,
        num_layers: int,
        *,
        context: int,
        max_span: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.ratio, self.window = ratio, config.window
        self.depth = 2 if ratio == SPARSE_RATIO else 1
        """Windows of ``ratio`` tokens that an entry is made of."""
        whole = round_up(context, SLOT_STEP)
        self.ring = min(whole, round_up(config.window - 1 + max_span, SLOT_STEP))
        """Positions the window's ring holds."""
        self.raw_ring = min(whole, round_up(self.depth * ratio - 1 + max_span, SLOT_STEP)) if ratio else 0
        """Positions the rings of compressor rows hold."""
        self._most_entries = round_up(whole // ratio, SLOT_STEP) if ratio else 0
        self.num_entries = min(_FIRST_ENTRIES, self._most_entries)
        """Entries there is room for now."""

        def rows(slots: int, width: int, kind: torch.dtype) -> GrowingRows:
            return GrowingRows(num_layers, slots, width, kind, device)

        self._slot_step = SUM_SLOTS if dtype == torch.float32 else SLOT_STEP
        self.latents = rows(self.num_slots(self.num_entries), config.head_dim, dtype)
        self.raw = self.index_keys = self.index_raw = None
        if ratio != WINDOW_ONLY:
            self.raw = rows(self.raw_ring, 2 * self.depth * config.head_dim, torch.float32)
        if ratio == SPARSE_RATIO:
            self.index_keys = rows(self.num_entries, config.index_head_dim, dtype)
            self.index_raw = rows(self.raw_ring, 2 * self.depth * config.index_head_dim, torch.float32)

    @property
    def first_entry(self) -> int:
        """Slot of entry 0 among the latents."""
        return SINK_SLOTS + self.ring

    def num_slots(self, num_entries: int) -> int:
        """Slots of latents to run over where that many entries are looked at."""
        return round_up(self.first_entry + num_entries, self._slot_step)

    @property
    def parts(self) -> list[GrowingRows]:
        return [p for p in (self.latents, self.raw, self.index_keys, self.index_raw) if p is not None]

    def grow(self, rows: int, positions: int) -> None:
        """Make room for ``rows`` rows and the entries of ``positions`` positions; entries double at least."""
        needed = positions // self.ratio if self.ratio else 0
        if needed > self.num_entries:
            doubled = min(2 * self.num_entries, self._most_entries)
            self.num_entries = max(round_up(needed, SLOT_STEP), doubled)
        self.latents.grow(rows, self.num_slots(self.num_entries))
        for part in (self.raw, self.index_raw):
            if part is not None:
                part.grow(rows, self.raw_ring)
        if self.index_keys is not None:
            self.index_keys.grow(rows, self.num_entries)

    def rings(self, row: int) -> list[torch.Tensor]:
        """Views of a row's rings, whole: what a longer text writes over."""
        raw = [part.data[:, row] for part in (self.raw, self.index_raw) if part is not None]
        return [self.latents.data[:, row, SINK_SLOTS : self.first_entry], *raw]

    def clear(self, row: int) -> None:
        for part in self.parts:
            part.data[:, row].zero_()

    def can_resume(self, length: int, written: int) -> bool:
        """Whether rings in which every position below ``written`` was stored still hold what ``length`` needs."""
        if max(0, length - self.window + 1) < written - self.ring:
            return False
        if self.ratio == WINDOW_ONLY:
            return True
        first_open = (length // self.ratio - (self.depth - 1)) * self.ratio
        return max(0, first_open) >= written - self.raw_ring


class StateCache:
    """The state of up to ``max_rows`` requests; the calls are those of ``KVCache``."""

    def __init__(
        self,
        config: DeepseekV4Config,
        ratios: Sequence[int],
        *,
        max_rows: int,
        context: int,
        max_span: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``ratios`` has one entry per layer; ``max_span`` is the most rows one span may have."""
        self.max_rows, self.context, self.max_span = max_rows, context, max_span
        self.stores = {
            ratio: RatioStore(
                config, ratio, ratios.count(ratio), context=context, max_span=max_span, dtype=dtype, device=device
            )
            for ratio in dict.fromkeys(ratios)
        }
        self.places = [(ratio, ratios[:layer].count(ratio)) for layer, ratio in enumerate(ratios)]
        """[layer] -> (ratio, index among the layers of that ratio)"""
        self._num_rows = 1
        self._lengths: dict[int, int] = {}
        self._written = [0] * max_rows
        """[max_rows] one more than the highest position ever written in the row."""
        self._kept: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """Row -> the length at which its rings were kept, and copies of them."""

    def allocate(self) -> int:
        """Take the lowest free row, empty. Raises ValueError when all rows are taken."""
        row = next((r for r in range(self.max_rows) if r not in self._lengths), None)
        if row is None:
            raise ValueError(f"all {self.max_rows} cache rows are taken")
        if row >= self._num_rows:
            self._num_rows = min(self.max_rows, max(row + 1, 2 * self._num_rows))
        for store in self.stores.values():
            store.grow(self._num_rows, 0)
            if self._written[row]:
                # What a damaged model left there may be NaN.
                store.clear(row)
        self._written[row] = 0
        self._lengths[row] = 0
        return row

    def fill(self) -> None:
        """Take all the storage there can be, so that addresses never change again."""
        self._num_rows = self.max_rows
        for store in self.stores.values():
            store.grow(self.max_rows, round_up(self.context, SLOT_STEP))

    def free(self, row: int) -> None:
        del self._lengths[row]
        self._kept.pop(row, None)

    def keep(self, row: int) -> None:
        """Keep the rings as they are: from here on the row can come back to this length, however far it goes on.

        One length is kept for a row, the latest.
        """
        self._kept[row] = (self._lengths[row], [ring.clone() for ring in self._rings(row)])

    def _rings(self, row: int) -> list[torch.Tensor]:
        return [ring for store in self.stores.values() for ring in store.rings(row)]

    def length(self, row: int) -> int:
        """Positions 0..length-1 of the row are cached."""
        return self._lengths[row]

    def can_truncate(self, row: int, length: int) -> bool:
        """Whether the row can go on from ``length``: a ring may have written over what is needed."""
        return self._can_resume(row, length, self._written[row]) or self._can_restore(row, length)

    def _can_restore(self, row: int, length: int) -> bool:
        """Whether the row can go on from ``length`` with the rings that were kept."""
        kept = self._kept.get(row)
        return kept is not None and length <= kept[0] and self._can_resume(row, length, kept[0])

    def _can_resume(self, row: int, length: int, written: int) -> bool:
        """Whether rings in which every position below ``written`` was stored hold what ``length`` needs."""
        if not 0 <= length <= self._lengths[row]:
            return False
        return all(store.can_resume(length, written) for store in self.stores.values())

    def truncate(self, row: int, length: int) -> None:
        """Forget the positions from ``length`` on. Raises ValueError where ``can_truncate`` says no."""
        if not self.can_truncate(row, length):
            raise ValueError(f"cache row {row} holds {self._lengths[row]} positions and cannot go back to {length}")
        if not self._can_resume(row, length, self._written[row]):
            self._written[row], rings = self._kept[row]
            for ring, kept in zip(self._rings(row), rings, strict=True):
                ring.copy_(kept)
        self._lengths[row] = length
        if row in self._kept and length < self._kept[row][0]:
            # What was kept belongs to a text that is no longer this row's.
            del self._kept[row]

    def reserve(self, row: int, count: int) -> int:
        """Make room for ``count`` more positions of the row and return the first of them."""
        start = self._lengths[row]
        if count > self.max_span:
            raise ValueError(f"a span of {count} rows does not fit rings made for {self.max_span}")
        if start + count > round_up(self.context, SLOT_STEP):
            raise ValueError(f"position {start + count - 1} is outside the context of {self.context}")
        for store in self.stores.values():
            store.grow(self._num_rows, start + count)
        return start

    def mark_written(self, row: int, end: int) -> None:
        """Positions below ``end`` of the row have been stored; what a ring held a lap earlier is gone."""
        self._written[row] = max(self._written[row], end)

    def advance(self, row: int, end: int) -> None:
        """Positions below ``end`` of the row are now cached."""
        self.mark_written(row, end)
        self._lengths[row] = end

    @property
    def num_bytes(self) -> int:
        """Storage held now."""
        return sum(part.data.nbytes for store in self.stores.values() for part in store.parts)
