"""Decoder layers as launches of ``sparkchat.kernels``, for a handful of rows on a GPU.

One layer is seven launches: norm, product, split-rotate-store, attention, product, norm, product, product. The residual
stream is float32, as in ``DecoderLayer``; every product leaves its parts for the launch behind it to add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.activation import silu_mul
from sparkchat.kernels.attention import attention_workspace, decode_attention
from sparkchat.kernels.gemm import gemm_splits, small_gemm
from sparkchat.kernels.norm import add_rms_norm
from sparkchat.kernels.rope import write_qkv
from sparkchat.models.linear import PlainLinear
from sparkchat.models.rows import RowBatch

if TYPE_CHECKING:
    from sparkchat.models.dense import DecoderStack
    from sparkchat.models.kv_cache import KVCache

MOST_SMALL_ROWS = 64
"""Beyond this many rows the products are cuBLAS's: they are then bound by more than reading the weight once."""


def product(x: Tensor, linear: PlainLinear, epilogue: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    """x [N, k] -> what ``small_gemm`` leaves of x W^T + b with this epilogue; [N, n] of parts where rows are many."""
    weight = linear.weight
    count, size = x.shape[0], weight.shape[0]
    if count > MOST_SMALL_ROWS:
        if out_dtype is torch.float32:
            out = torch.empty((count, size), dtype=out_dtype, device=x.device)
            linear.write_floats(x, out)
            return out
        y = linear(x)
        if epilogue == "silu_mul":
            out = torch.empty((count, size // 2), dtype=y.dtype, device=x.device)
            silu_mul(y, out)
            return out
        return y if out_dtype is None else y.to(out_dtype)
    if epilogue == "partials":
        shape: tuple[int, ...] = (gemm_splits(weight), count, size)
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    else:
        width = size // 2 if epilogue == "silu_mul" else size
        out = torch.empty((count, width), dtype=out_dtype or x.dtype, device=x.device)
    small_gemm(x, weight, out, scales=linear.scales, bias=linear.bias, epilogue=epilogue)
    return out


class FusedStack:
    """A ``DecoderStack`` whose weights are plain, over one filled cache."""

    def __init__(self, stack: DecoderStack, cache: KVCache, most_rows: int, most_per_request: int, end: int) -> None:
        """``most_rows`` of all requests, ``most_per_request`` of one; positions lie below ``end``."""
        self._stack, self._cache, self._most_per_request = stack, cache, most_per_request
        shape = stack.shape
        device = cache.stores[0].data.device
        self._workspace = attention_workspace(most_rows, shape.num_heads, shape.head_dim, end, device)
        stack.rope.prepare(end)
        self._rope = torch.view_as_real(stack.rope.at(torch.arange(end, device=device))).flatten(1).contiguous()

    @property
    def rope(self) -> Tensor:
        """[positions, D] float32, cosine and sine side by side."""
        return self._rope

    def run(self, x: Tensor, rows: RowBatch, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """x [N, d] float32, consumed -> hidden [N, d] after the final norm in the weights' dtype, and the raw outputs
        of the layers ``taps`` [N, len(taps) * d] in the same, -1 being x."""
        assert rows.starts is not None
        # Kernels read number after number, where torch would follow strides.
        assert all(numbers.is_contiguous() for numbers in (rows.positions, rows.cache_rows, rows.ends, rows.starts))
        shape, dtype = self._stack.shape, self._stack.layers[0].qkv.dtype
        count, d = x.shape
        features = torch.empty((count, len(taps), d), dtype=dtype, device=x.device) if taps else None
        cache_rows = rows.cache_rows.int()
        normed = torch.empty((count, d), dtype=dtype, device=x.device)
        q = torch.empty((count, shape.num_heads, shape.head_dim), dtype=dtype, device=x.device)
        mixed = torch.empty_like(q)
        delta: Tensor | None = None

        def norm(weight: Tensor, eps: float, tapped: int | None) -> None:
            is_tapped = features is not None and tapped in taps
            tap = features[:, list(taps).index(tapped)] if is_tapped and tapped is not None else None
            # From the second on, a product lies behind the norm that wrote x.
            add_rms_norm(x, delta, weight, eps, normed, tap, is_settled=delta is not None)

        for index, layer in enumerate(self._stack.layers):
            norm(layer.input_norm.weight, layer.input_norm.eps, index - 1)
            place, inner = self._cache.places[index]
            store = self._cache.stores[place]
            write_qkv(
                product(normed, layer.qkv, "partials"),
                rows.positions,
                cache_rows,
                self._rope,
                store.data[inner],
                q,
                qk_norm=None if layer.qk_norm is None else layer.qk_norm.weight,
                eps=shape.rms_eps,
                pages=store.pages,
                is_settled=True,
            )
            decode_attention(
                q,
                store.data[inner],
                rows.starts,
                cache_rows,
                rows.positions,
                rows.ends,
                mixed,
                self._workspace,
                max_rows=self._most_per_request,
                window=store.window,
                pages=store.pages,
                is_settled=True,
            )
            delta = product(mixed.flatten(1), layer.o, "partials")
            norm(layer.post_norm.weight, layer.post_norm.eps, None)
            delta = product(product(normed, layer.mlp.gate_up, "silu_mul"), layer.mlp.down, "partials")
        norm(self._stack.norm.weight, self._stack.norm.eps, len(self._stack.layers) - 1)
        return normed, None if features is None else features.flatten(1)
