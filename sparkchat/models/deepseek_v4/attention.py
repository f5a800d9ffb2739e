"""Attention over one latent per position that is key and value of all heads, and over compressed entries.

Shapes: N rows, d hidden size, H heads, c head dimension, G output groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.compressor import Compressor
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.deepseek_v4.indexer import Indexer
from sparkchat.models.deepseek_v4.rope import Rotations
from sparkchat.models.deepseek_v4.rounding import LATENT_BLOCK, round_e4m3
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight


class LatentAttention:
    """The attention sub-block of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, ratio: int) -> None:
        """``scope``: attn of a layer."""
        self._ratio, self._size, self._eps = ratio, config.head_dim, config.rms_eps
        self._plain_dims = config.head_dim - config.rope_dim
        self._dtype, self._has_roundings, self._group = scope.dtype, scope.has_roundings, scope.group
        self._to_low_rank = scope.linear("wq_a", has_fp8_input=True)
        self._low_rank_norm = scope.norm("q_norm", config.rms_eps)
        self._queries = scope.linear("wq_b", has_fp8_input=True)
        self._latents = scope.linear("wkv", has_fp8_input=True)
        self._latent_norm = scope.norm("kv_norm", config.rms_eps)
        self._groups = scope.linears("wo_a", config.o_lora_rank)
        self._output = scope.linear("wo_b", has_fp8_input=True)
        self._sinks = scope.tensor("attn_sink")
        """[H]"""
        self._compressor = self._indexer = None
        if ratio != WINDOW_ONLY:
            self._compressor = Compressor(scope.within("compressor"), config, ratio, config.head_dim)
        if ratio == SPARSE_RATIO:
            self._indexer = Indexer(scope.within("indexer"), config)

    @property
    def kernel(self) -> str:
        return self._to_low_rank.kernel

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
        groups = heads.flatten(1).chunk(len(self._groups), dim=-1)
        inner = [project(part.contiguous()) for project, part in zip(self._groups, groups, strict=True)]
        return self._group.sum(self._output(torch.cat(inner, dim=-1)))
