"""The drafter in its training form: many blocks of one sequence in one pass, teacher forced.

Parameter names are those of the published checkpoints. Shapes: B sequences, L positions, A anchors a
sequence, g block length, d hidden size, m tapped layers, r Markov rank, Vd draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkchat.train.config import DrafterShape
from sparkchat.train.target import Target, attend_masked, rotate
from sparkchat.train.weights import TargetShape

_INIT_STD = 0.02


class Scale(nn.Module):
    """The weight of an RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Projection(nn.Linear):
    """A bias-free matrix kept in fp32 and applied in the dtype of its input."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)
        nn.init.normal_(self.weight, std=_INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class BlockAttention(nn.Module):
    """Attention of block rows over target features before their anchor and over their own block."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        size, self.head_dim = shape.hidden_size, shape.head_dim
        self.q_proj = Projection(size, shape.num_heads * shape.head_dim)
        self.k_proj = Projection(size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Projection(size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Projection(shape.num_heads * shape.head_dim, size)
        self.q_norm = Scale(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Scale(shape.head_dim, shape.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, n, K, D] of context rows or block rows x [B, n, d]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """x [B, n, d] over keys and values [B, T, K, D] where mask [B, 1, n, T] is true -> [B, n, d]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return self.o_proj(attend_masked(q, keys.transpose(1, 2), values.transpose(1, 2), mask).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Projection(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = Scale(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = Scale(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)


class MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Projection(rank, draft_vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=_INIT_STD)


class ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        nn.init.normal_(self.proj.weight, std=_INIT_STD)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """fp32 logits [...] from hidden [..., d] and Markov embeddings of the previous tokens [..., r]."""
        return self.proj(torch.cat([hidden.float(), previous.float()], dim=-1)).squeeze(-1)


class TrainingDrafter(nn.Module):
    """A DSpark drafter with the published tensor names, over a frozen target."""

    def __init__(self, target: Target, shape: DrafterShape, tap_layers: tuple[int, ...], mask_token_id: int) -> None:
        super().__init__()
        self.target, self.config = target, shape
        self.tap_layers, self.mask_token_id = tap_layers, mask_token_id
        size, eps = target.shape.hidden_size, target.shape.rms_norm_eps
        self.fc = Projection(len(tap_layers) * size, size)
        self.hidden_norm = Scale(size, eps)
        self.layers = nn.ModuleList(DraftLayer(target.shape) for _ in range(shape.num_layers))
        self.norm = Scale(size, eps)
        self.markov_head = MarkovHead(target.shape.vocab_size, shape.draft_vocab_size, shape.markov_rank)
        self.confidence_head = ConfidenceHead(size + shape.markov_rank)
        # Tap layers differ tenfold in scale; unit-scale inputs train evenly. Folded into fc on export.
        self.register_buffer("feature_scale", torch.ones(len(tap_layers) * size))
        # The frozen head expects the target's gains, which Adam would take thousands of steps to reach from one.
        self.norm.weight.data.copy_(target.norm.float())

    @torch.no_grad()
    def measure_feature_scale(self, features: Tensor) -> None:
        """Sets the input scale from features [B, L, m * d] by their robust size in each channel."""
        flat = features.flatten(0, -2).float()
        self.feature_scale.copy_(flat.abs().median(dim=0).values.mul(1.5).clamp(min=1e-3))

    def context(self, features: Tensor) -> Tensor:
        """What every layer's context keys and values are made of: features [..., m * d] -> [..., d]."""
        return self.hidden_norm(self.fc(features / self.feature_scale.to(features.dtype)))

    def previous_embedding(self, ids: Tensor) -> Tensor:
        """Markov embeddings [..., r] of target ids [...], fp32."""
        return self.markov_head.markov_w1(ids)

    def block_ids(self, anchor_ids: Tensor, block_len: int) -> Tensor:
        """anchor_ids [...] -> input ids [..., g]: the anchor, then masks."""
        ids = anchor_ids.new_full((*anchor_ids.shape, block_len), self.mask_token_id)
        ids[..., 0] = anchor_ids
        return ids

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor, block_len: int) -> Tensor:
        """Final hidden states [B, A, g, d] of the blocks anchored at ``anchors`` [B, A] of sequences ids [B, L]."""
        num_sequences, num_anchors = anchors.shape
        blocks = self.block_ids(ids.gather(1, anchors), block_len).flatten(1)
        positions = (anchors[..., None] + torch.arange(block_len, device=ids.device)).flatten(1)
        mask = block_mask(anchors, block_len, ids.shape[1])
        x = F.embedding(blocks, self.target.embedding)
        cos, sin = self.target.cos, self.target.sin
        context, length = self.context(features), features.shape[1]
        context_rope = cos[:length, None], sin[:length, None]
        block_rope = cos[positions][:, :, None], sin[positions][:, :, None]
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            context_kv = layer.self_attn.keys_values(context, *context_rope)
            block_kv = layer.self_attn.keys_values(normed, *block_rope)
            keys, values = (torch.cat(pair, dim=1) for pair in zip(context_kv, block_kv, strict=True))
            x = x + layer.self_attn(normed, *block_rope, keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(num_sequences, num_anchors, block_len, -1)


def block_mask(anchors: Tensor, block_len: int, context_len: int) -> Tensor:
    """Who sees whom, bool [B, 1, A * g, L + A * g]: context strictly before the anchor, and the own block."""
    num_anchors, device = anchors.shape[1], anchors.device
    sees_context = torch.arange(context_len, device=device) < anchors[..., None]
    owner = torch.arange(num_anchors, device=device).repeat_interleave(block_len)
    sees_block = (owner[:, None] == owner).expand(anchors.shape[0], -1, -1)
    return torch.cat([sees_context.repeat_interleave(block_len, dim=1), sees_block], dim=-1)[:, None]
