"""What the engine drafts, step by step, is what the paper's formulas give from the published tensors.

The drafts of a random drafter are nearly all rejected, so a block that is shifted by a place, or sees features of
tokens that were turned down, would change no token. It shows here: every block is computed again from scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cases.harness import Runner
from fixtures.tiny import SHAPE, write_tiny

OpenRunner = Callable[..., Runner]
EPS = 1e-6


class WrittenOutDrafter:
    """The Qwen3 DSpark drafter without a cache."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.w[f"{name}.weight"], EPS)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotated(self, x: Tensor) -> Tensor:
        """x [n, heads, D] at positions 0 .. n-1 of the whole row."""
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[0])[:, None] * 1e6 ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def hidden(self, features: Tensor, anchor: int) -> Tensor:
        """Rows [g, d] of the block after features [s, m*d]; every row sees all features and the whole block."""
        c = self.config
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        x = self.w["embed_tokens.weight"][[anchor, *[c["mask_token_id"]] * (c["block_size"] - 1)]]
        for i in range(c["num_hidden_layers"]):
            at = f"layers.{i}."
            x = x + self.attention(context, self.norm(x, f"{at}input_layernorm"), f"{at}self_attn.")
            y = self.norm(x, f"{at}post_attention_layernorm")
            gated = F.silu(self.linear(y, f"{at}mlp.gate_proj")) * self.linear(y, f"{at}mlp.up_proj")
            x = x + self.linear(gated, f"{at}mlp.down_proj")
        return self.norm(x, "norm")

    def attention(self, context: Tensor, block: Tensor, at: str) -> Tensor:
        size, own = SHAPE.head_dim, len(context)
        both = torch.cat([context, block])
        k = self.rotated(self.norm(self.linear(both, f"{at}k_proj").unflatten(-1, (-1, size)), f"{at}k_norm"))
        v = self.linear(both, f"{at}v_proj").unflatten(-1, (-1, size))
        q = self.norm(self.linear(both, f"{at}q_proj").unflatten(-1, (-1, size)), f"{at}q_norm")
        q = self.rotated(q)[own:]
        repeat = SHAPE.heads // SHAPE.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / size**0.5).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{at}o_proj")

    def draft(self, features: Tensor, anchor: int) -> tuple[list[int], list[float]]:
        """Greedy drafts and confidence logits of one block."""
        rows, previous, ids, confidence = self.hidden(features, anchor), anchor, [], []
        state = torch.zeros(self.config["markov_rank"])
        for h in rows:
            e = self.w["markov_head.markov_w1.weight"][previous]
            confidence.append(float(self.linear(torch.cat([h, e]), "confidence_head.proj")))
            mixed, state = self.mixed(h, e, state)
            logits = self.linear(h, "lm_head") + self.linear(mixed, "markov_head.markov_w2")
            previous = int(logits.argmax())
            ids.append(previous)
        return ids, confidence

    def mixed(self, h: Tensor, e: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 is applied to, and the next order state."""
        if self.config["markov_head_type"] == "gated":
            return torch.sigmoid(self.linear(torch.cat([h, e]), "markov_head.gate_proj")) * e, state
        if self.config["markov_head_type"] == "rnn":
            gate, new, out = self.linear(torch.cat([state, e, h]), "markov_head.joint_proj").chunk(3)
            gate = gate.sigmoid()
            return out.tanh(), gate * state + (1 - gate) * new.tanh()
        return e, state


def features_of(target: Path, ids: list[int], layers: list[int]) -> Tensor:
    """[n, m*d] raw outputs of the tapped layers."""
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in layers], -1)


@pytest.mark.parametrize("mode", ["static", "cap-accept"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_every_block_is_what_the_formulas_give(
    head: str, mode: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    pair = build_once(f"tiny-{head}", lambda folder: write_tiny(folder, head=head))
    # Two requests side by side, one of them long enough to be split over prompt passes.
    prompts = [torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 300)]
    lines = [{"prompt_ids": p, "mode": mode, "max_tokens": 16, "ignore_eos": True} for p in prompts]
    written_out, checked = WrittenOutDrafter(pair.drafter), 0
    for prompt, outcome in zip(prompts, runner(pair.target, pair.drafter).watch(lines), strict=True):
        text = [*prompt, *outcome.ids]
        features = features_of(pair.target, text, written_out.config["target_layer_ids"])
        for step in outcome.steps:
            s = step["prefix_len"]
            ids, confidence = written_out.draft(features[:s], text[s])
            assert step["draft_ids"] == ids
            assert step["confidence_logit"] == pytest.approx(confidence, abs=2e-3)
            checked += 1
    assert checked >= 20
