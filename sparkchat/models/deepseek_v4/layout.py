"""The published tensors of a config by name, with their logical shapes and how they are stored.

Symbols: d hidden size, V vocabulary, H heads, c head dimension, G output groups, S residual streams, E experts,
I expert width, r tokens per compressed entry. A name is the whole name in the files; projections that are stored as
scaled codes have a second tensor, ``scale`` in the place of ``weight``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, WINDOW_ONLY, DeepseekV4Config


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the modules take it."""

    shape: tuple[int, ...]
    """[out, in] for projections, before packing."""
    storage: str
    """fp4 | fp8 (codes with scales) | bf16 | f32 | i64"""


Layout = dict[str, TensorSpec]


def trunk_layout(config: DeepseekV4Config) -> Layout:
    """Everything outside ``mtp.*``."""
    d, vocab = config.hidden_size, config.vocab_size
    layout = {
        "embed.weight": TensorSpec((vocab, d), "bf16"),
        "head.weight": TensorSpec((vocab, d), "bf16"),
        "norm.weight": TensorSpec((d,), "bf16"),
        **hyper_head_layout(config, ""),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        layout |= layer_layout(config, f"layers.{layer}.", ratio, is_hashed=config.is_hashed(layer))
    return layout


def hyper_head_layout(config: DeepseekV4Config, prefix: str) -> Layout:
    """The weighting of the streams before the final norm, of the trunk or of the last drafter stage."""
    streams = config.hc_mult
    return {
        f"{prefix}hc_head_fn": TensorSpec((streams, streams * config.hidden_size), "f32"),
        f"{prefix}hc_head_base": TensorSpec((streams,), "f32"),
        f"{prefix}hc_head_scale": TensorSpec((1,), "f32"),
    }


def layer_layout(config: DeepseekV4Config, prefix: str, ratio: int, *, is_hashed: bool) -> Layout:
    """One decoder layer, of the trunk (``layers.N.``) or a drafter stage (``mtp.N.``, ratio 0)."""
    layout: Layout = {}
    for kind in ("attn", "ffn"):
        layout[f"{prefix}{kind}_norm.weight"] = TensorSpec((config.hidden_size,), "bf16")
        layout[f"{prefix}hc_{kind}_fn"] = TensorSpec((config.hc_width, config.hc_mult * config.hidden_size), "f32")
        layout[f"{prefix}hc_{kind}_base"] = TensorSpec((config.hc_width,), "f32")
        layout[f"{prefix}hc_{kind}_scale"] = TensorSpec((3,), "f32")
    return layout | _attention(config, f"{prefix}attn.", ratio) | _experts(config, f"{prefix}ffn.", is_hashed)


def _attention(config: DeepseekV4Config, prefix: str, ratio: int) -> Layout:
    d, heads, c = config.hidden_size, config.num_heads, config.head_dim
    mid = config.o_groups * config.o_lora_rank
    layout = {
        f"{prefix}wq_a.weight": TensorSpec((config.q_lora_rank, d), "fp8"),
        f"{prefix}q_norm.weight": TensorSpec((config.q_lora_rank,), "bf16"),
        f"{prefix}wq_b.weight": TensorSpec((heads * c, config.q_lora_rank), "fp8"),
        f"{prefix}wkv.weight": TensorSpec((c, d), "fp8"),
        f"{prefix}kv_norm.weight": TensorSpec((c,), "bf16"),
        f"{prefix}wo_a.weight": TensorSpec((mid, heads * c // config.o_groups), "fp8"),
        f"{prefix}wo_b.weight": TensorSpec((d, mid), "fp8"),
        f"{prefix}attn_sink": TensorSpec((heads,), "f32"),
    }
    if ratio != WINDOW_ONLY:
        layout |= _compressor(d, f"{prefix}compressor.", ratio, c)
    if ratio == SPARSE_RATIO:
        heads, c = config.index_num_heads, config.index_head_dim
        layout[f"{prefix}indexer.wq_b.weight"] = TensorSpec((heads * c, config.q_lora_rank), "fp8")
        layout[f"{prefix}indexer.weights_proj.weight"] = TensorSpec((heads, d), "bf16")
        layout |= _compressor(d, f"{prefix}indexer.compressor.", ratio, c)
    return layout


def _compressor(d: int, prefix: str, ratio: int, c: int) -> Layout:
    width = 2 * c if ratio == SPARSE_RATIO else c
    return {
        f"{prefix}wkv.weight": TensorSpec((width, d), "bf16"),
        f"{prefix}wgate.weight": TensorSpec((width, d), "bf16"),
        f"{prefix}ape": TensorSpec((ratio, width), "f32"),
        f"{prefix}norm.weight": TensorSpec((c,), "bf16"),
    }


def _experts(config: DeepseekV4Config, prefix: str, is_hashed: bool) -> Layout:
    layout = {f"{prefix}gate.weight": TensorSpec((config.num_experts, config.hidden_size), "bf16")}
    if is_hashed:
        layout[f"{prefix}gate.tid2eid"] = TensorSpec((config.vocab_size, config.num_experts_per_token), "i64")
    else:
        layout[f"{prefix}gate.bias"] = TensorSpec((config.num_experts,), "f32")
    layout |= _expert(config, f"{prefix}shared_experts.", "fp8")
    for expert in range(config.num_experts):
        layout |= _expert(config, f"{prefix}experts.{expert}.", config.expert_format)
    return layout


def _expert(config: DeepseekV4Config, prefix: str, storage: str) -> Layout:
    d, width = config.hidden_size, config.expert_width
    return {
        f"{prefix}w1.weight": TensorSpec((width, d), storage),
        f"{prefix}w2.weight": TensorSpec((d, width), storage),
        f"{prefix}w3.weight": TensorSpec((width, d), storage),
    }
