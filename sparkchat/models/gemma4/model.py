"""Gemma 4 as a target; ``TargetModel`` in models/base.py describes the calls.

Shapes: N rows, d hidden size, V vocabulary, m tapped layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparkchat.models.attention import SpanAttention, open_spans
from sparkchat.models.base import ForwardBatch
from sparkchat.models.dense import forward_by_length
from sparkchat.models.gemma4.cache import TwoCaches
from sparkchat.models.gemma4.config import Gemma4Config, read_gemma4_config
from sparkchat.models.gemma4.layer import Gemma4Layer
from sparkchat.models.gemma4.vocabulary import CappedHead, ScaledEmbedding
from sparkchat.models.layers import RMSNorm
from sparkchat.models.linear import make_linear
from sparkchat.models.quant import Weight, dense
from sparkchat.models.rope import RopeTable
from sparkchat.models.weights import FolderSource, TensorSource

PREFIXES = ("model.language_model.", "model.")
"""Of the text model's tensors, beside images and sound and alone."""


def load_gemma4(path: Path, device: torch.device, dtype: torch.dtype | None) -> Gemma4:
    """Load the text model of a folder. Raises ModelNotFound, DamagedFile or UsageError."""
    config, source = read_gemma4_config(path), FolderSource(path)
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in source), PREFIXES[-1])
    if dtype is None:
        is_full = device.type == "cpu" and source.dtype_of(f"{prefix}embed_tokens.weight") == "F32"
        dtype = torch.float32 if is_full else torch.bfloat16
    model = Gemma4(source, config, device, dtype, prefix)
    others = [name for name in source.names() if prefix == PREFIXES[0] and not name.startswith(prefix)]
    source.finish([*others, "lm_head.weight"] if config.tie_word_embeddings else others)
    return model


class Gemma4:
    """The text model."""

    def __init__(
        self, source: TensorSource, config: Gemma4Config, device: torch.device, dtype: torch.dtype, prefix: str
    ) -> None:
        self.device, self.kv_dtype = device, dtype
        d = config.hidden_size
        table = source.take(f"{prefix}embed_tokens.weight", config.vocab_size, d, allow_nan=True)
        self.embedding = ScaledEmbedding(table, device, dtype)
        self.layers = [
            Gemma4Layer(
                source,
                f"{prefix}layers.{layer}.",
                config.kind(layer),
                (d, config.intermediate_size),
                config.rms_eps,
                device,
                dtype,
            )
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(dense(source.take(f"{prefix}norm.weight", d)), config.rms_eps, device)
        self._ropes = [RopeTable(kind.rope, kind.head_dim, device) for kind in (config.sliding, config.full)]
        self._places = [config.is_full[:layer].count(is_full) for layer, is_full in enumerate(config.is_full)]
        """[num_layers] index of a layer in the cache of its kind."""
        self._head_weight = table if config.tie_word_embeddings else source.take("lm_head.weight", config.vocab_size, d)
        self.head = CappedHead(make_linear(self._head_weight, None, device=device, dtype=dtype), config.softcap)
        qkv = self.layers[0].qkv
        self.config = replace(
            config, dtype_name=str(qkv.dtype).removeprefix("torch."), linear_kernel=qkv.kernel, kv_dtype=dtype
        )

    def new_cache(self, max_rows: int, context: int, max_block: int) -> TwoCaches:
        return TwoCaches(
            self.config, max_rows=max_rows, context=context, max_span=max_block, dtype=self.kv_dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: TwoCaches, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        return forward_by_length(batch, lambda part, is_long: self._forward(part, cache, tap_layers, is_long))

    def _forward(
        self, batch: ForwardBatch, cache: TwoCaches, tap_layers: tuple[int, ...], is_long: bool
    ) -> tuple[Tensor, Tensor | None]:
        caches, kinds = (cache.sliding, cache.full), (self.config.sliding, self.config.full)
        spans = [open_spans(batch.cache_rows, batch.row_starts, each) for each in caches]
        attentions = [
            SpanAttention(each, own, batch.positions, kind.group_size)
            for each, own, kind in zip(caches, spans, kinds, strict=True)
        ]
        end = max(span.end for span in spans[0])
        rotations = [rope.rows(batch.positions, end) for rope in self._ropes]
        x = self.embedding(batch.token_ids)
        taps = {-1: x.clone()} if -1 in tap_layers else {}
        for index, layer in enumerate(self.layers):
            which = int(self.config.is_full[index])
            layer(x, rotations[which], self._places[index], attentions[which], is_long)
            if index in tap_layers:
                taps[index] = x.clone()
        for attention in attentions:
            attention.advance()
        hidden = self._norm(x, torch.float32)
        return hidden, torch.cat([taps[layer] for layer in tap_layers], dim=1) if tap_layers else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.head.dtype))

    def head_rows(self, token_ids: Tensor) -> Weight:
        """Rows [n, d] of the output head on the CPU, for a drafter with a vocabulary of its own."""
        return dense(self._head_weight)[token_ids]
