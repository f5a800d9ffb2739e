"""The classic MTP block of the April preview as a drafter: one layer that reads the streams behind the last layer of
position p and the token at p+1, and predicts the token at p+2. Further drafts feed its own streams back.

It drafts token by token, so the sequential head of the drafter interface is the block itself: ``backbone`` makes the
first draft's hidden row of every block, and from the second draft on ``markov_step`` returns whole logits where the
base logits are zero. ``initial_state`` belongs to the blocks of the last ``backbone`` call.

The latent of a context position needs the next token, so that of the newest position is made when its anchor is there;
the cache keeps streams beside latents for it.

Shapes: N rows, R requests, S residual streams, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparkchat.models.attention import Span
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.cache import SINK_SLOTS, GrowingRows
from sparkchat.models.deepseek_v4.config import WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.deepseek_v4.drafter import SPARE_POSITIONS, BlockConfig, ContextCache, newest_rows
from sparkchat.models.deepseek_v4.fused import FusedStack
from sparkchat.models.deepseek_v4.hyper import HyperHead
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.row_pass import RowPass
from sparkchat.models.deepseek_v4.row_sight import RowSight
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.deepseek_v4.stack import Layer, Stack
from sparkchat.models.rows import RowBatch

MOST_DRAFTS = 3
"""The block is trained to draft one token; fed with its own streams it is still of use for so many."""
EMBEDDING_TAP = -1


class StreamCache(ContextCache):
    """Window latents of the block, and the target's streams of the positions in the window."""

    def __init__(self, config: DeepseekV4Config, stream_dtype: torch.dtype, **sizes: Any) -> None:
        super().__init__(config, (WINDOW_ONLY,), **sizes)
        width = config.hc_mult * config.hidden_size
        self.ring = self.stores[WINDOW_ONLY].ring
        self._streams = GrowingRows(1, self.ring, width, stream_dtype, sizes["device"])

    @property
    def streams(self) -> Tensor:
        """[R, ring, S*d] by position modulo the ring"""
        return self._streams.data[0]

    @property
    def latents(self) -> Tensor:
        """[R, slots, head_dim], the ring behind the sink's slots"""
        return self.stores[WINDOW_ONLY].latents.data[0]

    def fill(self) -> None:
        super().fill()
        self._streams.grow(self.max_rows, self.ring)

    def allocate(self) -> int:
        row = super().allocate()
        self._streams.grow(self.latents.shape[0], self.ring)
        self.streams[row].zero_()
        return row

    def _rings(self, row: int) -> list[Tensor]:
        return [*super()._rings(row), self.streams[row]]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._streams.data.nbytes


@dataclass(frozen=True)
class MtpState:
    """Where the blocks of some requests stand."""

    cache: StreamCache
    cache_rows: tuple[int, ...]
    """[R]"""
    positions: tuple[int, ...]
    """[R] of the block's last input."""
    streams: Tensor
    """[R, S, d] behind the block."""
    is_first: bool = True
    """The first draft comes from the base logits."""

    def one_further(self) -> MtpState:
        return replace(self, positions=tuple(p + 1 for p in self.positions))

    def __getitem__(self, keep: Tensor) -> MtpState:
        """The state of the requests at ``keep`` [n]."""
        index = keep.tolist()
        return replace(
            self,
            cache_rows=tuple(self.cache_rows[i] for i in index),
            positions=tuple(self.positions[i] for i in index),
            streams=self.streams[keep],
        )


@dataclass(frozen=True)
class MtpRowState:
    """As ``MtpState``, its numbers on the device."""

    cache: StreamCache
    cache_rows: Tensor
    """[R]"""
    positions: Tensor
    """[R]"""
    streams: Tensor
    """[R, S, d]"""
    hidden: Tensor | None = None
    """[R, d] what the head reads of the streams behind the block; None before its first run."""
    is_first: bool = True

    def one_further(self) -> MtpRowState:
        return replace(self, positions=self.positions + 1)


