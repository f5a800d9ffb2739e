"""What the kernels of ``sparkchat.kernels`` read of a pass over rows that lie on the device, and room to work in.

Shapes: N rows, R requests, k chosen entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.hyper import HyperWorkspace, hyper_workspace
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.latent_attention import LatentShape, LatentWorkspace, latent_spans, latent_workspace
from sparkchat.kernels.row_places import place_rows
from sparkchat.models.deepseek_v4.cache import SINK_SLOTS, RatioStore, StateCache
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, DeepseekV4Config
from sparkchat.models.deepseek_v4.rope import Ropes
from sparkchat.models.kv_cache import SLOT_STEP, round_up
from sparkchat.models.rows import RowBatch


def latent_shape(store: RatioStore, config: DeepseekV4Config, has_roundings: bool) -> LatentShape:
    """How the layers of one ratio keep and see their latents."""
    topk = config.index_topk if store.ratio == SPARSE_RATIO else 0
    return LatentShape(
        SINK_SLOTS, store.ring, store.ratio, config.rope_dim, config.rms_eps, topk, has_roundings=has_roundings
    )  # fmt: skip


class RowRoom:
    """Tables and room for passes over one filled cache; a captured launch keeps their addresses."""

    def __init__(
        self,
        cache: StateCache,
        config: DeepseekV4Config,
        ropes: Ropes,
        *,
        num_heads: int,
        most_rows: int,
        most_per_request: int,
        has_roundings: bool,
    ) -> None:
        """``num_heads`` of this rank; ``most_rows`` of a pass, ``most_per_request`` of one request."""
        device = next(iter(cache.stores.values())).latents.data.device
        # As far as rows may be reserved (StateCache.reserve).
        end = round_up(cache.context, SLOT_STEP)
        self.cache, self.context, self.most_per_request = cache, end, most_per_request
        self.shapes = {ratio: latent_shape(store, config, has_roundings) for ratio, store in cache.stores.items()}
        self.ropes = {ratio: ropes.flat(ratio, end) for ratio in cache.stores}
        """[positions, rope_dim] by ratio"""
        spans = max(latent_spans(shape, end) for shape in self.shapes.values())
        self.latents: LatentWorkspace = latent_workspace(most_rows, num_heads, config.head_dim, spans, device)
        self.streams: HyperWorkspace = hyper_workspace(most_rows, config.hidden_size, device, config.hc_mult)
        self.scores = self.chosen = None
        if SPARSE_RATIO in cache.stores and end // SPARSE_RATIO > config.index_topk:
            shape = IndexShape(
                config.index_num_heads, config.index_head_dim, config.rope_dim, SPARSE_RATIO, config.index_topk
            )  # fmt: skip
            self.scores = index_scores_of(most_rows, end, shape, device)
            self.chosen = torch.zeros((most_rows, config.index_topk), dtype=torch.int32, device=device)
            """[N, k] int32"""


@dataclass(frozen=True)
class RowPass:
    """One batch of rows, shared by all layers."""

    room: RowRoom
    token_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    rows: Tensor
    """[N] cache rows"""
    starts: Tensor
    """[R+1] int32"""
    span_starts: Tensor
    """[N] position of the first row of each row's request"""
    first_seen: Tensor
    """[N] first position of the window's ring that a row sees; it may be negative"""
    ends: Tensor
    """[N] positions below it are seen"""

    @classmethod
    def of(cls, room: RowRoom, rows: RowBatch, *, is_block: bool = False, repeats_last: bool = False) -> RowPass:
        """``is_block``: rows of a request see the window before it, and each other up to ``rows.ends``.

        ``repeats_last``: as ``row_sight.repeat_last``.
        """
        assert rows.starts is not None
        window = next(iter(room.cache.stores.values())).window
        places = place_rows(
            rows.token_ids,
            rows.positions,
            rows.cache_rows,
            rows.ends,
            rows.starts,
            window=window,
            is_block=is_block,
            repeats_last=repeats_last,
        )
        return cls(
            room,
            places.token_ids,
            places.positions,
            places.cache_rows,
            rows.starts,
            places.span_starts,
            places.first_seen,
            places.ends,
        )

    def store(self, ratio: int) -> RatioStore:
        return self.room.cache.stores[ratio]

    def index_of(self, layer: int) -> int:
        """A layer's place among those of its ratio."""
        return self.room.cache.places[layer][1]
