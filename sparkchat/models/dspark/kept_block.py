"""A drafted block of one request as a job of the processor's threads whose words are written once.

From round to round only positions, features and the anchor change; planning the same three parts anew costs as much as
a fifth of what they do.

Shapes: c context rows, n block rows, m tapped layers, d hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparkchat.models.dspark.backbone import Backbone
from sparkchat.models.kv_cache import KVCache, round_up
from sparkchat.models.native import LaneLinear, RowWriter, run_lines

if TYPE_CHECKING:
    from sparkchat.kernels.cpu.matrix import Part

_ENDS = 256
"""Room for scores is made for whole numbers of so many positions."""


class KeptBlocks:
    """The blocks of a drafter that were drafted before, by their shape."""

    most_pending = 8
    """Context rows of a block that is kept: more come from prompts and pauses, and hardly twice in one number."""

    def __init__(self, backbone: Backbone, head: LaneLinear, mask: int) -> None:
        self.backbone, self.head, self.mask = backbone, head, mask
        self._kept: dict[tuple[int, int], _Block] = {}

    def draft(
        self, pending: Sequence[Tensor], anchor: int, count: int, row: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """``Drafter.draft_block`` of one request: pending features [c, m*d] in all, 0 < c <= ``most_pending``, and a
        block of n = ``count`` rows behind them in this cache row.

        Returns hidden [n, d] and base [n, Vd], which the next block of this shape writes over.
        """
        more = sum(features.shape[0] for features in pending)
        start = cache.reserve(row, more + count)
        end = start + more + count
        self.backbone.prepare(end)
        block = self._kept.get((more, count))
        if block is None or not block.fits(cache, self.backbone, end):
            block = self._kept[more, count] = _Block(self, cache, (more, count), end)
        block.write(pending, anchor, row, start)
        cache.advance(row, start + more)
        cache.mark_written(row, end)
        run_lines(block.lines, block.threads)
        return block.hidden, block.base


class _Block:
    """One shape's job, and all that its words point to."""

    def __init__(self, owner: KeptBlocks, cache: KVCache, shape: tuple[int, int], end: int) -> None:
        from sparkchat.kernels.cpu.decoder import Rows

        (more, count), backbone = shape, owner.backbone
        self.threads = torch.get_num_threads()
        self._most = round_up(end, _ENDS)
        self._anchor = RowWriter(backbone.embedding.weight)
        self._store, self._rope = cache.stores[0].data, backbone.rope_numbers
        self._numbers = np.zeros(3 * (more + count), np.int64)
        context_rows, rows = (
            Rows(numbers.reshape(3, -1), self._most) for numbers in np.split(self._numbers, [3 * more])
        )
        self._behind, self._is_place, self._row = _places(more, count), _is_place(more, count), 0
        features, x, context, stack, self.hidden = backbone.plan_kept(cache, context_rows, rows)
        last, self.base = owner.head.plan(self.hidden)
        # NumPy moves a few rows in a fraction of what torch takes.
        self._features, self._x = features.numpy(), x.numpy()
        self._masks = backbone.embedding(torch.full((count - 1,), owner.mask)).numpy()
        parts: list[Part] = [context, stack, last]
        self._held = parts
        self.lines = np.array([(part.work, part.job.ctypes.data) for part in parts], np.int64)

    def fits(self, cache: KVCache, backbone: Backbone, end: int) -> bool:
        """Whether nothing that the words point to has moved, and there is room for scores."""
        is_same = self._store is cache.stores[0].data and self._rope is backbone.rope_numbers
        return is_same and end <= self._most and self.threads == torch.get_num_threads()

    def write(self, pending: Sequence[Tensor], anchor: int, row: int, start: int) -> None:
        """Features [c, m*d] in all of positions ``start``, ..., and the block's first token behind them."""
        first = 0
        for features in pending:
            last = first + features.shape[0]
            self._features[first:last] = features.numpy()
            first = last
        self._anchor.write(anchor, self._x[:1])
        self._x[1:] = self._masks
        if row != self._row:
            self._behind += (row - self._row) * (1 - self._is_place)
            self._row = row
        # Few and large steps: behind a verification, starting one costs more than what it does.
        np.multiply(self._is_place, start, out=self._numbers)
        self._numbers += self._behind


def _places(more: int, count: int) -> np.ndarray:
    """Positions, ends and cache rows of c context rows, then of n block rows, all of which see all of them: less where
    they start, and in cache row 0."""
    end, none = more + count, np.zeros
    parts = (np.arange(more), np.full(more, more), none(more), np.arange(more, end), np.full(count, end), none(count))
    return np.concatenate(parts).astype(np.int64)


def _is_place(more: int, count: int) -> np.ndarray:
    """Which of those numbers count from where the block starts."""
    return np.repeat([1, 0, 1, 0], [2 * more, more, 2 * count, count])
