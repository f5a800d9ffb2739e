"""Decoder layers on a processor by ``sparkchat.kernels.cpu``: matrices it multiplies, stacks it runs whole.

Shapes: N rows, d hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels import cpu
from sparkchat.models.quant import GROUP, GroupedWeight, Weight

if TYPE_CHECKING:
    from sparkchat.kernels.cpu.decoder import LayerCache, Rows
    from sparkchat.kernels.cpu.matrix import Part
    from sparkchat.models.attention import Span
    from sparkchat.models.dense import DecoderStack
    from sparkchat.models.kv_cache import KVCache
    from sparkchat.models.rope import RopeTable

_LANES = 16
_NO_SHIFT = torch.empty((0, 0))


class LaneLinear:
    """A product in float32 with a weight of 4 or 8 bits or bfloat16; a row's bits do not depend on its neighbours."""

    dtype = torch.float32

    def __init__(
        self, weight: Weight, bias: Tensor | None, *, is_rounded: bool = False, is_narrow: bool = False
    ) -> None:
        """``is_rounded``: a weight that is no codes is rounded to 8 bits, at an error of 0.4 %. ``is_narrow``: rows are
        rounded to 8 bits, of a weight of 4: an estimate."""
        from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes, pack_narrow, quantize

        if is_narrow:
            assert isinstance(weight, GroupedWeight) and weight.shift is not None
            self.kernel = "q4-narrow-lanes"
            kind, data = pack_narrow(weight.codes, weight.scale, weight.shift)
        elif isinstance(weight, GroupedWeight) and weight.group == GROUP and weight.codes.dtype != torch.float8_e4m3fn:
            self.kernel = "q4-lanes" if weight.is_4bit else "q8-lanes"
            kind, data = pack_codes(weight.codes, weight.scale, weight.shift)
        else:
            plain = weight.dense() if isinstance(weight, GroupedWeight) else weight
            self.kernel = "q8-lanes" if is_rounded else "bf16-lanes"
            kind, data = pack_codes(*quantize(plain), None) if is_rounded else pack_bf16(plain)
        self.matrix = PackedMatrix(kind, data, (weight.shape[0], weight.shape[1]), bias)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        return self.matrix(x)

    def plan(self, x: Tensor) -> tuple[Part, Tensor]:
        """As a call with x [n, in], contiguous, n > 0, for ``run_parts``: the result is filled in then."""
        return self.matrix.plan(x, torch.get_num_threads())


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
        self._known: tuple[list[Tensor], list[LayerCache]] | None = None
        """The stores of the last cache, and its layers in them."""

    @staticmethod
    def fits(stack: DecoderStack) -> bool:
        shape = stack.shape
        linears = [linear for y in stack.layers for linear in (y.qkv, y.o, y.mlp.gate_up, y.mlp.down)]
        is_even = shape.head_dim % _LANES == 0 and shape.intermediate_size % _LANES == 0
        return is_even and all(isinstance(linear, LaneLinear) for linear in linears)

    def run(
        self,
        x: Tensor,
        spans: Sequence[Span],
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        is_block: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, d] float32, consumed -> hidden [N, d] float32 after the norm, and the outputs of the layers ``taps``
        [N, len(taps) * d], -1 being x. ``is_block``: the rows of a span see all of the span."""
        part, hidden, features = self.plan(x, spans, cache, taps, is_block=is_block)
        run_parts(part)
        return hidden, features

    def plan(
        self, x: Tensor, spans: Sequence[Span], cache: KVCache, taps: Sequence[int] = (), *, is_block: bool = False
    ) -> tuple[Part, Tensor, Tensor | None]:
        """As ``run``, for ``run_parts``: the results are filled in then."""
        self._stack.rope.prepare(max(span.end for span in spans))
        first = x.clone() if -1 in taps else None
        part, hidden, features = self.plan_rows(x, span_rows(spans, is_block=is_block), cache, taps)
        if features is None:
            return part, hidden, None
        if first is not None:
            features[:, list(taps).index(-1)] = first
        return part, hidden, features.flatten(1)

    def plan_rows(
        self, x: Tensor, rows: Rows, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Part, Tensor, Tensor | None]:
        """As ``plan`` for positions that the rotations have reached and for taps of layers; features are
        [N, len(taps), d]."""
        return self._decoder.plan(x, rows, self._layers_of(cache), self._stack.rope.numbers, tuple(taps))

    def _layers_of(self, cache: KVCache) -> list[LayerCache]:
        """Where each layer's keys and values lie; stores are made anew when they grow."""
        from sparkchat.kernels.cpu.decoder import LayerCache

        key = [store.data for store in cache.stores]
        if self._known is None or any(a is not b for a, b in zip(key, self._known[0], strict=True)):
            stores = [(cache.stores[store], index) for store, index in cache.places]
            self._known = (key, [LayerCache(store.data[index], store.window) for store, index in stores])
        return self._known[1]


