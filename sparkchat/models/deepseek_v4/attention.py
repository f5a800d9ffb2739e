"""Attention over one latent per position that is key and value of all heads, and over compressed entries.

Shapes: N rows, d hidden size, H heads, c head dimension, G output groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparkchat.kernels.compressor import PoolShape, compress_rows
from sparkchat.kernels.indexer import choose_entries
from sparkchat.kernels.latent_attention import LatentRows, latent_attention, write_latents
from sparkchat.models.deepseek_v4.compressor import Compressor
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.deepseek_v4.indexer import Indexer
from sparkchat.models.deepseek_v4.pooling import Pooled
from sparkchat.models.deepseek_v4.rope import Rotations
from sparkchat.models.deepseek_v4.rounding import LATENT_BLOCK, round_e4m3
from sparkchat.models.deepseek_v4.row_pass import RowPass
from sparkchat.models.deepseek_v4.row_products import RowProducts
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.deepseek_v4.tile_products import TileProducts, in_parts, into_room


class LatentAttention:
    """The attention sub-block of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, ratio: int) -> None:
        """``scope``: attn of a layer."""
        self._ratio, self._size, self._eps = ratio, config.head_dim, config.rms_eps
        self._plain_dims = config.head_dim - config.rope_dim
        self._dtype, self._has_roundings, self._group = scope.dtype, scope.has_roundings, scope.group
        low_rank, latent, inner = (scope.weight(name) for name in ("wq_a", "wkv", "wo_a"))
        self._tiles = TileProducts.of(scope, low_rank, latent, inner, config.o_lora_rank)
        if self._tiles is not None:
            self._to_low_rank, self._latents, self._groups = self._tiles.linears()
        else:
            self._to_low_rank, self._latents = (scope.multiply_by(w, None, True) for w in (low_rank, latent))
            self._groups = scope.cut(inner, config.o_lora_rank)
        self._low_rank_norm = scope.norm("q_norm", config.rms_eps)
        self._queries = scope.linear("wq_b", has_fp8_input=True)
        self._latent_norm = scope.norm("kv_norm", config.rms_eps)
        self._output = scope.linear("wo_b", has_fp8_input=True)
        self._sinks = scope.tensor("attn_sink")
        """[H]"""
        self._compressor = self._indexer = None
        self._products: RowProducts | None = None
        if ratio != WINDOW_ONLY:
            self._compressor = Compressor(scope.within("compressor"), config, ratio, config.head_dim)
        if ratio == SPARSE_RATIO:
            self._indexer = Indexer(scope.within("indexer"), config)

    @property
    def kernel(self) -> str:
        return self._to_low_rank.kernel

    def by_kernels(self, x: Tensor, layer: int, rows: RowPass, may_be_parts: bool = False) -> Tensor:
        """As the call, by ``sparkchat.kernels``: x [N, d] -> this rank's part of the output [N, d], or parts of that
        [P, N, d] float32 to be added in order.
        """
        ratio, room = self._ratio, rows.room
        where, rope = (rows.positions, rows.rows), room.ropes[ratio]
        cache, shape = rows.store(ratio).latents.data[rows.index_of(layer)], room.shapes[ratio]
        low_rank = torch.empty((x.shape[0], self._low_rank_norm.weight.shape[0]), dtype=self._dtype, device=x.device)
        ranks, latents, pooled = self._joined().of_input(x)
        norms = self._latent_norm.weight, self._low_rank_norm.weight
        if pooled is None:
            write_latents(
                latents, norms[0], *where, rope, cache, shape, low_rank=ranks, low_rank_norm=norms[1], out=low_rank
            )  # fmt: skip
        else:
            written = LatentRows(latents, norms[0], cache, shape, ranks, norms[1], low_rank)
            self._compress_rows(pooled, written, layer, rows)
        has_choice = room.scores is not None and self._indexer is not None
        queries, index_queries = self._joined().of_low_ranks(low_rank, has_choice)
        chosen = None
        if pooled is not None and index_queries is not None:
            chosen = self._choose_entries(index_queries, pooled, layer, rows)
        heads = torch.empty((x.shape[0], self._sinks.shape[0], self._size), dtype=self._dtype, device=x.device)
        latent_attention(
            queries,
            cache,
            rows.rows,
            rows.positions,
            rows.first_seen,
            rows.ends,
            rope,
            self._sinks,
            heads,
            room.latents,
            shape,
            context=room.context,
            chosen=chosen,
        )
        inner = self._inner(heads) if self._tiles is None else self._tiles.to_groups(heads)
        return in_parts(self._output, inner) if may_be_parts else into_room(self._output, inner, self._group)

    def _compress_rows(self, products: Pooled, written: LatentRows, layer: int, rows: RowPass) -> None:
        """Keep the rows' state, ``written`` with it, and write entries that close."""
        assert self._compressor is not None
        store, index, room = rows.store(self._ratio), rows.index_of(layer), rows.room
        assert store.raw is not None
        kind: dict[str, Any] = {"has_roundings": self._has_roundings}
        entries = store.latents.data[index]
        pools = [self._compressor.pool(*products.main, store.raw.data[index], entries, store.first_entry, **kind)]
        if self._indexer is not None:
            assert store.index_raw is not None and store.index_keys is not None and products.index is not None
            kind = {"is_index": True, "rotation": self._indexer.rotation}
            keys = store.index_keys.data[index]
            raw = store.index_raw.data[index]
            pools.append(self._indexer.compressor.pool(*products.index, raw, keys, 0, **kind))
        rope = room.ropes[self._ratio]
        shape = PoolShape(self._ratio, self._indexer is not None, room.shapes[self._ratio].rope_dim, self._eps)
        compress_rows(
            pools, rows.positions, rows.rows, rows.starts, rows.span_starts, rope, shape, written=written
        )  # fmt: skip

    def _choose_entries(self, index_queries: Tensor, products: Pooled, layer: int, rows: RowPass) -> Tensor:
        """[N, k] the entries that rows attend to, where there may be more."""
        store, index, room = rows.store(self._ratio), rows.index_of(layer), rows.room
        assert self._indexer is not None and store.index_keys is not None
        assert products.weights is not None and room.scores is not None and room.chosen is not None
        choose_entries(
            index_queries,
            products.weights,
            store.index_keys.data[index],
            rows.positions,
            rows.rows,
            rows.starts,
            room.ropes[self._ratio],
            room.scores,
            room.chosen,
            self._indexer.shape,
            context=room.context,
            most_per_request=room.most_per_request,
            rotation=self._indexer.rotation,
        )
        return room.chosen[: index_queries.shape[0]]

    def join_pools(self) -> None:
        """Move weights that are multiplied together into one piece of memory, once, before anything is captured."""
        self._joined()

    def _joined(self) -> RowProducts:
        if self._products is None:
            alone = self._to_low_rank, self._latents
            self._products = RowProducts(self._tiles, alone, self._queries, self._compressor, self._indexer)
        return self._products

    @property
    def tiles(self) -> TileProducts | None:
        """What multiplies, where weights lie in tiles."""
        return self._tiles

    def raw_latents(self, x: Tensor) -> Tensor:
        """x [N, d] -> [N, c] as they are projected."""
        return self._latents(x)

    def keep_latents(self, latents: Tensor, layer: int, rows: RowPass) -> None:
        """Keep latents as they are projected, [N, c] or float32 parts [P, N, c] to be added in order, and nothing else:
        as a drafter does for the features of its context."""
        ratio, room = self._ratio, rows.room
        cache = rows.store(ratio).latents.data[rows.index_of(layer)]
        write_latents(
            latents,
            self._latent_norm.weight,
            rows.positions,
            rows.rows,
            room.ropes[ratio],
            cache,
            room.shapes[ratio],
        )

    def __call__(self, x: Tensor, layer: int, sight: Sight) -> Tensor:
        """x [N, d] -> [N, d], after keeping the rows' state at their positions."""
        rotations = sight.of(self._ratio).rotations
        low_rank = self._low_rank_norm(self._to_low_rank(x).float(), self._dtype)
        sight.write_latents(layer, self.latents(x, rotations))
        chosen = None
        if self._compressor is not None:
            self._compress(self._compressor, x, layer, sight)
        if self._indexer is not None:
            chosen = self._indexer(x, low_rank, layer, sight)
        heads = sight.attend(layer, self._turned_queries(low_rank, rotations), self._sinks, chosen)
        # Values were turned with the keys; turning back by the row's own position leaves distances.
        return self._project(rotations.turn_back(heads).to(self._dtype))

    def latents(self, x: Tensor, rotations: Rotations) -> Tensor:
        """x [N, d] -> what is kept of a position [N, c] float32: normed, turned, rounded where that is on."""
        latents = self._latent_norm(self._latents(x).float(), self._dtype)
        return self._rounded(rotations.turn(latents).to(self._dtype))

    def _rounded(self, latents: Tensor) -> Tensor:
        """Round the dimensions that are not rotated."""
        if not self._has_roundings:
            return latents
        plain = round_e4m3(latents[..., : self._plain_dims], LATENT_BLOCK)
        return torch.cat([plain, latents[..., self._plain_dims :]], dim=-1)

    def _compress(self, compressor: Compressor, x: Tensor, layer: int, sight: Sight) -> None:
        plan, index = sight.of(self._ratio), sight.index_of(layer)
        assert plan.store.raw is not None
        entries, closing = compressor(x, sight, plan.store.raw, index), plan.closing
        if entries is not None and closing is not None:
            data = plan.store.latents.data[index]
            entries = self._rounded(entries.to(self._dtype))
            data[closing.cache_rows, plan.store.first_entry + closing.entries] = entries.to(data.dtype)

    def _turned_queries(self, low_rank: Tensor, rotations: Rotations) -> Tensor:
        """low_rank [N, q_lora_rank] -> [N, H, c], every head of length sqrt(c) before it is turned."""
        heads = self._queries(low_rank).float().unflatten(-1, (-1, self._size))
        heads = heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + self._eps)
        return rotations.turn(heads).to(self._dtype)

    def _project(self, heads: Tensor) -> Tensor:
        """heads [N, H, c] -> [N, d]: each group of heads to a vector of its own, all of those to the output."""
        return self._group.sum(self._output(self._inner(heads)))

    def _inner(self, heads: Tensor) -> Tensor:
        """heads [N, H, c] -> [N, G * o_lora_rank]"""
        groups = heads.flatten(1).chunk(len(self._groups), dim=-1)
        inner = [project(part.contiguous()) for project, part in zip(self._groups, groups, strict=True)]
        return torch.cat(inner, dim=-1)
