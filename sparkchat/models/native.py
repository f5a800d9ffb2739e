"""Decoder layers on a processor by ``sparkchat.kernels.cpu``: matrices it multiplies, stacks it runs whole.

Shapes: N rows, d hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels import cpu
from sparkchat.models.quant import GROUP, GroupedWeight, Weight

if TYPE_CHECKING:
    from sparkchat.models.attention import Span
    from sparkchat.models.dense import DecoderStack
    from sparkchat.models.kv_cache import KVCache

_LANES = 16


class LaneLinear:
    """A product in float32 with a weight of 4 or 8 bits or bfloat16; a row's bits do not depend on its neighbours."""

    dtype = torch.float32

    def __init__(self, weight: Weight, bias: Tensor | None, *, is_rounded: bool = False) -> None:
        """``is_rounded``: a weight that is no codes is rounded to 8 bits, at an error of 0.4 %."""
        from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes, quantize

        if isinstance(weight, GroupedWeight) and weight.group == GROUP and weight.codes.dtype != torch.float8_e4m3fn:
            self.kernel = "q4-lanes" if weight.is_4bit else "q8-lanes"
            kind, data = pack_codes(weight.codes, weight.scale, weight.shift)
        else:
            plain = weight.dense() if isinstance(weight, GroupedWeight) else weight
            self.kernel = "q8-lanes" if is_rounded else "bf16-lanes"
            kind, data = pack_codes(*quantize(plain), None) if is_rounded else pack_bf16(plain)
        self.matrix = PackedMatrix(kind, data, (weight.shape[0], weight.shape[1]), bias)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        return self.matrix(x)


def takes(weight: Weight, dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether ``LaneLinear`` can hold this weight in that format (see ``make_linear``)."""
    is_shifted_8bit = isinstance(weight, GroupedWeight) and weight.shift is not None and not weight.is_4bit
    return (
        device.type == "cpu"
        and dtype in (None, torch.int8, torch.bfloat16)
        and weight.shape[1] % GROUP == 0
        and not is_shifted_8bit
        and cpu.is_supported()
    )


class NativeStack:
    """A ``DecoderStack`` of ``LaneLinear`` weights, run by all threads in one call."""

    def __init__(self, stack: DecoderStack) -> None:
        from sparkchat.kernels.cpu.decoder import Decoder, LayerWeights

        shape, self._stack = stack.shape, stack
        layers = []
        for layer in stack.layers:
            qkv, o, gate_up, down = linears = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            assert all(isinstance(linear, LaneLinear) for linear in linears)
            qk_norm = None if layer.qk_norm is None else layer.qk_norm.weight.contiguous()
            norms = (layer.input_norm.weight, layer.post_norm.weight, qk_norm)
            layers.append(LayerWeights(*norms, qkv.matrix, o.matrix, gate_up.matrix, down.matrix))
        heads = (shape.num_heads, shape.num_kv_heads)
        self._decoder = Decoder(layers, stack.norm.weight, shape.rms_eps, heads, shape.head_dim)

    @staticmethod
    def fits(stack: DecoderStack) -> bool:
        shape = stack.shape
        linears = [linear for y in stack.layers for linear in (y.qkv, y.o, y.mlp.gate_up, y.mlp.down)]
        is_even = shape.head_dim % _LANES == 0 and shape.intermediate_size % _LANES == 0
        return is_even and all(isinstance(linear, LaneLinear) for linear in linears)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        is_block: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, d] float32, consumed -> hidden [N, d] float32 after the norm, and the outputs of the layers ``taps``
        [N, len(taps) * d], -1 being x. ``is_block``: the rows of a span see all of the span."""
        from sparkchat.kernels.cpu.decoder import LayerCache, Rows

        end = max(span.end for span in spans)
        self._stack.rope.prepare(end)
        counts = torch.tensor([span.count for span in spans])
        ends = torch.tensor([span.end for span in spans]).repeat_interleave(counts) if is_block else positions + 1
        cache_rows = torch.tensor([span.cache_row for span in spans]).repeat_interleave(counts)
        stores = [(cache.stores[store], index) for store, index in cache.places]
        caches = [LayerCache(store.data[index], store.window) for store, index in stores]
        first = x.clone() if -1 in taps else None
        rows = Rows(positions.contiguous(), ends, cache_rows)
        hidden, features = self._decoder.run(x, rows, caches, self._stack.rope.numbers, taps)
        if features is None:
            return hidden, None
        if first is not None:
            features[:, list(taps).index(-1)] = first
        return hidden, features.flatten(1)