class NativeContext:
    """A drafter's context, from features to the cache in one call."""

    def __init__(self, fc: LaneLinear, kv: LaneLinear, norm: Tensor, k_norm: Tensor, eps: float) -> None:
        """norm [d], k_norm [L, K, D] float32, contiguous."""
        from sparkchat.kernels.cpu.decoder import ContextWeights

        self._weights = ContextWeights(fc.matrix, kv.matrix, norm, k_norm, eps)
        self.inputs = fc.matrix.inputs

    def plan(self, features: Tensor, spans: Sequence[Span], cache: KVCache, rope: RopeTable) -> Part:
        """features [N, m*d] float32 of these spans into a cache without windows, for ``run_parts``."""
        (store,) = cache.stores
        rope.prepare(max(span.end for span in spans))
        return self.plan_rows(features.contiguous(), span_rows(spans), store.data, rope)

    def plan_rows(self, features: Tensor, rows: Rows, store: Tensor, rope: RopeTable) -> Part:
        """As ``plan`` with features that are contiguous, for positions that ``rope`` has reached."""
        return self._weights.plan(features, rows, store, rope.numbers)


def span_rows(spans: Sequence[Span], *, is_block: bool = False) -> Rows:
    """``is_block``: the rows of a span see all of the span."""
    from sparkchat.kernels.cpu.decoder import Rows

    positions, ends, cache_rows = [], [], []
    for span in spans:
        positions += range(span.start, span.end)
        ends += [span.end] * span.count if is_block else range(span.start + 1, span.end + 1)
        cache_rows += [span.cache_row] * span.count
    return Rows(np.array((positions, ends, cache_rows), np.int64), max(span.end for span in spans))


def unpacked_rows(weight: GroupedWeight, index: Tensor) -> Tensor:
    """Rows ``index`` [n] of a weight on the CPU as float32 [n, in]."""
    kinds = (torch.uint8, torch.int8)
    if not cpu.is_loaded() or weight.codes.dtype not in kinds or not weight.codes.is_contiguous():
        return weight.rows(index).dense()
    from sparkchat.kernels.cpu.codes import unpack_rows

    out = torch.empty((index.shape[0], weight.shape[1]))
    shift = _NO_SHIFT if weight.shift is None else weight.shift
    tables = (weight.codes, weight.scale.contiguous(), shift.contiguous(), index.contiguous(), out)
    unpack_rows(*(t.numpy() for t in tables))
    return out


class RowWriter:
    """Single rows of a weight on the CPU as float32, again and again: what ``unpacked_rows`` looks up is known."""

    def __init__(self, weight: Weight) -> None:
        self._weight, self._tables = weight, None
        is_codes = isinstance(weight, GroupedWeight) and weight.codes.dtype in (torch.uint8, torch.int8)
        if is_codes and cpu.is_loaded() and weight.codes.is_contiguous():
            shift = _NO_SHIFT if weight.shift is None else weight.shift
            tables = (weight.codes, weight.scale.contiguous(), shift.contiguous())
            self._tables = tuple(t.numpy() for t in tables)
        self._index = np.zeros(1, np.int64)

    def write(self, row: int, out: np.ndarray) -> None:
        """Row ``row`` of a weight [V, in] into out [1, in] float32."""
        if self._tables is None:
            index = torch.tensor([row])
            weight = self._weight
            found = weight.rows(index).dense() if isinstance(weight, GroupedWeight) else weight[index]
            out[:] = found.float().numpy()
            return
        from sparkchat.kernels.cpu.codes import unpack_rows

        self._index[0] = row
        unpack_rows(*self._tables, self._index, out)


def run_lines(lines: np.ndarray, threads: int) -> None:
    """As ``run_parts``: lines [parts, 2] int64, what and where, that are kept."""
    from sparkchat.kernels.cpu.team import team

    team(threads).run_lines(lines)


def run_parts(*parts: Part) -> None:
    """Run them by all threads, one behind the other."""
    from sparkchat.kernels.cpu.team import team

    team(torch.get_num_threads()).run(*((part.work, part.job) for part in parts))
