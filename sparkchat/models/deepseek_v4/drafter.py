"""The DSpark drafter inside DeepSeek V4 checkpoints: stages under ``mtp.*`` that draft a block in one pass.

The tapped features of the target (stream means, side by side) give one row per position, which every stage keeps the
latent of. A block [anchor, noise, ...] at positions s, s+1, ... sees the window of latents before s and all of itself;
its row i predicts the token at s+i+1. Embedding, output head and rotary tables are the target's.

Shapes: N rows, R requests, d hidden size, m stages and tapped layers, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparkchat.kernels.norm import add_rms_norm
from sparkchat.models.attention import Span, open_spans
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.cache import SINK_SLOTS, StateCache
from sparkchat.models.deepseek_v4.config import WINDOW_ONLY, DeepseekV4Config
from sparkchat.models.deepseek_v4.fused import FusedStack
from sparkchat.models.deepseek_v4.hyper import HyperHead
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.row_pass import RowPass
from sparkchat.models.deepseek_v4.row_products import ContextLatents
from sparkchat.models.deepseek_v4.row_sight import RowSight
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.deepseek_v4.stack import Stack
from sparkchat.models.deepseek_v4.tile_products import in_parts
from sparkchat.models.deepseek_v4.vocabulary import VocabularyHead, VocabularyRows, rows_for_drafts
from sparkchat.models.dspark.drafter import BlockWeights
from sparkchat.models.dspark.heads import ConfidenceHead, VanillaHead
from sparkchat.models.rows import RowBatch

SPARE_POSITIONS = 272
"""Positions a ring holds beside the window, the block's own among them; a rewind may go back over the rest. More than
the target's rings have for their longest span, so that it is never the drafter that an edit goes too far back for."""


@dataclass(frozen=True)
class BlockConfig:
    """What the engine reads of a drafter inside a checkpoint."""

    block_size: int
    """Drafts per block as trained: one anchor and block_size - 1 noise tokens go in."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """What ``TargetModel.forward`` taps for it."""
    markov_rank: int
    markov_head_type: str | None
    vocab_size: int
    draft_vocab_size: int


class ContextCache(StateCache):
    """The window latents of a drafter's stages."""

    def _can_resume(self, row: int, length: int, written: int) -> bool:
        """A block sees a whole window before its first row, a position more than a plain row does."""
        return all(super(ContextCache, self)._can_resume(row, n, written) for n in (length, max(0, length - 1)))


def new_context_cache(
    config: DeepseekV4Config, num_stages: int, max_rows: int, context: int, device: torch.device
) -> ContextCache:
    """Rings for ``num_stages`` window layers, with room for a block behind the context."""
    return ContextCache(
        config,
        (WINDOW_ONLY,) * num_stages,
        max_rows=max_rows,
        context=context + SPARE_POSITIONS,
        max_span=SPARE_POSITIONS,
        dtype=config.kv_dtype,
        device=device,
    )


def newest_rows(batch: ForwardBatch, cache: StateCache) -> tuple[list[Span], Tensor]:
    """The spans of context rows, and the batch rows [n] of them that the rings can hold."""
    ring = cache.stores[WINDOW_ONLY].ring
    spans = [
        Span(row, first, stop - first, cache.length(row))
        for row, first, stop in zip(batch.cache_rows, batch.row_starts, batch.row_starts[1:], strict=False)
    ]
    kept = [torch.arange(max(s.first, s.first + s.count - ring), s.first + s.count) for s in spans]
    return spans, torch.cat(kept).to(batch.positions.device)