class MtpDrafter:
    """Drafts token by token for one target. The calls are those of ``models.dspark.drafter.Drafter``."""

    draft_to_target = None
    has_confidence = False
    block_weights = None
    """There are none: every draft but the first is known only when the one before it is drawn."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, target: DeepseekV4) -> None:
        """``scope``: mtp, ``config``: of the drafter's checkpoint. Raises DamagedFile for what cannot be read."""
        block = scope.within("0")
        self._target, self._dtype = target, scope.dtype
        self._of_embedding = block.linear("e_proj", has_fp8_input=True)
        self._of_streams = block.linear("h_proj", has_fp8_input=True)
        self._embedding_norm, self._streams_norm = (block.norm(n, config.rms_eps) for n in ("enorm", "hnorm"))
        self._layer = Layer(block, config, WINDOW_ONLY, is_hashed=False)
        self._streams_head, self._norm = HyperHead(block, config), block.norm("norm", config.rms_eps)
        self._latest: MtpState | MtpRowState | None = None
        self._fused: FusedStack | None = None
        self.config = BlockConfig(
            block_size=MOST_DRAFTS,
            mask_token_id=0,
            target_layer_ids=(EMBEDDING_TAP, target.config.num_layers),
            markov_rank=0,
            markov_head_type=None,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
        )

    def new_cache(self, max_rows: int, context: int) -> StreamCache:
        """Room for ``max_rows`` requests of ``context`` positions and a block behind them."""
        return StreamCache(
            self._target.config,
            self._dtype,
            max_rows=max_rows,
            context=context + SPARE_POSITIONS,
            max_span=SPARE_POSITIONS,
            dtype=self._target.config.kv_dtype,
            device=self._target.device,
        )

    @torch.inference_mode()
    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: StreamCache) -> None:
        """Keep context rows from features [N, (1+S)*d] at ``batch.positions``: the row's embedding, the streams.

        A row gives the token for the latent of the position before it. Token ids are not looked at.
        """
        spans, newest = newest_rows(batch, cache)
        device, ring = batch.positions.device, cache.ring
        embedded, streams = features.split([self._target.config.hidden_size, cache.streams.shape[-1]], dim=-1)
        positions = batch.positions[newest]
        rows = torch.tensor([s.cache_row for s in spans for _ in range(s.count)], device=device)[newest]
        starts = torch.tensor([s.start for s in spans for _ in range(s.count)], device=device)[newest]
        is_start = (positions == starts).unsqueeze(-1)
        before = torch.where(
            is_start, cache.streams[rows, (positions - 1) % ring], streams[newest - 1].to(cache.streams.dtype)
        )
        cache.streams[rows, positions % ring] = streams[newest].to(cache.streams.dtype)
        known = positions > 0
        if bool(known.any()):
            self._keep_latents(cache, rows[known], positions[known] - 1, embedded[newest][known], before[known])
        for span in spans:
            cache.advance(span.cache_row, span.end)

    def _keep_latents(
        self, cache: StreamCache, rows: Tensor, positions: Tensor, embedded: Tensor, streams: Tensor
    ) -> None:
        x, _ = self._layer.attention_input(self._input(embedded, streams))
        rotations = self._target.ropes.rows(WINDOW_ONLY, positions, int(positions.max()) + 1)
        latents = self._layer.attention.latents(x, rotations)
        cache.latents[rows, SINK_SLOTS + positions % cache.ring] = latents.to(cache.latents.dtype)

    def _input(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """embedded [n, d] of the next tokens, streams [n, S*d] -> the block's input streams [n, S, d]."""
        parts = streams.unflatten(-1, (-1, embedded.shape[-1])).float()
        of_embedding = self._of_embedding(self._embedding_norm(embedded.float(), self._dtype))
        of_streams = self._of_streams(self._streams_norm(parts, self._dtype).flatten(0, 1))
        return of_embedding.unsqueeze(1) + of_streams.view(parts.shape)

    @torch.inference_mode()
    def backbone(self, batch: ForwardBatch, cache: StreamCache) -> Tensor:
        """The first draft of blocks [anchor, ...] -> hidden [N, d], zero but for the first row of each block.

        The cache stays as long as it was.
        """
        positions = tuple(cache.length(row) - 1 for row in batch.cache_rows)
        firsts = torch.tensor(batch.row_starts[:-1], device=batch.token_ids.device)
        where = torch.tensor(positions, device=firsts.device)
        streams = cache.streams[torch.tensor(batch.cache_rows, device=firsts.device), where % cache.ring]
        state = MtpState(cache, batch.cache_rows, positions, streams.unflatten(-1, (self._target.config.hc_mult, -1)))
        self._latest = self._step(state, batch.token_ids[firsts])
        hidden = self._streams_head(self._latest.streams)
        spread = hidden.new_zeros((batch.token_ids.shape[0], hidden.shape[1]))
        spread[firsts] = hidden
        return spread

    @torch.inference_mode()
    def store_rows(self, features: Tensor, rows: RowBatch, cache: StreamCache) -> None:
        """As ``extend_context``, asking the host nothing; the cache is filled and keeps no count."""
        embedded, streams = features.split([self._target.config.hidden_size, cache.streams.shape[-1]], dim=-1)
        streams, positions, owners = streams.to(cache.streams.dtype), rows.positions, rows.cache_rows
        index = torch.arange(positions.shape[0], device=positions.device)
        last = (index - 1).clamp(min=0)
        goes_on = (owners[last] == owners) & (positions[last] == positions - 1) & (index > 0)
        before = torch.where(goes_on.unsqueeze(-1), streams[last], cache.streams[owners, (positions - 1) % cache.ring])
        cache.streams[owners, positions % cache.ring] = streams
        # Of position 0 that is the latent of position -1, which nothing sees.
        x, _ = self._layer.attention_input(self._input(embedded, before))
        rotations = self._target.ropes.at(WINDOW_ONLY, (positions - 1).clamp(min=0))
        latents = self._layer.attention.latents(x, rotations).to(cache.latents.dtype)
        cache.latents[owners, SINK_SLOTS + (positions - 1) % cache.ring] = latents

    @torch.inference_mode()
    def draft_rows(self, rows: RowBatch, cache: StreamCache) -> Tensor:
        """As ``backbone``, asking the host nothing."""
        assert rows.starts is not None
        firsts = rows.starts[:-1].long()
        owners, positions = rows.cache_rows[firsts], (rows.positions[firsts] - 1).clamp(min=0)
        streams = cache.streams[owners, positions % cache.ring].unflatten(-1, (self._target.config.hc_mult, -1))
        state = self._row_step(MtpRowState(cache, owners, positions, streams), rows.token_ids[firsts])
        self._latest, hidden = state, state.hidden
        assert hidden is not None
        return hidden.new_zeros((rows.positions.shape[0], hidden.shape[1])).index_copy_(0, firsts, hidden)

    def fuse(self, cache: StreamCache, most_rows: int, most_per_request: int) -> None:
        """Run the block of ``draft_rows`` over this filled cache by the kernels of ``sparkchat.kernels``.

        As of ``DsparkDrafter``; the block itself has one row of a request.
        """
        if not self._target.can_fuse:
            return
        _ = self._target.draft_head
        room = self._target.row_room(cache, most_rows, most_per_request)
        one = Stack.of([self._layer])
        self._fused = FusedStack(one, self._streams_head, self._norm, room, self._target.group)

    def prepare(self, end: int) -> None:
        """Positions of ``store_rows`` and ``draft_rows`` will lie below ``end``."""
        self._target.prepare(end)

    def _step(self, state: MtpState, token_ids: Tensor) -> MtpState:
        """Run the block at the state's positions with the tokens [R] that follow them; the streams become its own."""
        cache = state.cache
        spans = [
            Span(row, first, 1, position)
            for first, (row, position) in enumerate(zip(state.cache_rows, state.positions, strict=True))
        ]
        where = torch.tensor(state.positions, device=token_ids.device)
        sight = Sight(cache, spans, where, self._target.ropes, self._target.num_heads)
        streams = self._block(state.streams, token_ids, sight)
        sight.discard()
        return replace(state, streams=streams)

    def _row_step(self, state: MtpRowState, token_ids: Tensor) -> MtpRowState:
        """As ``_step``, asking the host nothing."""
        starts = torch.arange(token_ids.shape[0] + 1, dtype=torch.int32, device=token_ids.device)
        rows = RowBatch(token_ids, state.positions, state.cache_rows, state.positions + 1, starts)
        if self._fused is not None and self._fused.room.cache is state.cache:
            before, seen = self._read(state.streams, token_ids), RowPass.of(self._fused.room, rows)
            hidden, _, streams, _ = self._fused.run(before, token_ids, seen)
            return replace(state, streams=streams, hidden=hidden)
        sight = RowSight(state.cache, rows, self._target.ropes, self._target.num_heads)
        streams = self._block(state.streams, token_ids, sight)
        return replace(state, streams=streams, hidden=self._streams_head(streams))

    def _block(self, streams: Tensor, token_ids: Tensor, sight: Sight) -> Tensor:
        """streams [R, S, d] of positions, token_ids [R] that follow them -> the block's streams."""
        return self._layer(self._read(streams, token_ids), token_ids, 0, sight)

    def _read(self, streams: Tensor, token_ids: Tensor) -> Tensor:
        """What the block reads: streams [R, S, d], token_ids [R] -> [R, S, d]."""
        return self._input(self._target.embedding(token_ids), streams.flatten(1))

    @torch.inference_mode()
    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V] float32; zero where hidden is."""
        return self._target.draft_logits(self._norm(hidden.float(), torch.float32))

    def initial_state(self, count: int) -> MtpState | MtpRowState:
        """The state of the ``count`` blocks that ``backbone`` or ``draft_rows`` was last called with."""
        if self._latest is None or len(self._latest.positions) != count:
            raise ValueError(f"there is no state of {count} blocks; call backbone with them first")
        return self._latest

    @torch.inference_mode()
    def markov_step(
        self, previous_ids: Tensor, hidden: Tensor, state: MtpState | MtpRowState
    ) -> tuple[Tensor, MtpState | MtpRowState]:
        """previous_ids [R] (the anchor first) -> what is added to the base logits [R, V] float32, the next state.

        ``hidden`` is not looked at.
        """
        if state.is_first:
            zeros = torch.zeros((len(state.positions), self.config.vocab_size), device=previous_ids.device)
            return zeros, replace(state, is_first=False)
        following = state.one_further()
        if isinstance(following, MtpRowState):
            following = self._row_step(following, previous_ids)
            assert following.hidden is not None
            return self.base_logits(following.hidden), following
        following = self._step(following, previous_ids)
        return self.base_logits(self._streams_head(following.streams)), following
