"""What an attention sub-block projects of its rows by kernels, in as few launches as the weights' formats allow.

Two launches of a layer: everything that reads the layer's input (low ranks of queries, latents, what the compressors
pool), then everything that reads the low ranks (queries, and those of the indexer). Of many rows there are two for each
weight, one that expands it and the library's (kernels/fp8).

Shapes: N rows, d hidden size, r low rank, c latent size, H heads, P parts of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8, fp8_linear
from sparkchat.kernels.fp8.joint import PLAIN_OUTS, JointProduct, takes_joint
from sparkchat.models.deepseek_v4.compressor import Compressor
from sparkchat.models.deepseek_v4.indexer import Indexer
from sparkchat.models.deepseek_v4.packed import MOST_ROWS, TiledLinear
from sparkchat.models.deepseek_v4.pooling import Pooled, PoolProducts
from sparkchat.models.deepseek_v4.scope import RoundedLinear
from sparkchat.models.deepseek_v4.tile_products import TileProducts, parts_of
from sparkchat.models.linear import Linear


class RowProducts:
    """The projections of one layer."""

    def __init__(
        self,
        tiles: TileProducts | None,
        alone: tuple[Linear, Linear],
        queries: Linear,
        compressor: Compressor | None,
        indexer: Indexer | None,
    ) -> None:
        """``alone``: to low ranks and to latents, where they do not lie in ``tiles``. Weights are moved into common
        pieces of memory, of which the linears that are given keep their parts."""
        self._tiles, self._alone, self._queries, self._indexer = tiles, alone, queries, indexer
        self._pooling = None if compressor is None else PoolProducts.of(compressor, indexer)
        self._joint = _joint_of(tiles, self._pooling)
        self._both = None if indexer is None else _joined(queries, indexer.projections[0])
        """Of queries and of index queries"""
        self._cut = 0 if self._both is None else _inner_of(queries).weight.shape[0]

    def of_input(self, x: Tensor) -> tuple[Tensor, Tensor, Pooled | None]:
        """x [N, d] -> low ranks [N, r] and latents [N, c], each whole or float32 parts [P, N, ...] to be added in
        order, and what the compressors pool."""
        if self._joint is not None and x.shape[0] <= MOST_ROWS:
            assert self._tiles is not None and self._pooling is not None
            parts, plain, whole = self._joint(x, is_rounded=self._tiles.is_rounded)
            rank = self._tiles.low_rank
            return parts[..., :rank], parts[..., rank:], self._pooling.cut(plain, whole)
        low, latents = self._tiles.project(x) if self._tiles else (linear(x) for linear in self._alone)
        return low, latents, None if self._pooling is None else self._pooling(x)

    def of_low_ranks(self, low_rank: Tensor, has_choice: bool) -> tuple[Tensor, Tensor | None]:
        """low_rank [N, r], normed -> queries [N, H * c], and those of the indexer where ``has_choice``."""
        if not has_choice or self._indexer is None:
            return self._queries(low_rank), None
        if self._both is None or low_rank.shape[0] > MOST_ROWS:
            return self._queries(low_rank), self._indexer.projections[0](low_rank)
        weight = _inner_of(self._queries)
        out = torch.empty((low_rank.shape[0], self._both.shape[0]), dtype=weight.dtype, device=low_rank.device)
        fp8_linear(low_rank, self._both, out, is_rounded=isinstance(self._queries, RoundedLinear))
        return out[:, : self._cut], out[:, self._cut :]


class ContextLatents:
    """The latents that all stages of a drafter keep of one row, in one launch."""

    def __init__(self, weight: TiledFp8, stages: int, is_rounded: bool) -> None:
        """``weight`` [stages * c, d]"""
        self._weight, self._stages, self._is_rounded = weight, stages, is_rounded

    @classmethod
    def of(cls, stages: Sequence[TileProducts | None]) -> ContextLatents | None:
        """None where some stage's weights do not lie in tiles. Takes memory of its own, a few megabytes."""
        tiles = [stage for stage in stages if stage is not None]
        if len(tiles) < len(stages):
            return None
        weights = [stage.latents for stage in tiles]
        joined = TiledFp8(torch.cat([w.tiles for w in weights]), torch.cat([w.scales for w in weights]))
        return cls(joined, len(stages), tiles[0].is_rounded)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [N, d], any N -> of each stage parts [P, N, c] float32, to be added in order."""
        parts = parts_of(x, self._weight, self._is_rounded)
        return parts.chunk(self._stages, dim=-1)


def _joint_of(tiles: TileProducts | None, pooling: PoolProducts | None) -> JointProduct | None:
    """One launch for what reads the layer's input, where there are weights of both formats."""
    if tiles is None or pooling is None or pooling.joined is None or not takes_joint(tiles.joint, pooling.joined):
        return None
    whole_from = pooling.whole_from
    if whole_from is not None and whole_from % PLAIN_OUTS:
        return None
    return JointProduct(tiles.joint, pooling.joined, whole_from)


def _joined(first: Linear, second: Linear) -> TiledFp8 | None:
    """One weight of two that read the same; None where they do not lie alike."""
    if type(first) is not type(second):
        return None
    one, two = _inner_of(first), _inner_of(second)
    if not (isinstance(one, TiledLinear) and isinstance(two, TiledLinear)):
        return None
    if one.weight.shape[1] != two.weight.shape[1] or one.dtype != two.dtype:
        return None
    tiles = torch.cat([one.weight.tiles, two.weight.tiles])
    scales = torch.cat([one.weight.scales, two.weight.scales])
    at = one.weight.tiles.shape[0]
    one.weight, two.weight = TiledFp8(tiles[:at], scales[:at]), TiledFp8(tiles[at:], scales[at:])
    return TiledFp8(tiles, scales)


def _inner_of(linear: Linear) -> TiledLinear:
    return linear.inner if isinstance(linear, RoundedLinear) else linear  # type: ignore[return-value]
