"""Tables over the vocabulary, each rank of a group holding equal parts of them.

Shapes: N rows, V vocabulary, d width of a row.
"""

from __future__ import annotations

from torch import Tensor

from sparkchat.models.linear import Linear
from sparkchat.models.parallel import Group


class VocabularyRows:
    """Rows of a table [V, d] by token id, of which this rank holds [V/ranks, d]."""

    def __init__(self, rows: Tensor, group: Group) -> None:
        self._rows, self._group = rows, group
        self._first = group.rank * rows.shape[0]

    @property
    def num_rows(self) -> int:
        """V"""
        return self._rows.shape[0] * self._group.size

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., d] float32; all ranks give the same ids."""
        if self._group.size == 1:
            return self._rows[token_ids].float()
        place = token_ids - self._first
        is_here = (place >= 0) & (place < self._rows.shape[0])
        found = self._rows[place.clamp(0, self._rows.shape[0] - 1)].float()
        # One rank has the row, and zeros do not change it.
        return self._group.sum(found.masked_fill(~is_here.unsqueeze(-1), 0.0))

    def damaged_ids(self) -> frozenset[int]:
        """Tokens whose row is not of numbers: none, for a checkpoint with such a row is refused when it is read."""
        return frozenset()


class VocabularyHead:
    """A projection to the vocabulary, of which this rank computes V/ranks outputs."""

    def __init__(self, part: Linear, group: Group) -> None:
        self._part, self._group = part, group
        self.dtype, self.kernel = part.dtype, part.kernel

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        """x [n, d] -> [n, V] float32, on every rank"""
        return self._group.join(self._part(x, is_long).float())
