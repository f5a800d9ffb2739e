"""A DSpark drafter for a loaded target (arXiv 2607.05147, section 3), read from DeepSpec's folder layout.

A block is [anchor, mask, ...] at positions s, s+1, ...; row i predicts the token at s+i+1. Its rows see the target's
features of positions before s and each other. Shapes: N rows, R requests, d hidden size, m tapped layers, V target
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.models.base import ForwardBatch
from sparkchat.models.dense import DecoderStack, DenseModel
from sparkchat.models.dspark.backbone import Backbone
from sparkchat.models.dspark.config import DrafterConfig, read_drafter_config
from sparkchat.models.dspark.heads import ConfidenceHead, VanillaHead, load_confidence, load_head
from sparkchat.models.dspark.kept_block import KeptBlocks
from sparkchat.models.dspark.lane_heads import (
    NOTHING,
    SMALLEST_SCREENED,
    ExactRows,
    LaneHeads,
    is_drawn_by_kernel,
    screened_head,
)
from sparkchat.models.dummy import DummySource
from sparkchat.models.kv_cache import KVCache
from sparkchat.models.layers import Embedding
from sparkchat.models.linear import Linear, make_lanes
from sparkchat.models.native import LaneLinear, run_parts
from sparkchat.models.paged_cache import PagedCache
from sparkchat.models.quant import GROUP, dense
from sparkchat.models.rows import RowBatch
from sparkchat.models.weights import FolderSource

if TYPE_CHECKING:
    from sparkchat.kernels.cpu.matrix import Part

DraftSource = FolderSource | DummySource
MAX_SPAN = 1 << 20
"""Context and blocks live in a store that grows, so a span may be of any length."""


@dataclass(frozen=True)
class BlockWeights:
    """The heads' weights as they lie in memory."""

    base: Linear
    w1: Tensor | None
    """[V, r]"""
    w2: Tensor | RoundedRows | None
    """[Vd, r]"""
    confidence: tuple[Tensor, Tensor | None] | None
    """Weight [d] or [d + r] and bias [1], float32."""


