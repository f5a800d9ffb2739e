"""Residual streams and how a sub-block reads and writes them (manifold-constrained hyper-connections).

Shapes: N rows, S streams, d hidden size. All in float32; only what is handed on is cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.hyper import StreamWeights
from sparkchat.models.deepseek_v4.activation import sigmoid
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.linear import make_linear


@dataclass(frozen=True)
class StreamMix:
    """How a sub-block's output and the streams before it make the streams behind it."""

    post: Tensor
    """[N, S] what each stream takes of the output."""
    combination: Tensor
    """[N, S, S] what stream k behind takes of stream j before it, at [j, k]; the columns sum to 1."""

    def merge(self, output: Tensor, streams: Tensor) -> Tensor:
        """output [N, d], streams [N, S, d] before the sub-block -> streams behind it, in their dtype."""
        taken = self.post.unsqueeze(-1) * output.float().unsqueeze(1)
        # Transposed: summed over the first index of the combination.
        return torch.baddbmm(taken, self.combination.transpose(1, 2), streams.float()).to(streams.dtype)


class _StreamWeights:
    """Numbers per row from all of its streams: a projection of the normed, flattened streams."""

    def __init__(self, scope: Scope, name: str, config: DeepseekV4Config) -> None:
        # The norm follows the product, so that the product runs on what is there already.
        self.weight = scope.tensor(f"{name}_fn")
        """[Q, S*d] float32"""
        self._fn = make_linear(self.weight, None, device=scope.device, dtype=torch.float32)
        self._eps = config.rms_eps

    def __call__(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(1).float()
        return self._fn(flat) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + self._eps)


def _weighted(weights: Tensor, streams: Tensor, dtype: torch.dtype) -> Tensor:
    """weights [N, S], streams [N, S, d] -> [N, d]"""
    return (weights.unsqueeze(-1) * streams.float()).sum(dim=1).to(dtype)


class HyperConnection:
    """Reads the input of one sub-block from the streams."""

    def __init__(self, scope: Scope, name: str, config: DeepseekV4Config) -> None:
        """``name``: hc_attn or hc_ffn, in the scope of a layer."""
        self._weights = _StreamWeights(scope, name, config)
        self._base, scale = scope.tensor(f"{name}_base"), scope.tensor(f"{name}_scale")
        streams = config.hc_mult
        self._sizes = [streams, streams, streams * streams]
        self._scale = scale.repeat_interleave(torch.tensor(self._sizes, device=scale.device))
        self._streams, self._iterations, self._eps = streams, config.hc_sinkhorn_iters, config.hc_eps
        self._rms_eps = config.rms_eps

    def kernel_weights(self) -> StreamWeights:
        """What ``kernels.hyper`` reads, in the same memory."""
        numbers = (self._weights.weight, self._base, self._scale, self._streams, self._rms_eps, self._eps)
        return StreamWeights(*numbers, iterations=self._iterations)

    def read(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        """streams [N, S, d] -> the sub-block's input [N, d] in their dtype, and how to merge its output."""
        pre, post, combination = (self._weights(streams) * self._scale + self._base).split(self._sizes, dim=-1)
        taken = _weighted(sigmoid(pre) + self._eps, streams, streams.dtype)
        combination = combination.unflatten(-1, (self._streams, self._streams))
        return taken, StreamMix(2.0 * sigmoid(post), self._balanced(combination))

    def _balanced(self, combination: Tensor) -> Tensor:
        """Softmax of each row, then rows and columns scaled in turn, columns last (Sinkhorn and Knopp)."""
        eps = self._eps
        c = combination.softmax(dim=-1) + eps
        c.div_(c.sum(dim=1, keepdim=True).add_(eps))
        for _ in range(self._iterations - 1):
            c.div_(c.sum(dim=2, keepdim=True).add_(eps))
            c.div_(c.sum(dim=1, keepdim=True).add_(eps))
        return c


class HyperHead:
    """One row from the streams, before the final norm."""

    def __init__(self, scope: Scope, config: DeepseekV4Config) -> None:
        self._weights = _StreamWeights(scope, "hc_head", config)
        self._base, self._scale = scope.tensor("hc_head_base"), scope.tensor("hc_head_scale")
        self._eps, self._rms_eps, self._iterations = config.hc_eps, config.rms_eps, config.hc_sinkhorn_iters

    def kernel_weights(self) -> StreamWeights:
        """As those of a connection; a head only reads."""
        count = self._base.shape[0]
        scale = self._scale.expand(count).contiguous()
        numbers = (self._weights.weight, self._base, scale, count, self._rms_eps, self._eps)
        return StreamWeights(*numbers, iterations=self._iterations)

    def __call__(self, streams: Tensor) -> Tensor:
        """streams [N, S, d] -> [N, d] in their dtype"""
        weights = sigmoid(self._weights(streams) * self._scale + self._base) + self._eps
        return _weighted(weights, streams, streams.dtype)
