"""Tables over the vocabulary, each rank of a group holding equal parts of them.

Shapes: N rows, V vocabulary, d width of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8, takes
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.ranks.rows import join_columns, look_up, spread_rows
from sparkchat.models.deepseek_v4.formats import E4M3_MAX, FP8_BLOCK
from sparkchat.models.deepseek_v4.packed import MOST_ROWS, TiledLinear, has_kernels, multiply_into
from sparkchat.models.linear import Linear
from sparkchat.models.parallel import Group
from sparkchat.switches import word_of

DRAFT_TABLES = "SPARKCHAT_DRAFT_TABLES"
"""In the environment: ``stored`` leaves what drafters read over the vocabulary as it is stored; else it is rounded to
8 bits where kernels multiply stored weights.

A drafter's logits only make the law that its drafts are drawn from. Whether a draft is accepted is decided by that very
law and the target's own logits, which are never rounded: greedy output stays the target's, sampled output has its law.
"""
_ROUNDED_OUTS = 8192
"""Outputs that are rounded at a time, to a multiple of 128."""


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

    def streams(self, token_ids: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """[N] -> [N, count, d] in ``dtype``: a token's row in every stream."""
        rows, group = self._rows, self._group
        if group.size > 1 and group.adds_parts and token_ids.is_cuda and rows.dtype == dtype:
            room = group.room((token_ids.shape[0], rows.shape[1]), dtype, rows.device)
            meeting = group.meeting(room, token_ids.shape[0])
            if meeting is not None:
                look_up(rows, token_ids.contiguous(), self._first, room, meeting)
                out = torch.empty((token_ids.shape[0], count, rows.shape[1]), dtype=dtype, device=rows.device)
                parts = group.parts(room)
                spread_rows(parts, group.addresses(parts), out)
                return out
        return self(token_ids).to(dtype).unsqueeze(1).repeat(1, count, 1)

    def damaged_ids(self) -> frozenset[int]:
        """Tokens whose row is not of numbers: none, for a checkpoint with such a row is refused when it is read."""
        return frozenset()


class VocabularyHead:
    """A projection to the vocabulary, of which this rank computes V/ranks outputs."""

    def __init__(self, part: Linear, group: Group) -> None:
        self._part, self._group = part, group
        self.dtype, self.kernel = part.dtype, part.kernel

    def for_drafts(self) -> VocabularyHead:
        """What drafters multiply by: this head in 8 bits, in memory of its own, or itself (see ``DRAFT_TABLES``)."""
        weight = getattr(self._part, "weight", None)
        if not isinstance(weight, Tensor) or not rounds_drafts(weight.device, self.dtype):
            return self
        rounded = rounded_head(weight)
        # One rank keeps what it makes in float32; several send each other half of it.
        wide = torch.float32 if self._group.size == 1 else None
        return self if rounded is None else VocabularyHead(TiledLinear(rounded, self.dtype, wide), self._group)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        """x [n, d] -> [n, V] float32, on every rank"""
        group = self._group
        if group.size == 1 or not (group.adds_parts and x.is_cuda) or x.shape[0] > MOST_ROWS:
            return group.join(self._part(x, is_long).float())
        room = group.room((x.shape[0], self._width), self.dtype, x.device)
        multiply_into(self._part, x, room)
        parts = group.parts(room)
        out = torch.empty((x.shape[0], group.size * self._width), device=x.device)
        join_columns(parts, group.addresses(parts), out)
        return out

    @property
    def _width(self) -> int:
        """V/ranks"""
        return self._part.weight.shape[0]  # type: ignore[attr-defined]


def rounds_drafts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a drafter takes in 8 bits what it multiplies inputs of ``dtype`` by."""
    return has_kernels(device, dtype) and word_of(DRAFT_TABLES) != "stored"


def rows_for_drafts(rows: Tensor) -> Tensor | RoundedRows:
    """W2 of a sequential head as its kernel reads it."""
    return RoundedRows.of(rows) if rounds_drafts(rows.device, rows.dtype) else rows


def rounded_head(weight: Tensor) -> TiledFp8 | None:
    """weight [n, d], each block of 128 x 128 by the scale that makes its largest number 448; None where it does not
    lie in tiles."""
    if not takes(weight[:0].to(torch.float8_e4m3fn).new_empty(weight.shape, device="meta"), FP8_BLOCK):
        return None
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for first in range(0, weight.shape[0], _ROUNDED_OUTS):
        some = weight[first : first + _ROUNDED_OUTS].float()
        padded = torch.nn.functional.pad(some, (0, 0, 0, -some.shape[0] % FP8_BLOCK[0]))
        blocks = padded.unflatten(0, (-1, FP8_BLOCK[0])).unflatten(2, (-1, FP8_BLOCK[1]))
        scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=1e-30) / E4M3_MAX
        scales.append(scale)
        values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: some.shape[0]]
        codes[first : first + _ROUNDED_OUTS] = values.to(torch.float8_e4m3fn)
    return TiledFp8.of(codes, torch.cat(scales))
