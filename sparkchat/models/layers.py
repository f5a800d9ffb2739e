"""Parts of a pre-norm decoder layer. Shapes: N rows, d hidden size, I intermediate size, K key heads, D head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.attention import SpanAttention
from sparkchat.models.linear import Linear, make_lanes
from sparkchat.models.native import unpacked_rows
from sparkchat.models.quant import GroupedWeight, Weight
from sparkchat.models.rows import RowAttention
from sparkchat.models.shape import DecoderShape

_CHECKED_ROWS = 8192


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""

    def __init__(self, weight: Tensor, eps: float, device: torch.device) -> None:
        self.weight, self.eps = weight.float().to(device), eps
        size = weight.shape[-1]
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size): three operations instead of six.
        self._scaled = self.weight * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=device)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [..., size] float32 -> the same shape in ``dtype``."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / length.hypot_(self._floor)).mul_(self._scaled).to(dtype)

    def apply_(self, x: Tensor) -> None:
        """Normalise x in place."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x.div_(length.hypot_(self._floor)).mul_(self._scaled)


class Embedding:
    """Rows of a table by token id, in float32."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        self._table: Weight = weight if isinstance(weight, GroupedWeight) else weight.to(device=device, dtype=dtype)
        if isinstance(weight, GroupedWeight) and device.type != "cpu":
            self._table = weight.dense().to(device=device, dtype=dtype)

    @property
    def num_rows(self) -> int:
        return self._table.shape[0]

    @property
    def weight(self) -> Weight:
        """[V, d] as it lies in memory."""
        return self._table

    @property
    def table(self) -> Tensor | None:
        """[V, d]; None where it lies in codes."""
        return None if isinstance(self._table, GroupedWeight) else self._table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[N] -> [N, d]"""
        if isinstance(self._table, GroupedWeight):
            return unpacked_rows(self._table, token_ids)
        return self._table[token_ids].float()

    def damaged_ids(self) -> frozenset[int]:
        """Tokens whose row is not of numbers."""
        parts = torch.arange(self.num_rows).split(_CHECKED_ROWS)
        found = torch.cat([part[~self(part).isfinite().all(dim=1).cpu()] for part in parts])
        return frozenset(found.tolist())


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down
        self.dtype = gate_up.dtype

    def __call__(self, x: Tensor, is_long: bool) -> Tensor:
        gate, up = self.gate_up(x, is_long).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up).to(self.down.dtype), is_long)


class DecoderLayer:
    """Attention and SwiGLU around a float32 residual stream."""

    def __init__(
        self, shape: DecoderShape, weights: dict[str, Weight], device: torch.device, dtype: torch.dtype | None
    ):
        """``weights`` by the names of ``layer_weights`` in weights.py."""

        def linear(name: str) -> Linear:
            bias = weights.get(f"{name}.bias")
            assert bias is None or isinstance(bias, Tensor)
            return make_lanes(weights[f"{name}.weight"], bias, device=device, dtype=dtype)

        def norm(name: str) -> RMSNorm:
            weight = weights[f"{name}.weight"]
            assert isinstance(weight, Tensor)
            return RMSNorm(weight, shape.rms_eps, device)

        self._num_kv_heads, self._head_dim = shape.num_kv_heads, shape.head_dim
        self._num_q_heads = shape.num_heads
        self.qkv, self.o = linear("qkv"), linear("o")
        self.mlp = SwiGLU(linear("gate_up"), linear("down"))
        self.input_norm, self.post_norm = norm("input_norm"), norm("post_norm")
        self.qk_norm = norm("qk_norm") if shape.qk_norm else None

    def __call__(
        self, x: Tensor, rotations: Tensor, layer: int, attention: SpanAttention | RowAttention, is_long: bool
    ) -> None:
        """Add the layer's output to x [N, d] float32. rotations [N, H+2K, D/2] complex64, 1 for the values."""
        heads = self.qkv(self.input_norm(x, self.qkv.dtype), is_long).float()
        heads = heads.view(x.shape[0], -1, self._head_dim)
        if self.qk_norm is not None:
            self.qk_norm.apply_(heads[:, : self._num_q_heads + self._num_kv_heads])
        rotate_(heads, rotations)
        mixed = attention.attend(layer, heads[:, : self._num_q_heads], heads[:, self._num_q_heads :])
        x.add_(self.o(mixed.to(self.o.dtype), is_long))
        x.add_(self.mlp(self.post_norm(x, self.mlp.dtype), is_long))


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Turn every pair of dimensions of heads [N, H, D] float32 by rotations [N, H or 1, D/2], in place."""
    pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
    pairs.mul_(rotations)


def spread_rotations(rotations: Tensor, num_rotated: int, num_values: int) -> Tensor:
    """[N, D/2] -> [N, num_rotated + num_values, D/2]: the rotation for queries and keys, 1 for values."""
    rows, half = rotations.shape
    one = torch.ones((), dtype=rotations.dtype, device=rotations.device)
    turned = rotations.unsqueeze(1).expand(rows, num_rotated, half)
    return torch.cat([turned, one.expand(rows, num_values, half)], dim=1)