class Drafter:
    """Drafts blocks for one target."""

    def __init__(
        self,
        config: DrafterConfig,
        backbone: Backbone,
        base_head: Linear,
        head: VanillaHead | None,
        confidence: ConfidenceHead | None,
        draft_to_target: Tensor | None,
        device: torch.device,
        kv_dtype: torch.dtype,
        exact: ExactRows = NOTHING,
    ) -> None:
        """``exact``: of a base head that only finds the likeliest tokens."""
        self.config, self.draft_to_target = config, draft_to_target
        self._backbone, self._base_head, self._head, self._confidence = backbone, base_head, head, confidence
        self._device = device
        self._kv_dtype = kv_dtype
        self.lane_heads = LaneHeads.of(head, confidence, draft_to_target, device, exact)
        """What draws a block in one call; None where that cannot be done."""
        self.kept_blocks: KeptBlocks | None = None
        """Does what ``draft_block`` does for one request with few pending features; None where that cannot be done."""
        if isinstance(base_head, LaneLinear) and backbone.can_keep:
            self.kept_blocks = KeptBlocks(backbone, base_head, config.mask_token_id)

    @classmethod
    def load(
        cls,
        path: Path,
        target: DenseModel,
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        source: DraftSource | None = None,
    ) -> Drafter:
        """``source`` None reads the folder's own weights.

        Raises ModelNotFound, DamagedFile, or UsageError where it does not fit ``target``.
        """
        config = read_drafter_config(path)
        check_fit(path, config, target)
        source = source or FolderSource(path)
        mapping = take_mapping(path, source, config)
        matrix_dtype = dtype or linear_dtype(source, device)
        dtype = torch.bfloat16 if matrix_dtype is torch.int8 else matrix_dtype
        shape, d = config.decoder, config.hidden_size
        embedding = target.embedding
        if "embed_tokens.weight" in source:
            embedding = Embedding(source.take("embed_tokens.weight", config.vocab_size, d), device, dtype)
        stack = DecoderStack(source, shape, "", device, matrix_dtype)
        backbone = Backbone(source, stack, embedding, len(config.target_layer_ids), device, matrix_dtype)
        head = None
        if config.markov_head_type is not None:
            sizes = (config.vocab_size, config.draft_vocab_size, d, config.markov_rank)
            head = load_head(source, config.markov_head_type, sizes, device, dtype)
        confidence = None
        if config.has_confidence:
            with_markov = head is not None and config.confidence_with_markov
            confidence = load_confidence(source, d, head.embedding if with_markov and head else None, device)
        is_screened = matrix_dtype is torch.int8 and is_drawn_by_kernel(head, device)
        base_head, exact = _load_base_head(source, config, target, mapping, device, matrix_dtype, is_screened)
        source.finish(["t2d"])
        on_device = None if mapping is None else mapping.to(device)
        return cls(config, backbone, base_head, head, confidence, on_device, device, dtype, exact)

    @property
    def has_confidence(self) -> bool:
        return self._confidence is not None

    @property
    def can_page(self) -> bool:
        """See ``DenseModel.can_page``."""
        return self._backbone.can_page

    def new_cache(self, max_rows: int, context: int, *, pages: int | None = None, tokens: int | None = None) -> KVCache:
        """Room for ``max_rows`` requests of ``context`` positions and a block behind them; ``pages`` and ``tokens`` as
        of ``DenseModel.new_cache``."""
        shape = self.config.decoder
        kind = partial(KVCache, tokens=tokens) if pages is None else partial(PagedCache, num_pages=pages)
        return kind(
            shape.windows,
            shape.num_kv_heads,
            shape.head_dim,
            max_rows=max_rows,
            context=context + self.config.block_size,
            max_span=MAX_SPAN,
            dtype=self._kv_dtype,
            device=self._device,
        )

    @torch.inference_mode()
    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """Store context rows from features [N, m*d] at ``batch.positions``; token ids are not looked at."""
        self._backbone.extend_context(features, batch, cache)

    @torch.inference_mode()
    def backbone(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run blocks [anchor, mask, ...], of any lengths, at the end of their contexts -> hidden [N, d] float32.

        The cache stays as long as it was: a block's own keys and values are not kept.
        """
        return self._backbone.run_blocks(batch, cache)

    @torch.inference_mode()
    def draft_block(
        self, pending: tuple[Tensor, ForwardBatch] | None, batch: ForwardBatch, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """``extend_context`` by the pending features, ``backbone`` and ``base_logits`` -> hidden [N, d], base [N, Vd].

        On a processor whose kernels take all three this is one call of all threads.
        """
        parts: list[Part] = []
        # What grows later would leave the first part writing to where the rows were.
        before = {} if pending is None else dict(zip(pending[1].cache_rows, pending[1].counts, strict=True))
        for row, count in zip(batch.cache_rows, batch.counts, strict=True):
            cache.reserve(row, before.get(row, 0) + count)
        if pending is not None:
            part = self._backbone.plan_context(*pending, cache)
            if part is None:
                self.extend_context(*pending, cache)
            else:
                parts.append(part)
        planned, head = self._backbone.plan_blocks(batch, cache), self._base_head
        if planned is None or not isinstance(head, LaneLinear):
            if parts:
                run_parts(*parts)
            hidden = self.backbone(batch, cache) if planned is None else planned[1]
            if planned is not None:
                run_parts(planned[0])
            return hidden, self.base_logits(hidden)
        last, base = head.plan(planned[1])
        run_parts(*parts, planned[0], last)
        return planned[1], base

    @torch.inference_mode()
    def store_rows(self, features: Tensor, rows: RowBatch, cache: KVCache) -> None:
        """Store context rows from features [N, m*d]; see ``Backbone.store_rows``."""
        self._backbone.store_rows(features, rows, cache)

    @torch.inference_mode()
    def draft_rows(self, rows: RowBatch, cache: KVCache, x: Tensor | None = None) -> Tensor:
        """Run block rows -> hidden [N, d] float32; see ``Backbone.draft_rows``."""
        return self._backbone.draft_rows(rows, cache, x)

    @property
    def embedding(self) -> Embedding:
        """Of the block's tokens."""
        return self._backbone.embedding

    def fuse(self, cache: KVCache, most_rows: int, block: int) -> None:
        """Run ``draft_rows`` by the kernels of ``sparkchat.kernels`` from now on."""
        self._backbone.fuse(cache, most_rows, block)

    @property
    def block_weights(self) -> BlockWeights | None:
        """What ``kernels.markov`` needs of the heads; None where the sequential head is none that it computes."""
        if self._head is not None and type(self._head) is not VanillaHead:
            return None
        return BlockWeights(
            base=self._base_head,
            w1=None if self._head is None else self._head.embedding,
            w2=None if self._head is None else self._head.w2.weight,
            confidence=None if self._confidence is None else self._confidence.parameters,
        )

    def prepare(self, end: int) -> None:
        """Positions that captured rows may have lie below ``end``."""
        self._backbone.prepare(end)

    @torch.inference_mode()
    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, Vd] float32, before the sequential head."""
        return self._base_head(hidden.to(self._base_head.dtype)).float()

    @torch.inference_mode()
    def initial_state(self, count: int) -> Tensor:
        """State of the sequential head before the first draft of each of ``count`` blocks."""
        return torch.zeros((count, 0), device=self._device) if self._head is None else self._head.initial_state(count)

    @torch.inference_mode()
    def markov_step(self, previous_ids: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """previous_ids [R] target ids (the anchor first), hidden [R, d] of the draft's row, state of the last step.

        Returns the bias [R, Vd] float32 to add to the base logits, and the next state.
        """
        if self._head is None:
            return torch.zeros((previous_ids.shape[0], self.config.draft_vocab_size), device=self._device), state
        return self._head.step(previous_ids, hidden, state)

    @torch.inference_mode()
    def markov_vector(self, previous_ids: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor | None, Tensor]:
        """As ``markov_step``, but what W2 would be applied to, [R, r] float32; None without a sequential head."""
        if self._head is None:
            return None, state
        vector, state = self._head.vector(previous_ids, hidden, state)
        return vector.float(), state

    @torch.inference_mode()
    def markov_rows(self, columns: Tensor) -> Tensor | None:
        """columns [...] draft ids -> rows of W2 [..., r] float32: bias = rows . vector. None without the head."""
        return None if self._head is None else self._head.rows_of(columns)

    @torch.inference_mode()
    def confidence(self, previous_ids: Tensor, hidden: Tensor) -> Tensor:
        """previous_ids [R] target ids, hidden [R, d] -> logits [R] float32 that the draft is accepted.

        Raises ValueError without a confidence head (``has_confidence``).
        """
        if self._confidence is None:
            raise ValueError("this drafter has no confidence head")
        return self._confidence(previous_ids, hidden)


def check_fit(path: Path, config: DrafterConfig, target: DenseModel) -> None:
    """Raises UsageError where the drafter was made for another target."""

    def need(ok: bool, what: str, found: object, wanted: object) -> None:
        if not ok:
            raise UsageError(
                f"drafter {path} does not fit this model: its {what} is {found}, the model's {wanted}; "
                "give the drafter trained for it"
            )

    layers = target.config.num_layers
    need(config.hidden_size == target.config.hidden_size, "hidden size", config.hidden_size, target.config.hidden_size)
    need(config.vocab_size == target.config.vocab_size, "vocabulary", config.vocab_size, target.config.vocab_size)
    need(
        config.target_layer_ids[-1] < layers, "last tapped layer", config.target_layer_ids[-1], f"last is {layers - 1}"
    )
    need(config.num_target_layers in (None, layers), "layer count of the target", config.num_target_layers, layers)
    need(
        config.mask_token_id < config.vocab_size,
        "mask token",
        config.mask_token_id,
        f"ids end at {config.vocab_size - 1}",
    )


def take_mapping(path: Path, source: DraftSource, config: DrafterConfig) -> Tensor | None:
    """Target ids [Vd] of a reduced draft vocabulary (d2t holds differences), or None."""
    if "d2t" not in source:
        if config.draft_vocab_size != config.vocab_size:
            raise DamagedFile(f"{path}: draft_vocab_size is {config.draft_vocab_size} but the tensor d2t is missing")
        return None
    steps = source.take_whole_numbers("d2t")
    ids = steps + torch.arange(steps.shape[0])
    if steps.shape[0] != config.draft_vocab_size:
        raise DamagedFile(f"{path}: d2t has {steps.shape[0]} entries, draft_vocab_size is {config.draft_vocab_size}")
    if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()) or ids.unique().numel() < ids.numel():
        raise DamagedFile(f"{path}: d2t does not name different token ids below {config.vocab_size}")
    return ids


def _load_base_head(
    source: DraftSource,
    config: DrafterConfig,
    target: DenseModel,
    mapping: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    is_screened: bool,
) -> tuple[Linear, ExactRows]:
    """The drafter's own output head, or the target's (the rows of the draft vocabulary).

    ``is_screened``: of a large vocabulary, one that finds the likeliest tokens, whose rows come with it.
    """
    if "lm_head.weight" in source:
        weight = source.take("lm_head.weight", config.draft_vocab_size, config.hidden_size)
    elif mapping is None:
        return target.head, NOTHING
    else:
        weight = target.head_rows(mapping)
    if is_screened and config.draft_vocab_size >= SMALLEST_SCREENED and config.hidden_size % GROUP == 0:
        return screened_head(dense(weight))
    return make_lanes(weight, None, device=device, dtype=dtype), NOTHING


def linear_dtype(source: DraftSource, device: torch.device) -> torch.dtype:
    """Format of the large matrices where nothing was asked for: rounded to 8 bits on the CPU, unless stored in fp32.

    Rounding moves the law that drafts are drawn from, not the law of the output.
    """
    if device.type != "cpu":
        return torch.bfloat16
    return torch.float32 if source.dtype_of("fc.weight") == "F32" else torch.int8
