"""A dense decoder: Llama, Mistral, Qwen2 and Qwen3, from a Hugging Face folder or a GGUF file.

Shapes: N rows, d hidden size, V vocabulary, m tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparkchat.models.attention import Span, SpanAttention, open_spans
from sparkchat.models.base import ForwardBatch, ModelConfig
from sparkchat.models.fused import FusedStack, product
from sparkchat.models.kv_cache import KVCache
from sparkchat.models.layers import DecoderLayer, Embedding, RMSNorm, spread_rotations
from sparkchat.models.linear import Linear, PlainLinear, make_lanes
from sparkchat.models.native import LaneLinear, NativeStack, run_parts
from sparkchat.models.paged_cache import PagedCache
from sparkchat.models.quant import GroupedWeight, Weight, dense
from sparkchat.models.refined_head import RefinedHead
from sparkchat.models.rope import RopeTable
from sparkchat.models.rows import RowAttention, RowBatch
from sparkchat.models.shape import DecoderShape
from sparkchat.models.weights import TensorSource, layer_weights

LONG_SPAN = 16
"""Spans of more rows take the product for many rows. It is the span that counts, not the batch: a request
must get the same numbers alone and beside others."""


class DecoderStack:
    """Decoder layers and the final norm, over a residual stream in float32."""

    def __init__(
        self, source: TensorSource, shape: DecoderShape, prefix: str, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.shape = shape
        self.layers = [
            DecoderLayer(shape, layer_weights(source, shape, f"{prefix}layers.{i}."), device, dtype)
            for i in range(shape.num_layers)
        ]
        self.norm = RMSNorm(dense(source.take(f"{prefix}norm.weight", shape.hidden_size)), shape.rms_eps, device)
        self.rope = RopeTable(shape.rope, shape.head_dim, device)
        self.native = NativeStack(self) if NativeStack.fits(self) else None
        """Runs these layers in the place of ``run``, where it is not None."""

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        attention: SpanAttention,
        is_long: bool,
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """x [N, d] float32, consumed -> hidden [N, d] float32. ``on_layer`` sees each layer's index and output."""
        return self._run(x, self.rope.rows(positions, max(s.end for s in spans)), attention, is_long, on_layer)

    def run_rows(
        self, x: Tensor, rows: RowBatch, attention: RowAttention, on_layer: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """As ``run``, asking the host nothing."""
        return self._run(x, self.rope.at(rows.positions), attention, False, on_layer)

    def _run(
        self,
        x: Tensor,
        rotations: Tensor,
        attention: SpanAttention | RowAttention,
        is_long: bool,
        on_layer: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        shape = self.shape
        rotations = spread_rotations(rotations, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        for index, layer in enumerate(self.layers):
            layer(x, rotations, index, attention, is_long)
            if on_layer is not None:
                on_layer(index, x)
        return self.norm(x, torch.float32)


def forward_by_length(
    batch: ForwardBatch, forward: Callable[[ForwardBatch, bool], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """``forward(part, is_long)`` of the whole batch; on a CPU long and short spans apart where it holds both.

    A span of a prompt takes other products than a decoded row, and a row's bits must not depend on its batch mates.
    """
    long = [r for r, count in enumerate(batch.counts) if count > LONG_SPAN]
    if not long or len(long) == len(batch.counts) or batch.token_ids.device.type != "cpu":
        return forward(batch, bool(long))
    short = [r for r in range(len(batch.counts)) if r not in long]
    (part, rows), (long_part, long_rows) = batch.part(short), batch.part(long)
    outputs = zip(forward(part, False), forward(long_part, True), strict=True)
    order = torch.cat([rows, long_rows]).argsort()
    hidden, taps = (None if a is None else torch.cat([a, b])[order] for a, b in outputs)
    assert hidden is not None
    return hidden, taps


class DenseModel:
    """The target. See ``TargetModel`` in base.py for the calls."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, device: torch.device, dtype: torch.dtype | None, prefix: str
    ) -> None:
        """``dtype`` None keeps 4 bit codes and makes the rest bf16."""
        shape, vocab = config.decoder, config.vocab_size
        self.device = device
        # A damaged row of the table ends the requests that use its token, and no others.
        table = source.take(f"{prefix}embed_tokens.weight", vocab, shape.hidden_size, allow_nan=True)
        self.embedding = Embedding(table, device, dtype or torch.bfloat16)
        self.stack = DecoderStack(source, shape, prefix, device, dtype)
        self._head_weight = self._take_head(source, table, config)
        self.head = _make_head(self._head_weight, device, dtype)
        self.kv_dtype = dtype or torch.bfloat16
        self.fused: FusedStack | None = None
        kernel = self.stack.layers[0].qkv.kernel
        self.config = replace(
            config, dtype_name=_dtype_name(self.stack.layers), linear_kernel=kernel, kv_dtype=self.kv_dtype
        )

    def _take_head(self, source: TensorSource, table: Weight, config: ModelConfig) -> Weight:
        if config.tie_word_embeddings:
            return table
        return source.take("lm_head.weight", config.vocab_size, config.hidden_size)

    @property
    def can_page(self) -> bool:
        """Whether its cache may lie in pages: processor kernels want a row in one piece."""
        return self.stack.native is None and None in self.config.decoder.windows

    def new_cache(
        self, max_rows: int, context: int, max_block: int, *, pages: int | None = None, tokens: int | None = None
    ) -> KVCache:
        """``pages``: of all rows together (``can_page``); without, storage grows, to ``tokens`` at most if given."""
        shape = self.config.decoder
        kind = partial(KVCache, tokens=tokens) if pages is None else partial(PagedCache, num_pages=pages)
        return kind(
            shape.windows,
            shape.num_kv_heads,
            shape.head_dim,
            max_rows=max_rows,
            context=context,
            max_span=max_block,
            dtype=self.kv_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: KVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        if self.stack.native is not None:
            return self._forward_native(self.stack.native, batch, cache, tap_layers)
        return forward_by_length(batch, lambda part, is_long: self._forward(part, cache, tap_layers, is_long))

    def _forward(
        self, batch: ForwardBatch, cache: KVCache, tap_layers: tuple[int, ...], is_long: bool
    ) -> tuple[Tensor, Tensor | None]:
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        attention = SpanAttention(cache, spans, batch.positions, self.config.decoder.group_size)
        x = self.embedding(batch.token_ids)
        taps = torch.empty((x.shape[0], len(tap_layers), x.shape[1]), device=self.device) if tap_layers else None

        def keep(index: int, output: Tensor) -> None:
            if taps is not None and index in tap_layers:
                taps[:, tap_layers.index(index)] = output

        keep(-1, x)
        hidden = self.stack.run(x, batch.positions, spans, attention, is_long, keep if tap_layers else None)
        attention.advance()
        return hidden, None if taps is None else taps.flatten(1)

    @torch.inference_mode()
    def forward_logits(
        self, batch: ForwardBatch, cache: KVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """``forward`` and the logits [N, V] float32 of all its rows; and the taps."""
        if self.stack.native is None or not isinstance(self.head, LaneLinear):
            hidden, taps = self.forward(batch, cache, tap_layers)
            return self.logits(hidden), taps
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        part, hidden, taps = self.stack.native.plan(self.embedding(batch.token_ids), spans, cache, tap_layers)
        head, logits = self.head.plan(hidden)
        run_parts(part, head)
        for span in spans:
            cache.advance(span.cache_row, span.end)
        return logits, taps

    def _forward_native(
        self, native: NativeStack, batch: ForwardBatch, cache: KVCache, tap_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        hidden, taps = native.run(self.embedding(batch.token_ids), spans, cache, tap_layers)
        for span in spans:
            cache.advance(span.cache_row, span.end)
        return hidden, taps

    @torch.inference_mode()
    def decode_rows(
        self, rows: RowBatch, cache: KVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """As ``forward``, for rows that lie on the device with all that is known of them; the cache keeps no count.

        Positions must be below what ``prepare`` was given, and the cache filled.
        """
        x = self.embedding(rows.token_ids)
        if self.fused is not None:
            return self.fused.run(x, rows, tap_layers)
        attention = RowAttention(cache, rows, self.config.decoder.group_size)
        taps: dict[int, Tensor] = {-1: x.clone()} if -1 in tap_layers else {}

        def keep(index: int, output: Tensor) -> None:
            if index in tap_layers:
                taps[index] = output.clone()

        hidden = self.stack.run_rows(x, rows, attention, keep if tap_layers else None)
        return hidden, torch.cat([taps[layer] for layer in tap_layers], dim=1) if tap_layers else None

    def prepare(self, end: int) -> None:
        """Positions of ``decode_rows`` will lie below ``end``."""
        self.stack.rope.prepare(end)

    def fuse(self, cache: KVCache, most_rows: int, most_per_request: int) -> None:
        """Run ``decode_rows`` over this filled cache by the kernels of ``sparkchat.kernels`` from now on."""
        self.fused = FusedStack(self.stack, cache, most_rows, most_per_request, cache.context)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        if self.fused is not None and isinstance(self.head, PlainLinear):
            return product(hidden.to(self.head.dtype), self.head, out_dtype=torch.float32)
        return self.head(hidden.to(self.head.dtype)).float()

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows [n, d] of the output head on the CPU, for a drafter with a vocabulary of its own."""
        weight = self._head_weight
        return weight.rows(token_ids).dense() if isinstance(weight, GroupedWeight) else weight[token_ids]


def _make_head(weight: Weight, device: torch.device, dtype: torch.dtype | None) -> Linear:
    head = make_lanes(weight, None, device=device, dtype=dtype)
    if isinstance(head, LaneLinear) or not isinstance(weight, GroupedWeight):
        return head
    return RefinedHead(weight) if dtype is None and device.type == "cpu" else head


def _dtype_name(layers: list[DecoderLayer]) -> str:
    linear = layers[0].qkv
    stored = {"int4pack": "q4_1", "q4-lanes": "q4_1", "q8-lanes": "q8_0", "bf16-lanes": "bfloat16", "fp8": "float8"}
    return stored.get(linear.kernel) or str(linear.dtype).removeprefix("torch.")
