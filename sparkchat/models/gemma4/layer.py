"""A layer of Gemma 4: norms before and after attention and MLP, values normalised, and a factor on all of it.

Shapes: N rows, d hidden size, I intermediate size, H query heads, K key heads, D head size. Heads and rotary pairs are
ordered as in models/weights.py. Scores are not divided by sqrt(D): the attention that does so gets queries that are
larger by it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.attention import SpanAttention
from sparkchat.models.gemma4.config import LayerKind
from sparkchat.models.layers import RMSNorm, rotate_
from sparkchat.models.linear import make_linear
from sparkchat.models.quant import dense, stack_rows, take_columns, take_rows
from sparkchat.models.weights import TensorSource, rotary_pairs

_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def head_order(kind: LayerKind) -> Tensor:
    """[H] old index of each query head in [group, key head] order."""
    return torch.arange(kind.num_heads).view(kind.num_kv_heads, kind.group_size).T.flatten()


class KeysAndValues:
    """What follows the projection: keys normalised and rotated, values normalised without a weight."""

    def __init__(self, kind: LayerKind, k_norm: Tensor, eps: float, device: torch.device) -> None:
        """k_norm [D], in rotary pairs."""
        self._kind = kind
        self._k_norm = RMSNorm(k_norm, eps, device)
        self._v_norm = RMSNorm(torch.ones(kind.head_dim), eps, device)

    def __call__(self, projected: Tensor, rotations: Tensor) -> Tensor:
        """projected [N, K or 2K, D] float32, rotations [N, D/2] -> keys, then values [N, 2K, D] float32."""
        keys = projected[:, : self._kind.num_kv_heads]
        raw = keys if self._kind.keys_are_values else projected[:, self._kind.num_kv_heads :]
        values = self._v_norm(raw, torch.float32)
        keys = self._k_norm(keys, torch.float32)
        rotate_(keys, rotations[:, None])
        return torch.cat([keys, values], dim=1)


class Gemma4Layer:
    """Attention and a gated GELU around a float32 residual stream."""

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        kind: LayerKind,
        sizes: tuple[int, int],
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``sizes``: hidden and intermediate."""
        d, inner = sizes
        self.kind = kind
        paired = rotary_pairs(kind.head_dim)
        heads, kv_heads = head_order(kind), torch.arange(kind.num_kv_heads)
        q_rows = (heads[:, None] * kind.head_dim + paired).flatten()
        k_rows = (kv_heads[:, None] * kind.head_dim + paired).flatten()
        # Values that are keys lie in rotary pairs as well.
        value_order = paired if kind.keys_are_values else torch.arange(kind.head_dim)
        o_columns = (heads[:, None] * kind.head_dim + value_order).flatten()
        attention = f"{prefix}self_attn."
        parts = [
            take_rows(source.take(f"{attention}q_proj.weight", kind.q_width, d), q_rows),
            take_rows(source.take(f"{attention}k_proj.weight", kind.kv_width, d), k_rows),
        ]
        if not kind.keys_are_values:
            parts.append(source.take(f"{attention}v_proj.weight", kind.kv_width, d))
        o = take_columns(source.take(f"{attention}o_proj.weight", d, kind.q_width), o_columns)
        gate_up = [source.take(f"{prefix}mlp.{name}_proj.weight", inner, d) for name in ("gate", "up")]
        down = source.take(f"{prefix}mlp.down_proj.weight", d, inner)
        self.qkv = make_linear(stack_rows(parts), None, device=device, dtype=dtype)
        self._o = make_linear(o, None, device=device, dtype=dtype)
        self._gate_up = make_linear(stack_rows(gate_up), None, device=device, dtype=dtype)
        self._down = make_linear(down, None, device=device, dtype=dtype)
        q_norm, k_norm = (
            dense(source.take(f"{attention}{name}_norm.weight", kind.head_dim)).float()[paired] for name in "qk"
        )
        self._q_norm = RMSNorm(q_norm * kind.head_dim**0.5, eps, device)
        self.keys_and_values = KeysAndValues(kind, k_norm, eps, device)
        self._norms = [RMSNorm(dense(source.take(f"{prefix}{n}_layernorm.weight", d)), eps, device) for n in _NORMS]
        self._scalar = float(dense(source.take(f"{prefix}layer_scalar", 1)).float())

    def __call__(self, x: Tensor, rotations: Tensor, layer: int, attention: SpanAttention, is_long: bool) -> None:
        """Put the layer's output in the place of x [N, d] float32. rotations [N, D/2]; ``layer``: in its own cache."""
        before, after, before_mlp, after_mlp = self._norms
        heads = self.qkv(before(x, self.qkv.dtype), is_long).float()
        heads = heads.view(x.shape[0], -1, self.kind.head_dim)
        q = self._q_norm(heads[:, : self.kind.num_heads], torch.float32)
        rotate_(q, rotations[:, None])
        kv = self.keys_and_values(heads[:, self.kind.num_heads :], rotations)
        mixed = attention.attend(layer, q, kv)
        x.add_(after(self._o(mixed.to(self._o.dtype), is_long).float(), torch.float32))
        gate, up = self._gate_up(before_mlp(x, self._gate_up.dtype), is_long).chunk(2, dim=-1)
        hidden = self._down(F.gelu(gate, approximate="tanh").mul_(up), is_long).float()
        x.add_(after_mlp(hidden, torch.float32)).mul_(self._scalar)
