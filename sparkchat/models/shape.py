"""Sizes of a pre-norm decoder with rotary attention and SwiGLU, shared by targets and drafters."""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat.models.rope import RopeConfig


@dataclass(frozen=True)
class DecoderShape:
    """Everything that shapes the layers; nothing about vocabularies."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    qk_norm: bool
    """RMSNorm over each head of the queries and keys, before the rotation (Qwen3)."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """[num_layers] keys a query sees counting its own, None for all of them."""

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim
