"""Decoder layers over residual streams. Shapes: N rows, S streams, d hidden size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sparkchat.kernels.hyper import StreamWeights
from sparkchat.models.deepseek_v4.attention import LatentAttention
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.experts import ExpertMixture
from sparkchat.models.deepseek_v4.hyper import HyperConnection, StreamMix
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.layers import RMSNorm


class Layer:
    """Attention, then experts, each between a read from and a merge into the streams."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, ratio: int, *, is_hashed: bool) -> None:
        """``scope``: layers.N of the trunk, or mtp.N of a drafter with ratio 0 and no hashing."""
        self.attention = LatentAttention(scope.within("attn"), config, ratio)
        self._experts = ExpertMixture(scope.within("ffn"), config, is_hashed=is_hashed)
        self._attention_norm = scope.norm("attn_norm", config.rms_eps)
        self._experts_norm = scope.norm("ffn_norm", config.rms_eps)
        self._attention_streams = HyperConnection(scope, "hc_attn", config)
        self._experts_streams = HyperConnection(scope, "hc_ffn", config)

    def __call__(self, streams: Tensor, token_ids: Tensor, layer: int, sight: Sight) -> Tensor:
        """streams [N, S, d], token_ids [N], ``layer``: its number in the cache -> streams behind the layer."""
        x, mix = self.attention_input(streams)
        streams = mix.merge(self.attention(x, layer, sight), streams)
        x, mix = self._experts_streams.read(streams)
        output = self._experts(self._experts_norm(x.float(), x.dtype), token_ids, sight.asks_host)
        return mix.merge(output, streams)

    @property
    def experts(self) -> ExpertMixture:
        return self._experts

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm]:
        """Before the attention and before the experts."""
        return self._attention_norm, self._experts_norm

    def stream_weights(self) -> tuple[StreamWeights, StreamWeights]:
        """Of the connections before the attention and before the experts, as ``kernels.hyper`` reads them."""
        return self._attention_streams.kernel_weights(), self._experts_streams.kernel_weights()

    def attention_input(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        """streams [N, S, d] -> what the attention reads of them [N, d], and how its output is merged."""
        x, mix = self._attention_streams.read(streams)
        return self._attention_norm(x.float(), x.dtype), mix


class Stack:
    """Layers in order."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, ratios: Sequence[int], *, num_hashed: int = 0) -> None:
        """``scope``: holds ``0``, ``1``, ...; ``ratios``: one for each layer."""
        self.layers = [
            Layer(scope.within(str(index)), config, ratio, is_hashed=index < num_hashed)
            for index, ratio in enumerate(ratios)
        ]

    @classmethod
    def of(cls, layers: list[Layer]) -> Stack:
        """Layers that are there already."""
        stack = object.__new__(cls)
        stack.layers = layers
        return stack

    def run(
        self,
        streams: Tensor,
        token_ids: Tensor,
        sight: Sight,
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """streams [N, S, d] -> behind the last layer. ``on_layer`` sees each layer's number and output."""
        for index, layer in enumerate(self.layers):
            streams = layer(streams, token_ids, index, sight)
            if on_layer is not None:
                on_layer(index, streams)
        return streams
