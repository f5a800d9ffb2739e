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
from sparkchat.models.native import LaneLinear, run_lines

if TYPE_CHECKING:
    from sparkchat.kernels.cpu.decoder import Rows
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
        self._embedding = backbone.embedding
        self._store, self._rope = cache.stores[0].data, backbone.rope_numbers
        self._context, self._rows = (Rows(np.zeros((3, n), np.int64), self._most) for n in shape)
        self._behind = np.arange(more), np.arange(count)
        features, x, context, stack, self.hidden = backbone.plan_kept(cache, self._context, self._rows)
        last, self.base = owner.head.plan(self.hidden)
        # NumPy moves a few rows in a fraction of what torch takes.
        self._features, self._x = features.numpy(), x.numpy()
        self._masks = self._embedding(torch.full((count - 1,), owner.mask)).numpy()
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
        self._x[0], self._x[1:] = self._embedding(torch.tensor([anchor])).numpy()[0], self._masks
        for rows, behind in zip((self._context, self._rows), self._behind, strict=True):
            self._place(rows, behind, row, start)
            start += len(behind)

    @staticmethod
    def _place(rows: Rows, behind: np.ndarray, row: int, start: int) -> None:
        """Positions from ``start`` on, all of which see all of them."""
        numbers = rows.numbers
        np.add(behind, start, out=numbers[0])
        numbers[1] = start + len(behind)
        numbers[2] = row
