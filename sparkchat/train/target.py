"""The frozen target in the form training needs: dense batches, lock-step decoding, cached blocks.

Shapes: B sequences, L positions, R rows of a cache, n new positions a row, d hidden size, V vocabulary,
H query heads, K key/value heads, D head size, m tapped layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.errors import DamagedFile
from sparkchat.train.decode_attention import decode_attention
from sparkchat.train.weights import TargetShape, read_target


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; projections that share their input are stored as one matrix."""

    input_norm: Tensor
    qkv: Tensor
    """[(H + 2K) * D, d]"""
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate, d]"""
    down: Tensor


class RowCache:
    """Keys and values of R rows, indexed by absolute position: two tensors [layers, R, K, length, D]."""

    def __init__(self, target: "Target", num_rows: int, length: int) -> None:
        shape = target.shape
        size = (shape.num_layers, num_rows, shape.num_kv_heads, length, shape.head_dim)
        self.keys = torch.zeros(size, dtype=target.dtype, device=target.device)
        self.values = torch.zeros_like(self.keys)
        self.length = length


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, n, H, D], k [B, n, K, D], v [B, n, K, D]) -> [B, n, H, D]"""

LayerParts = tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]
"""What a layer does before and after its attention."""


class Target:
    """A frozen dense decoder (llama or qwen3) with taps on its layer outputs."""

    def __init__(self, shape: TargetShape, weights: dict[str, Tensor], *, device: str, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

        def take(name: str) -> Tensor:
            if name not in weights:
                raise DamagedFile(f"the target has no tensor {name}")
            return weights[name].to(device=device, dtype=dtype)

        self.embedding = take("embed_tokens.weight")
        self.head = self.embedding if shape.tied else take("lm_head.weight")
        self.norm = take("norm.weight")
        self.layers = [_take_layer(take, weights, i) for i in range(shape.num_layers)]
        self.cos, self.sin = rope_tables(shape.head_dim, shape.rope_theta, shape.max_context, device, dtype)
        self._whole_sequence_parts: LayerParts = (self._project, self._mix)

    def forward(self, ids: Tensor, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Causal pass over whole sequences ids [B, L].

        Returns the raw outputs of ``tap_layers`` concatenated [B, L, m * d] and the final hidden states
        after the last norm [B, L, d].
        """
        length = ids.shape[1]
        rope = self.cos[:length, None], self.sin[:length, None]
        return self._run(ids, *rope, _attend_causal, tap_layers, self._whole_sequence_parts)

    def forward_cached(
        self, ids: Tensor, positions: Tensor, cache: RowCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Pass over blocks ids [R, n] at ``positions`` [R, n], each seeing its row's cache up to itself.

        Keys and values are written at their positions, so stale entries behind a row's end are harmless:
        they are overwritten before a query can see them.
        """
        mask = torch.arange(cache.length, device=ids.device) <= positions[:, None, :, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            _write_rows(keys, positions, k)
            _write_rows(values, positions, v)
            return attend_masked(q, keys, values, mask)

        rope = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        return self._run(ids, *rope, attend, tap_layers, (self._project, self._mix))

    def decode(self, ids: Tensor, position: Tensor, cache: RowCache) -> Tensor:
        """One step of all rows at the same ``position`` (int64 [1], read on the device): ids [R] -> hidden [R, d]."""
        cos = self.cos.index_select(0, position)[:, None]
        sin = self.sin.index_select(0, position)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys.index_copy_(2, position, k.transpose(1, 2))
            values.index_copy_(2, position, v.transpose(1, 2))
            return decode_attention(q[:, 0], keys, values, position)[:, None]

        return self._run(ids[:, None], cos, sin, attend, (), (self._project, self._mix))[1][:, 0]

    def _run(
        self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend, tap_layers: tuple[int, ...], parts: LayerParts
    ) -> tuple[Tensor, Tensor]:
        project, mix = parts
        x = F.embedding(ids, self.embedding)
        taps = []
        for index, weights in enumerate(self.layers):
            q, k, v = project(weights, x, cos, sin)
            x = mix(weights, x, attend(index, q, k, v).flatten(-2))
            if index in tap_layers:
                taps.append(x)
        features = torch.cat(taps, dim=-1) if taps else x.new_zeros(0)
        return features, self._normalise(x, self.norm)

    def compile_layers(self) -> None:
        """Fuses the element-wise work of whole-sequence passes; pays from a few minutes of training on."""
        compiled = torch.compile(self._project, dynamic=False), torch.compile(self._mix, dynamic=False)
        self._whole_sequence_parts = compiled

    def _project(self, weights: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        qkv = F.linear(self._normalise(x, weights.input_norm), weights.qkv)
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=-2)
        if weights.q_norm is not None:
            q, k = self._normalise(q, weights.q_norm), self._normalise(k, weights.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _mix(self, weights: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, weights.output)
        gate, up = F.linear(self._normalise(x, weights.post_norm), weights.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, weights.down)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.rms_norm_eps)


def load_target(path: Path, *, device: str, dtype: torch.dtype) -> Target:
    """The target at ``path`` (see read_target) on ``device``."""
    shape, weights = read_target(path)
    return Target(shape, weights, device=device, dtype=dtype)


def _take_layer(take: Callable[[str], Tensor], weights: dict[str, Tensor], index: int) -> LayerWeights:
    prefix = f"layers.{index}."
    if any(name.startswith(prefix) and name.endswith("_proj.bias") for name in weights):
        raise DamagedFile(f"the target's layer {index} has projection biases, which llama and qwen3 do not")
    has_head_norms = prefix + "self_attn.q_norm.weight" in weights
    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight"),
        qkv=torch.cat([take(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]),
        q_norm=take(prefix + "self_attn.q_norm.weight") if has_head_norms else None,
        k_norm=take(prefix + "self_attn.k_norm.weight") if has_head_norms else None,
        output=take(prefix + "self_attn.o_proj.weight"),
        post_norm=take(prefix + "post_attention_layernorm.weight"),
        gate_up=torch.cat([take(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]),
        down=take(prefix + "mlp.down_proj.weight"),
    )


def rope_tables(head_dim: int, theta: float, length: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the half-split rotary embedding."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, D] by tables that broadcast over the heads."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [B, n, H, D] over keys and values [B, K, T, D] where mask [B, 1, n, T] is true -> like q."""
    group = q.shape[2] // keys.shape[1]
    # Repeated heads keep the memory-efficient kernel eligible: grouped heads with a mask fall back to slow maths.
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)


def _attend_causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _write_rows(cache: Tensor, positions: Tensor, new: Tensor) -> None:
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    cache[rows, :, positions] = new