class DsparkDrafter:
    """Drafts blocks for one target. The calls are those of ``models.dspark.drafter.Drafter``."""

    draft_to_target = None
    has_confidence = True

    def __init__(self, scope: Scope, config: DeepseekV4Config, target: DeepseekV4) -> None:
        """``scope``: mtp, ``config``: of the drafter's checkpoint. Raises DamagedFile for what cannot be read."""
        keys = config.dspark
        assert keys is not None
        num_stages = len(keys.target_layer_ids)
        first, last = scope.within("0"), scope.within(str(num_stages - 1))
        self._target, self._num_stages = target, num_stages
        self._fused: FusedStack | None = None
        self._context: ContextLatents | None = None
        self._project = first.linear("main_proj", has_fp8_input=True)
        self._project_norm = first.norm("main_norm", config.rms_eps)
        self._stack = Stack(scope, config, (WINDOW_ONLY,) * num_stages)
        self._streams_head = HyperHead(last, config)
        self._norm = last.norm("norm", config.rms_eps)
        heads = last.within("markov_head")
        w1, w2 = (heads.table(f"markov_{name}.weight", scope.dtype) for name in ("w1", "w2"))
        self._markov = VanillaHead(w1, VocabularyHead(heads.multiply_by(w2, None, False), scope.group), None)
        self._markov_part, self._group = w2, scope.group
        self._markov_rows = VocabularyRows(w2, scope.group)
        weight = last.tensor("confidence_head.proj.weight")[0]
        self._confidence = ConfidenceHead(weight, None, w1)
        self.config = BlockConfig(
            block_size=keys.block_size,
            mask_token_id=keys.noise_token_id,
            target_layer_ids=keys.target_layer_ids,
            markov_rank=keys.markov_rank,
            markov_head_type="vanilla",
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
        )

    def new_cache(self, max_rows: int, context: int) -> ContextCache:
        """Room for ``max_rows`` requests of ``context`` positions and a block behind them."""
        return new_context_cache(self._target.config, self._num_stages, max_rows, context, self._target.device)

    @torch.inference_mode()
    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: ContextCache) -> None:
        """Keep context rows from features [N, m*d] at ``batch.positions``; token ids are not looked at."""
        spans, newest = newest_rows(batch, cache)
        x = self._project_norm(self._project(features[newest].to(self._project.dtype)).float(), self._project.dtype)
        positions = batch.positions[newest]
        rotations = self._target.ropes.rows(WINDOW_ONLY, positions, max(s.end for s in spans))
        rows = _cache_rows(spans, batch.positions.device)[newest]
        store = cache.stores[WINDOW_ONLY]
        for stage, layer in enumerate(self._stack.layers):
            data = store.latents.data[stage]
            data[rows, SINK_SLOTS + positions % store.ring] = layer.attention.latents(x, rotations).to(data.dtype)
        for span in spans:
            cache.advance(span.cache_row, span.end)

    @torch.inference_mode()
    def backbone(self, batch: ForwardBatch, cache: ContextCache) -> Tensor:
        """Run blocks [anchor, noise, ...], of any lengths, at the end of their contexts -> hidden [N, d].

        The hidden rows are those before the final norm, which ``confidence`` takes. The cache stays as long as it was.
        """
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)  # type: ignore[arg-type]
        sight = Sight(cache, spans, batch.positions, self._target.ropes, self._target.num_heads, is_block=True)
        streams = self._stack.run(self._target.streams(batch.token_ids), batch.token_ids, sight)
        sight.discard()
        return self._streams_head(streams)

    @cached_property
    def block_weights(self) -> BlockWeights:
        """What ``kernels.markov`` needs of the heads, W2 whole on every rank; all ranks ask for it together."""
        w2 = rows_for_drafts(self._group.join(self._markov_part.T.contiguous()).T.contiguous())
        return BlockWeights(self._target.head, self._markov.embedding, w2, self._confidence.parameters)

    def fuse(self, cache: ContextCache, most_rows: int, most_per_request: int) -> None:
        """Run ``draft_rows`` and ``store_rows`` over this filled cache by the kernels of ``sparkchat.kernels``.

        ``most_rows`` of blocks; as many context rows as there are may be stored.
        """
        if not self._target.can_fuse:
            return
        _ = self._target.draft_head
        room = self._target.row_room(cache, most_rows, most_per_request)
        self._fused = FusedStack(self._stack, self._streams_head, self._norm, room, self._group)
        self._context = ContextLatents.of([layer.attention.tiles for layer in self._stack.layers])

    def prepare(self, end: int) -> None:
        """Positions of ``store_rows`` and ``draft_rows`` will lie below ``end``."""
        self._target.prepare(end)

    @torch.inference_mode()
    def store_rows(self, features: Tensor, rows: RowBatch, cache: ContextCache) -> None:
        """As ``extend_context``, asking the host nothing; the cache is filled and keeps no count."""
        if self._fused is not None and self._fused.room.cache is cache:
            self._store_by_kernels(features, RowPass.of(self._fused.room, rows))
            return
        x = self._project_norm(self._project(features.to(self._project.dtype)).float(), self._project.dtype)
        rotations = self._target.ropes.at(WINDOW_ONLY, rows.positions)
        store = cache.stores[WINDOW_ONLY]
        slots = SINK_SLOTS + rows.positions % store.ring
        for stage, layer in enumerate(self._stack.layers):
            data = store.latents.data[stage]
            data[rows.cache_rows, slots] = layer.attention.latents(x, rotations).to(data.dtype)

    def _store_by_kernels(self, features: Tensor, rows: RowPass) -> None:
        """Keep what all stages see of features [N, m*d], by ``sparkchat.kernels``."""
        norm, dtype = self._project_norm, self._project.dtype
        x = torch.empty((features.shape[0], norm.weight.shape[0]), dtype=dtype, device=features.device)
        add_rms_norm(None, in_parts(self._project, features.to(dtype)), norm.weight, norm.eps, x)
        layers = [layer.attention for layer in self._stack.layers]
        latents = None if self._context is None else self._context(x)
        for stage, layer in enumerate(layers):
            layer.keep_latents(layer.raw_latents(x) if latents is None else latents[stage], stage, rows)

    @torch.inference_mode()
    def draft_rows(self, rows: RowBatch, cache: ContextCache) -> Tensor:
        """As ``backbone``, asking the host nothing: blocks of one width, seen up to ``rows.ends``."""
        assert rows.starts is not None
        if self._fused is not None and self._fused.room.cache is cache:
            taken = RowPass.of(self._fused.room, rows, is_block=True)
            return self._fused.run(self._target.streams(rows.token_ids), rows.token_ids, taken)[0]
        width = rows.positions.shape[0] // (rows.starts.shape[0] - 1)
        sight = RowSight(cache, rows, self._target.ropes, self._target.num_heads, block=width)
        streams = self._stack.run(self._target.streams(rows.token_ids), rows.token_ids, sight)
        return self._streams_head(streams)

    @torch.inference_mode()
    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V] float32, before the sequential head."""
        if self._fused is not None:
            normed = torch.empty(hidden.shape, dtype=self._target.head.dtype, device=hidden.device)
            add_rms_norm(None, hidden, self._norm.weight, self._norm.eps, normed)
            return self._target.draft_logits(normed)
        return self._target.draft_logits(self._norm(hidden.float(), torch.float32))

    def initial_state(self, count: int) -> Tensor:
        """The sequential head keeps nothing between drafts."""
        return self._markov.initial_state(count)

    @torch.inference_mode()
    def markov_step(self, previous_ids: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """previous_ids [R] (the anchor first) -> the bias [R, V] float32 on the base logits, and the state."""
        return self._markov.step(previous_ids, hidden, state)

    @torch.inference_mode()
    def markov_vector(self, previous_ids: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """As ``markov_step``, but what W2 would be applied to, [R, r] float32."""
        vector, state = self._markov.vector(previous_ids, hidden, state)
        return vector.float(), state

    @torch.inference_mode()
    def markov_rows(self, columns: Tensor) -> Tensor:
        """columns [...] token ids -> rows of W2 [..., r] float32: bias = rows . vector."""
        return self._markov_rows(columns)

    @torch.inference_mode()
    def confidence(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        """previous_ids [R], hidden [R, d] -> logits [R] float32 that the draft is accepted."""
        return self._confidence(previous_ids, hidden)


def _cache_rows(spans: Sequence[Span], device: torch.device) -> Tensor:
    """[N] the cache row of every batch row."""
    return torch.tensor([s.cache_row for s in spans for _ in range(s.count)], device=device)
