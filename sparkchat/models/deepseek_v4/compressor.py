"""Compressed entries: ``ratio`` tokens pooled into one latent, or one index key, by a softmax over them per channel.

Where entries overlap, every token has two halves: the first is pooled into the entry after its own, the second into
its own. Shapes: N rows, d hidden size, c width of an entry, W entries that close in this pass. All in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparkchat.kernels.compressor import Pool
from sparkchat.models.deepseek_v4.cache import GrowingRows
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, DeepseekV4Config
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.linear import Linear


class Compressor:
    """Keeps what entries are made of, and makes each when its last token comes."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, ratio: int, width: int) -> None:
        """``scope``: compressor of a layer's attention or indexer; ``width``: c."""
        self._kv = scope.linear("wkv", dtype=torch.float32)
        self._scores = scope.linear("wgate", dtype=torch.float32)
        self._bias = scope.tensor("ape")
        self._norm = scope.norm("norm", config.rms_eps)
        self._ratio, self._width = ratio, width
        self._overlaps = ratio == SPARSE_RATIO
        self._dtype = scope.dtype

    def __call__(self, x: Tensor, sight: Sight, raw: GrowingRows, index: int) -> Tensor | None:
        """x [N, d] -> the entries [W, c] float32 that close with these rows, turned; None where none does.

        ``raw``: the rings of this compressor in the cache; ``index``: the layer's place in them.
        """
        plan = sight.of(self._ratio)
        x = x.float()
        rows = torch.cat([self._kv(x), self._scores(x) + self._bias[plan.phases]], dim=-1)
        raw.data[index][sight.cache_rows, plan.raw_slots] = rows
        closing = plan.closing
        if closing is None:
            return None
        tokens = raw.data[index][closing.cache_rows.unsqueeze(1), closing.slots]
        pooled = self._pool(tokens, closing.is_absent)
        # Rounded as activations are, before the norm.
        return closing.rotations.turn(self._norm(pooled.to(self._dtype).float(), torch.float32))

    def pool(self, kv: Tensor, scores: Tensor, raw: Tensor, entries: Tensor, first_slot: int, **kind: Any) -> Pool:
        """This compressor as ``kernels.compressor`` takes it; ``kind`` names what is rounded, and how."""
        return Pool(kv, scores, self._bias, self._norm.weight, raw, entries, first_slot, **kind)

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """Of values and of scores, before their bias."""
        return self._kv, self._scores

    def _pool(self, tokens: Tensor, is_absent: Tensor) -> Tensor:
        """tokens [W, tokens, 2 * halves * c] with values before scores, is_absent [W, tokens] -> [W, c]"""
        kv, scores = (self._halves(part) for part in tokens.chunk(2, dim=-1))
        absent = is_absent.unsqueeze(-1)
        kv, scores = kv.masked_fill(absent, 0.0), scores.masked_fill(absent, float("-inf"))
        # Tokens last: reductions of neighbouring numbers take them in the same order at any number of entries.
        weights = scores.transpose(1, 2).contiguous().softmax(dim=-1)
        return (weights * kv.transpose(1, 2)).sum(dim=-1)

    def _halves(self, x: Tensor) -> Tensor:
        """[W, tokens, halves * c] -> [W, tokens, c]: what each token gives to this entry."""
        if not self._overlaps:
            return x
        before, own = x.split(self._ratio, dim=1)
        return torch.cat([before[..., : self._width], own[..., self._width :]], dim=1)
