"""Random drafter folders for a tiny target, and a plain re-computation of what they draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.pairs import CPU, SIZES, Pair
from sparkchat.models import load_drafter
from sparkchat.models.dspark.checkpoint import save_drafter
from sparkchat.models.dspark.config import DrafterConfig
from sparkchat.models.dspark.drafter import Drafter
from sparkchat.models.rope import RopeConfig
from sparkchat.models.shape import DecoderShape

HIDDEN, VOCAB, RANK = SIZES["hidden_size"], SIZES["vocab_size"], 12
TAPS = (-1, 1)
SHAPE = DecoderShape(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    windows=(None, None),
)
CONFIG = DrafterConfig(
    decoder=SHAPE,
    block_size=5,
    mask_token_id=VOCAB - 1,
    target_layer_ids=TAPS,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    markov_rank=RANK,
    markov_head_type="vanilla",
    has_confidence=True,
    confidence_with_markov=True,
    num_target_layers=3,
)


@dataclass(frozen=True)
class Draft:
    """A drafter as it was written, and as it was loaded."""

    config: DrafterConfig
    weights: dict[str, Tensor]
    ours: Drafter
    folder: Path


def random_weights(config: DrafterConfig, seed: int = 3, *, shares_target: bool = False) -> dict[str, Tensor]:
    """Tensors of a drafter under their published names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 0.2) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    def scale(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    shape, d, r = config.decoder, config.hidden_size, config.markov_rank
    weights = {
        "fc.weight": normal(d, d * len(config.target_layer_ids)),
        "hidden_norm.weight": scale(d),
        "norm.weight": scale(d),
    }
    for i in range(shape.num_layers):
        at = f"layers.{i}."
        for name, width in (("q", shape.q_width), ("k", shape.kv_width), ("v", shape.kv_width)):
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(width, d)
        weights[f"{at}self_attn.o_proj.weight"] = normal(d, shape.q_width)
        for name in ("q", "k"):
            weights[f"{at}self_attn.{name}_norm.weight"] = scale(shape.head_dim)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}_proj.weight"] = normal(shape.intermediate_size, d)
        weights[f"{at}mlp.down_proj.weight"] = normal(d, shape.intermediate_size)
        for name in ("input", "post_attention"):
            weights[f"{at}{name}_layernorm.weight"] = scale(d)
    if r:
        weights["markov_head.markov_w1.weight"] = normal(config.vocab_size, r, std=1.0)
        weights["markov_head.markov_w2.weight"] = normal(config.draft_vocab_size, r, std=1.0)
    if config.markov_head_type == "gated":
        weights |= {"markov_head.gate_proj.weight": normal(r, d + r), "markov_head.gate_proj.bias": normal(r)}
    if config.markov_head_type == "rnn":
        weights |= {
            "markov_head.joint_proj.weight": normal(3 * r, 2 * r + d),
            "markov_head.joint_proj.bias": normal(3 * r),
        }
    if config.has_confidence:
        weights["confidence_head.proj.weight"] = normal(1, d + (r if config.confidence_with_markov else 0))
        weights["confidence_head.proj.bias"] = normal(1)
    if not shares_target:
        weights["embed_tokens.weight"] = normal(config.vocab_size, d, std=1.0)
        weights["lm_head.weight"] = normal(config.draft_vocab_size, d)
    return weights


def write_draft(folder: Path, pair: Pair, weights: dict[str, Tensor] | None = None, **changes: object) -> Draft:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    weights = random_weights(config) if weights is None else weights
    save_drafter(folder, config, weights)
    return Draft(config, weights, load_drafter(folder, pair.ours, device=CPU), folder)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, SHAPE.rms_eps)


def rotate_half_split(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, D] by Hugging Face's formula."""
    size = x.shape[-1]
    frequency = SHAPE.rope.theta ** -(torch.arange(0, size, 2).float() / size)
    angle = (positions[:, None] * frequency).repeat(1, 2)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


def recompute_block(draft: Draft, features: Tensor, block: Tensor) -> Tensor:
    """Hidden rows [g, d] of a block after ``features`` [s, m*d], all from scratch by the paper's formulas."""
    w, shape = draft.weights, draft.config.decoder
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    start, count = features.shape[0], block.shape[0]
    everywhere, own = torch.arange(start + count), torch.arange(start, start + count)
    x = w["embed_tokens.weight"][block]
    for i in range(shape.num_layers):
        at, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        normed = rms(x, w[f"{at}input_layernorm.weight"])
        source = torch.cat([context, normed])
        k = (source @ w[f"{attn}k_proj.weight"].T).view(-1, shape.num_kv_heads, shape.head_dim)
        v = (source @ w[f"{attn}v_proj.weight"].T).view(-1, shape.num_kv_heads, shape.head_dim)
        q = (normed @ w[f"{attn}q_proj.weight"].T).view(-1, shape.num_heads, shape.head_dim)
        k = rotate_half_split(rms(k, w[f"{attn}k_norm.weight"]), everywhere)
        q = rotate_half_split(rms(q, w[f"{attn}q_norm.weight"]), own)
        k, v = (t.repeat_interleave(shape.group_size, dim=1).transpose(0, 1) for t in (k, v))
        scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * shape.head_dim**-0.5
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = x + mixed @ w[f"{attn}o_proj.weight"].T
        normed = rms(x, w[f"{at}post_attention_layernorm.weight"])
        gated = F.silu(normed @ w[f"{at}mlp.gate_proj.weight"].T) * (normed @ w[f"{at}mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{at}mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"])
