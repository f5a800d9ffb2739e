"""The parallel stage: target features become keys and values, and a block attends to them and to itself.

Shapes: N rows, d hidden size, m tapped layers, L draft layers, K key heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.norm import add_rms_norm
from sparkchat.kernels.rope import write_context
from sparkchat.models.attention import Span, SpanAttention, open_spans
from sparkchat.models.base import ForwardBatch
from sparkchat.models.dense import DecoderStack
from sparkchat.models.fused import FusedStack, product
from sparkchat.models.kv_cache import KVCache, LayerStore
from sparkchat.models.layers import Embedding, RMSNorm, rotate_
from sparkchat.models.linear import PlainLinear, make_lanes
from sparkchat.models.native import LaneLinear, NativeContext, run_parts
from sparkchat.models.quant import Weight, dense, stack_rows
from sparkchat.models.rows import RowAttention, RowBatch
from sparkchat.models.weights import TensorSource, rotary_pairs

if TYPE_CHECKING:
    from sparkchat.kernels.cpu.decoder import Rows
    from sparkchat.kernels.cpu.matrix import Part


class ContextProjection:
    """Target features -> keys and values of all draft layers, in one product."""

    def __init__(self, source: TensorSource, stack: DecoderStack, taps: int, device: torch.device, dtype: torch.dtype):
        shape = stack.shape
        self._shape = shape
        self._fused_norm: Tensor | None = None
        """[L, K, D]"""
        self._fc = make_lanes(
            source.take("fc.weight", shape.hidden_size, taps * shape.hidden_size), None, device=device, dtype=dtype
        )
        self._norm = RMSNorm(source.take("hidden_norm.weight", shape.hidden_size), shape.rms_eps, device)
        names = [f"layers.{i}.self_attn." for i in range(shape.num_layers)]
        paired = rotary_pairs(shape.head_dim)
        rows = (torch.arange(shape.num_kv_heads)[:, None] * shape.head_dim + paired).flatten()
        parts: list[Weight] = []
        for name in names:
            parts.append(source.take(f"{name}k_proj.weight", shape.kv_width, shape.hidden_size)[rows])
            parts.append(source.take(f"{name}v_proj.weight", shape.kv_width, shape.hidden_size))
        self._kv = make_lanes(stack_rows(parts), None, device=device, dtype=dtype)
        norms = torch.stack([dense(source.take(f"{name}k_norm.weight", shape.head_dim))[paired] for name in names])
        self._k_norm = RMSNorm(norms.unsqueeze(1), shape.rms_eps, device)
        self.native: NativeContext | None = None
        """Does all of it, cache and all, where it is not None."""
        fc, kv = self._fc, self._kv
        if isinstance(fc, LaneLinear) and isinstance(kv, LaneLinear) and shape.head_dim % 16 == 0:
            keys = self._k_norm.weight.expand(-1, shape.num_kv_heads, -1).contiguous()
            self.native = NativeContext(fc, kv, self._norm.weight, keys, shape.rms_eps)

    def __call__(self, features: Tensor, rotations: Tensor) -> Tensor:
        """features [N, m*d], rotations [N, D/2] -> keys and values [N, L, 2K, D] float32."""
        shape = self._shape
        context = self._norm(self._fc(features.to(self._fc.dtype)).float(), self._kv.dtype)
        kv = self._kv(context).float().view(-1, shape.num_layers, 2 * shape.num_kv_heads, shape.head_dim)
        keys = kv[:, :, : shape.num_kv_heads]
        self._k_norm.apply_(keys)
        rotate_(keys, rotations[:, None, None])
        return kv

    def fuse(self) -> None:
        """Make ``store`` ready where its products are plain."""
        keys = self._k_norm.weight.expand(-1, self._shape.num_kv_heads, -1).contiguous()
        self._fused_norm = keys if all(isinstance(p, PlainLinear) for p in (self._fc, self._kv)) else None

    def store(self, features: Tensor, rows: RowBatch, store: LayerStore, rope: Tensor) -> bool:
        """Keys and values of all layers into the store by kernels; False where they cannot."""
        fc, kv, norm = self._fc, self._kv, self._norm
        if self._fused_norm is None or not (isinstance(fc, PlainLinear) and isinstance(kv, PlainLinear)):
            return False
        context = torch.empty((features.shape[0], self._shape.hidden_size), dtype=kv.dtype, device=features.device)
        add_rms_norm(None, product(features.to(fc.dtype), fc, "partials"), norm.weight, norm.eps, context)
        write_context(
            product(context, kv, "partials"),
            rows.positions,
            rows.cache_rows.int(),
            rope,
            store.data,
            k_norm=self._fused_norm,
            eps=self._k_norm.eps,
            pages=store.pages,
            is_settled=True,
        )
        return True


class Backbone:
    """Draft layers over a cache of context rows."""

    def __init__(
        self,
        source: TensorSource,
        stack: DecoderStack,
        embedding: Embedding,
        taps: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._stack, self._embedding = stack, embedding
        self._context = ContextProjection(source, stack, taps, device, dtype)
        self.fused: FusedStack | None = None

    def extend_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        """Store the keys and values of context rows at their positions."""
        part = self.plan_context(features, batch, cache)
        if part is not None:
            run_parts(part)
            return
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        rotations = self._stack.rope.rows(batch.positions, max(s.end for s in spans))
        store_context(cache, spans, batch.positions, self._context(features, rotations))

    def plan_context(self, features: Tensor, batch: ForwardBatch, cache: KVCache) -> Part | None:
        """``extend_context`` as a part of something larger, the rows counted as cached; None where that is not done."""
        native = self._context.native
        if native is None:
            return None
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        part = native.plan(features, spans, cache, self._stack.rope)
        for span in spans:
            cache.advance(span.cache_row, span.end)
        return part

    def plan_blocks(self, batch: ForwardBatch, cache: KVCache) -> tuple[Part, Tensor] | None:
        """``run_blocks`` as a part of something larger, which fills hidden; None where that is not done."""
        native = self._stack.native
        if native is None:
            return None
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        part, hidden, _ = native.plan(self._embedding(batch.token_ids), spans, cache, is_block=True)
        for span in spans:
            cache.mark_written(span.cache_row, span.end)
        return part, hidden

    @property
    def can_page(self) -> bool:
        """Whether nothing here wants a cache row in one piece."""
        return self._context.native is None and self._stack.native is None

    @property
    def can_keep(self) -> bool:
        """Whether ``plan_kept`` can."""
        return self._context.native is not None and self._stack.native is not None

    @property
    def rope_numbers(self) -> Tensor:
        """Rotations as far as ``prepare`` has reached; another tensor when it reaches farther."""
        return self._stack.rope.numbers

    def plan_kept(self, cache: KVCache, context: Rows, block: Rows) -> tuple[Tensor, Tensor, Part, Part, Tensor]:
        """The context and block of one request as parts that are run again and again with other numbers in ``context``
        [3, c] and ``block`` [3, n]: features [c, m*d] and x [n, d], to be filled in each time, the parts, and hidden
        [n, d], which they fill in."""
        native, stack, store = self._context.native, self._stack.native, cache.stores[0].data
        assert native is not None and stack is not None
        features = torch.empty((context.numbers.shape[1], native.inputs))
        x = torch.empty((block.numbers.shape[1], self._stack.shape.hidden_size))
        first = native.plan_rows(features, context, store, self._stack.rope)
        second, hidden, _ = stack.plan_rows(x, block, cache)
        return features, x, first, second, hidden

    def run_blocks(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Blocks [anchor, mask...] -> hidden [N, d] float32. The block's keys and values are not kept."""
        planned = self.plan_blocks(batch, cache)
        if planned is not None:
            run_parts(planned[0])
            return planned[1]
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)
        x = self._embedding(batch.token_ids)
        attention = SpanAttention(cache, spans, batch.positions, self._stack.shape.group_size, is_block=True)
        hidden = self._stack.run(x, batch.positions, spans, attention, False)
        attention.discard()
        return hidden

    def store_rows(self, features: Tensor, rows: RowBatch, cache: KVCache) -> None:
        """As ``extend_context``, asking the host nothing; the cache keeps no count."""
        (store,) = cache.stores
        if self.fused is not None and self._context.store(features, rows, store, self.fused.rope):
            return
        kv = self._context(features, self._stack.rope.at(rows.positions))
        at, slot = store.locate(rows.cache_rows, rows.positions)
        store.data[:, at, :, slot] = kv.to(store.data.dtype)

    @property
    def embedding(self) -> Embedding:
        return self._embedding

    def draft_rows(self, rows: RowBatch, cache: KVCache, x: Tensor | None = None) -> Tensor:
        """As ``run_blocks``, asking the host nothing. ``x`` [N, d] float32, consumed, stands in for the token ids."""
        x = self._embedding(rows.token_ids) if x is None else x
        if self.fused is not None:
            return self.fused.run(x, rows)[0]
        return self._stack.run_rows(x, rows, RowAttention(cache, rows, self._stack.shape.group_size))

    def fuse(self, cache: KVCache, most_rows: int, block: int) -> None:
        """Run ``draft_rows`` over this filled cache by the kernels of ``sparkchat.kernels`` from now on."""
        self.fused = FusedStack(self._stack, cache, most_rows, block, cache.context)
        self._context.fuse()

    def prepare(self, end: int) -> None:
        """Positions that captured rows may have lie below ``end``."""
        self._stack.rope.prepare(end)


def store_context(cache: KVCache, spans: list[Span], positions: Tensor, kv: Tensor) -> None:
    """Write kv [N, L, 2K, D] of all layers and count the rows as cached. Full-attention caches only."""
    (store,) = cache.stores
    cache.publish()
    if len(spans) == 1 and store.pages is None:
        span = spans[0]
        store.data[:, span.cache_row, :, span.start : span.end] = kv.permute(1, 2, 0, 3)
    else:
        rows = torch.tensor([s.cache_row for s in spans for _ in range(s.count)], device=positions.device)
        at, slot = store.locate(rows, positions)
        store.data[:, at, :, slot] = kv.to(store.data.dtype)
    for span in spans:
        cache.advance(span.cache_row, span.end)
