"""One window layer of DeepSeek V4 and its two drafters, written out in float64 from the published formulas.

Slow and without any state: every key is computed again from what it is made of. Shapes: T rows, S streams, d hidden
size, H heads, c head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.deepseek_v4.config import DeepseekV4Config


class Reference:
    """Formulas over the weights of one checkpoint."""

    def __init__(self, config: DeepseekV4Config, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def norm(self, x: Tensor, name: str | None = None) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_eps)
        return scaled if name is None else scaled * self.weights[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[name].T

    def turn(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotate neighbouring pairs of the last dimensions of x [T, ..., c]."""
        size = self.config.rope_dim
        frequencies = 10000.0 ** -(torch.arange(0, size, 2).double() / size)
        angles = positions.double().view(-1, *[1] * (x.dim() - 2), 1) * frequencies * (-1 if back else 1)
        pairs = torch.view_as_complex(x[..., -size:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        return torch.cat([x[..., :-size], turned], dim=-1)

    def read(self, prefix: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, S, d] -> input [T, d], post [T, S], combination [T, S, S]."""
        count, eps = self.config.hc_mult, self.config.hc_eps
        mixed = self.linear(f"{prefix}_fn", self.norm(streams.flatten(1)))
        scale, base = self.weights[f"{prefix}_scale"], self.weights[f"{prefix}_base"]
        pre = torch.sigmoid(mixed[:, :count] * scale[0] + base[:count]) + eps
        post = 2 * torch.sigmoid(mixed[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        c = (mixed[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(-1, (count, count)).softmax(-1) + eps
        c = c / (c.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            c = c / (c.sum(2, keepdim=True) + eps)
            c = c / (c.sum(1, keepdim=True) + eps)
        return torch.einsum("ts,tsd->td", pre, streams), post, c

    def merge(self, output: Tensor, post: Tensor, c: Tensor, streams: Tensor) -> Tensor:
        return post[:, :, None] * output[:, None] + torch.einsum("tjk,tjd->tkd", c, streams)

    def latents(self, prefix: str, x: Tensor, positions: Tensor) -> Tensor:
        return self.turn(self.norm(self.linear(f"{prefix}wkv.weight", x), f"{prefix}kv_norm.weight"), positions)

    def attend(self, prefix: str, x: Tensor, positions: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """x [T, d]; keys[t] [n, c] what row t sees."""
        config, w = self.config, self.weights
        low_rank = self.norm(self.linear(f"{prefix}wq_a.weight", x), f"{prefix}q_norm.weight")
        q = self.linear(f"{prefix}wq_b.weight", low_rank).unflatten(-1, (config.num_heads, config.head_dim))
        q = self.turn(self.norm(q), positions)
        heads = []
        for row, seen in zip(q, keys, strict=True):
            scores = row @ seen.T / config.head_dim**0.5
            with_sink = torch.cat([scores, w[f"{prefix}attn_sink"][:, None]], dim=1).softmax(-1)
            heads.append(with_sink[:, :-1] @ seen)
        mixed = self.turn(torch.stack(heads), positions, back=True).flatten(1)
        groups = mixed.unflatten(-1, (config.o_groups, -1))
        inner = w[f"{prefix}wo_a.weight"].unflatten(0, (config.o_groups, -1))
        return self.linear(f"{prefix}wo_b.weight", torch.einsum("tgi,goi->tgo", groups, inner).flatten(1))

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        config = self.config
        scores = F.softplus(self.linear(f"{prefix}gate.weight", x)).sqrt()
        chosen = (scores + self.weights[f"{prefix}gate.bias"]).topk(config.num_experts_per_token).indices
        rows = []
        for row, score, picks in zip(x, scores, chosen, strict=True):
            total = self.expert(f"{prefix}shared_experts.", row, 1.0)
            for pick in picks.tolist():
                weight = score[pick] / score[picks].sum() * config.routed_scale
                total = total + self.expert(f"{prefix}experts.{pick}.", row, float(weight))
            rows.append(total)
        return torch.stack(rows)

    def expert(self, prefix: str, x: Tensor, weight: float) -> Tensor:
        limit = self.config.swiglu_limit
        gate = self.linear(f"{prefix}w1.weight", x).clamp(max=limit)
        up = self.linear(f"{prefix}w3.weight", x).clamp(-limit, limit)
        return self.linear(f"{prefix}w2.weight", F.silu(gate) * up * weight)

    def layer(self, prefix: str, streams: Tensor, positions: Tensor, context: Tensor, window: int | None) -> Tensor:
        """streams [T, S, d] after ``context`` [n, c] latents. ``window`` None: rows see the context and all rows."""
        u, post, c = self.read(f"{prefix}hc_attn", streams)
        x = self.norm(u, f"{prefix}attn_norm.weight")
        own = self.latents(f"{prefix}attn.", x, positions)
        every = torch.cat([context, own])
        keys = [every] * len(own)
        if window is not None:
            ends = [len(context) + t + 1 for t in range(len(own))]
            keys = [every[max(0, end - window) : end] for end in ends]
        streams = self.merge(self.attend(f"{prefix}attn.", x, positions, keys), post, c, streams)
        u, post, c = self.read(f"{prefix}hc_ffn", streams)
        return self.merge(self.experts(f"{prefix}ffn.", self.norm(u, f"{prefix}ffn_norm.weight")), post, c, streams)

    def streams_head(self, prefix: str, streams: Tensor) -> Tensor:
        mixed = self.linear(f"{prefix}hc_head_fn", self.norm(streams.flatten(1)))
        w = self.weights
        pre = torch.sigmoid(mixed * w[f"{prefix}hc_head_scale"] + w[f"{prefix}hc_head_base"]) + self.config.hc_eps
        return torch.einsum("ts,tsd->td", pre, streams)

    def spread(self, x: Tensor) -> Tensor:
        return x[:, None].repeat(1, self.config.hc_mult, 1)

    def logits(self, prefix: str, hidden: Tensor) -> Tensor:
        return self.linear("head.weight", self.norm(hidden, f"{prefix}norm.weight"))

    def draft_block(self, features: Tensor, ids: Tensor) -> Tensor:
        """features [L, m*d] of positions 0..L-1, ids [g] of a block at L.. -> hidden [g, d]."""
        num_stages = len(self.config.dspark.target_layer_ids)  # type: ignore[union-attr]
        x = self.norm(self.linear("mtp.0.main_proj.weight", features.double()), "mtp.0.main_norm.weight")
        length = len(features)
        streams = self.spread(self.weights["embed.weight"][ids])
        where, first = length + torch.arange(len(ids)), max(0, length - self.config.window)
        for stage in range(num_stages):
            context = self.latents(f"mtp.{stage}.attn.", x[first:], torch.arange(first, length))
            streams = self.layer(f"mtp.{stage}.", streams, where, context, None)
        return self.streams_head(f"mtp.{num_stages - 1}.", streams)

    def predict_further(self, streams: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        """MTP: streams [L, S*d] of positions 0..L-1 and the ids [L] behind each -> streams [L, S, d], logits [L, V]."""
        parts = streams.double().unflatten(-1, (self.config.hc_mult, -1))
        of_embedding = self.linear(
            "mtp.0.e_proj.weight", self.norm(self.weights["embed.weight"][next_ids], "mtp.0.enorm.weight")
        )
        x = of_embedding[:, None] + self.linear("mtp.0.h_proj.weight", self.norm(parts, "mtp.0.hnorm.weight"))
        nothing = x.new_zeros((0, self.config.head_dim))
        x = self.layer("mtp.0.", x, torch.arange(len(x)), nothing, self.config.window)
        return x, self.logits("mtp.0.", self.streams_head("mtp.0.", x))
