"""DeepSeek's DSpark drafter for Gemma 4 (``Gemma4DSparkModel``): Gemma's full layers around the heads of models/dspark.

Shapes: N rows, d hidden size, m tapped layers, L draft layers, K key heads, D head size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparkchat.models.attention import SpanAttention, open_spans
from sparkchat.models.base import ForwardBatch
from sparkchat.models.dspark.backbone import store_context
from sparkchat.models.dspark.config import DrafterConfig, drafter_config
from sparkchat.models.dspark.drafter import Drafter, check_fit, linear_dtype, take_mapping
from sparkchat.models.dspark.heads import load_confidence, load_head
from sparkchat.models.gemma4.config import LayerKind, parse_kind, refuse_unknown
from sparkchat.models.gemma4.layer import Gemma4Layer
from sparkchat.models.gemma4.model import Gemma4
from sparkchat.models.gemma4.vocabulary import CappedHead, ScaledEmbedding
from sparkchat.models.hf_config import ConfigFile, read_config
from sparkchat.models.kv_cache import KVCache
from sparkchat.models.layers import Embedding, RMSNorm
from sparkchat.models.linear import Linear, make_linear
from sparkchat.models.quant import Weight, dense, stack_rows, take_rows
from sparkchat.models.rope import RopeTable
from sparkchat.models.shape import DecoderShape
from sparkchat.models.weights import FolderSource, rotary_pairs

ARCHITECTURE = "Gemma4DSparkModel"


def load_gemma4_drafter(path: Path, target: Gemma4, device: torch.device, dtype: torch.dtype | None) -> Drafter:
    """Load the drafter in a folder. Raises ModelNotFound, DamagedFile, or UsageError where it does not fit."""
    file = read_config(path)
    config, kind = parse_drafter(file)
    check_fit(path, config, target)
    source = FolderSource(path)
    mapping = take_mapping(path, source, config)
    matrices = dtype or linear_dtype(source, device)
    dtype = torch.bfloat16 if matrices is torch.int8 else matrices
    d = config.hidden_size
    embedding: Embedding = target.embedding
    if "embed_tokens.weight" in source:
        embedding = ScaledEmbedding(source.take("embed_tokens.weight", config.vocab_size, d), device, dtype)
    backbone = Gemma4Backbone(source, config, kind, embedding, device, matrices)
    head = None
    if config.markov_head_type is not None:
        sizes = (config.vocab_size, config.draft_vocab_size, d, config.markov_rank)
        head = load_head(source, config.markov_head_type, sizes, device, dtype)
    confidence = None
    if config.has_confidence:
        with_markov = head is not None and config.confidence_with_markov
        confidence = load_confidence(source, d, head.embedding if with_markov and head else None, device)
    base: Linear = target.head
    if "lm_head.weight" in source or mapping is not None:
        weight = (
            source.take("lm_head.weight", config.draft_vocab_size, d)
            if "lm_head.weight" in source
            else target.head_rows(mapping)
        )
        cap = file.number("final_logit_softcapping") if file.has("final_logit_softcapping") else None
        base = CappedHead(make_linear(weight, None, device=device, dtype=matrices), cap)
    source.finish(["t2d"])
    on_device = None if mapping is None else mapping.to(device)
    return Drafter(config, backbone, base, head, confidence, on_device, device, dtype)


def parse_drafter(config: ConfigFile) -> tuple[DrafterConfig, LayerKind]:
    """Raises DamagedFile or UsageError."""
    refuse_unknown(config)
    kind = parse_kind(config, is_full=True)
    layers = config.whole("num_hidden_layers", most=1000)
    shape = DecoderShape(
        hidden_size=config.whole("hidden_size"),
        intermediate_size=config.whole("intermediate_size"),
        num_layers=layers,
        num_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=kind.rope,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=(None,) * layers,
    )
    return drafter_config(config, shape), kind


class Gemma4Backbone:
    """Draft layers over a cache of context rows; the calls are those of models/dspark/backbone.py."""

    def __init__(
        self,
        source: FolderSource,
        config: DrafterConfig,
        kind: LayerKind,
        embedding: Embedding,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape, d = config.decoder, config.hidden_size
        self._kind, self._embedding = kind, embedding
        names = [f"layers.{layer}." for layer in range(shape.num_layers)]
        sizes = (d, shape.intermediate_size)
        self._layers = [Gemma4Layer(source, name, kind, sizes, shape.rms_eps, device, dtype) for name in names]
        self._norm = RMSNorm(dense(source.take("norm.weight", d)), shape.rms_eps, device)
        fc = source.take("fc.weight", d, len(config.target_layer_ids) * d)
        self._fc = make_linear(fc, None, device=device, dtype=dtype)
        self._context_norm = RMSNorm(dense(source.take("hidden_norm.weight", d)), shape.rms_eps, device)
        parts = [part for name in names for part in _context_rows(source, f"{name}self_attn.", kind, d)]
        self._kv = make_linear(stack_rows(parts), None, device=device, dtype=dtype)
        self._rope = RopeTable(kind.rope, kind.head_dim, device)

    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """Store the keys and values of context rows, from features [N, m*d], at their positions."""
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        rotations = self._rope.rows(batch.positions, max(span.end for span in spans))
        context = self._context_norm(self._fc(features.to(self._fc.dtype)).float(), self._kv.dtype)
        projected = self._kv(context).float().view(context.shape[0], len(self._layers), -1, self._kind.head_dim)
        kv = [layer.keys_and_values(projected[:, i], rotations) for i, layer in enumerate(self._layers)]
        store_context(cache, spans, batch.positions, torch.stack(kv, dim=1))

    def plan_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """None: no compiled kernels do this (see ``Backbone``)."""
        return

    def plan_blocks(self, batch: ForwardBatch, cache: KVCache) -> None:
        """None, as ``plan_context``."""
        return

    def run_blocks(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Blocks [anchor, mask...] -> hidden [N, d] float32. The block's keys and values are not kept."""
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        attention = SpanAttention(cache, spans, batch.positions, self._kind.group_size, is_block=True)
        rotations = self._rope.rows(batch.positions, max(span.end for span in spans))
        x = self._embedding(batch.token_ids)
        for index, layer in enumerate(self._layers):
            layer(x, rotations, index, attention, False)
        attention.discard()
        return self._norm(x, torch.float32)


def _context_rows(source: FolderSource, prefix: str, kind: LayerKind, d: int) -> list[Weight]:
    """Key rows in rotary pairs, then value rows where there are any."""
    paired = rotary_pairs(kind.head_dim)
    rows = (torch.arange(kind.num_kv_heads)[:, None] * kind.head_dim + paired).flatten()
    keys = take_rows(source.take(f"{prefix}k_proj.weight", kind.kv_width, d), rows)
    return [keys] if kind.keys_are_values else [keys, source.take(f"{prefix}v_proj.weight", kind.kv_width, d)]
