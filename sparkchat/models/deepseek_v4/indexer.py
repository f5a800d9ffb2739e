"""Which compressed entries a row attends to: a small attention of its own scores them, the best are taken.

Shapes: N rows, d hidden size, H index heads, c index head dimension, R spans of Q rows, E entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.errors import UsageError
from sparkchat.kernels.indexer import IndexShape
from sparkchat.models.deepseek_v4.compressor import Compressor
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, DeepseekV4Config
from sparkchat.models.deepseek_v4.rounding import INDEX_BLOCK, hadamard, round_e2m1
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import ROW_TILE, Sight
from sparkchat.models.linear import Linear, make_linear


class Indexer:
    """The indexer of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config) -> None:
        """``scope``: attn.indexer of a layer."""
        self._heads, self._size, self._topk = config.index_num_heads, config.index_head_dim, config.index_topk
        self._queries = scope.linear("wq_b", has_fp8_input=True)
        self._weights = scope.linear("weights_proj")
        self._compressor = Compressor(scope.within("compressor"), config, SPARSE_RATIO, self._size)
        self._rotation = _rotation(scope, self._size)
        self.rotation = hadamard(self._size, scope.device) if scope.has_roundings else None
        """[c, c] float32 that queries and keys are multiplied by before they are rounded"""
        self.shape = IndexShape(self._heads, self._size, config.rope_dim, SPARSE_RATIO, self._topk)

    @property
    def compressor(self) -> Compressor:
        return self._compressor

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """Of queries, and of the weights of their heads."""
        return self._queries, self._weights

    def __call__(self, x: Tensor, low_rank: Tensor, layer: int, sight: Sight) -> Tensor | None:
        """x [N, d], low_rank [N, q_lora_rank] the normed inner vector of the queries.

        Keeps the keys of entries that close. Returns the chosen entries [R, Q, E] bool, None where every row may see
        all that it can.
        """
        plan, index = sight.of(SPARSE_RATIO), sight.index_of(layer)
        store = plan.store
        assert store.index_raw is not None and store.index_keys is not None
        keys, closing = self._compressor(x, sight, store.index_raw, index), plan.closing
        if keys is not None and closing is not None:
            data = store.index_keys.data[index]
            data[closing.cache_rows, closing.entries] = self._rounded(keys).to(data.dtype)
        if plan.most_visible <= self._topk:
            return None
        queries = self._queries(low_rank).unflatten(-1, (self._heads, self._size))
        queries = self._rounded(plan.rotations.turn(queries))
        weights = self._weights(x.to(self._weights.dtype)).float() * (self._size * self._heads) ** -0.5
        spread = sight.rectangle.spread
        entries = store.index_keys.data[index][sight.rectangle.cache_rows, : plan.num_entries]
        scores = index_scores(spread(queries), entries.float(), spread(weights))
        return best_entries(scores.masked_fill(~plan.is_visible, float("-inf")), self._topk)

    def _rounded(self, x: Tensor) -> Tensor:
        """Rotate x [..., c] and round it to 4 bits, where roundings are on. Products do not change by the rotation."""
        if self._rotation is None:
            return x
        return round_e2m1(self._rotation(x.flatten(0, -2)).view(x.shape), INDEX_BLOCK)


def _rotation(scope: Scope, size: int) -> Linear | None:
    if not scope.has_roundings:
        return None
    if size & (size - 1):
        raise UsageError(f"the published roundings need an index_head_dim that is a power of two, not {size}")
    return make_linear(hadamard(size, torch.device("cpu")), None, device=scope.device, dtype=torch.float32)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """queries [R, Q, H, c], keys [R, E, c], weights [R, Q, H], all float32 -> [R, Q, E]: relu(q k) weighted."""
    count, width, heads, size = queries.shape
    rows = queries.reshape(count, width * heads, size)
    filled = F.pad(rows, (0, 0, 0, -rows.shape[1] % ROW_TILE))
    products = torch.bmm(filled, keys.transpose(1, 2))[:, : rows.shape[1]].unflatten(1, (width, heads))
    weighted = products.relu() * weights.unsqueeze(-1)
    # Heads last: see Compressor._pool.
    return weighted.transpose(-1, -2).contiguous().sum(dim=-1)


def best_entries(scores: Tensor, count: int) -> Tensor:
    """scores [..., E] -> [..., E] bool: the ``count`` highest above -inf; of equal ones the earliest."""
    if scores.shape[-1] <= count:
        return scores > float("-inf")
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, level = scores > least, (scores == least) & (least > float("-inf"))
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))
