"""The table at both ends of Gemma 4: embeddings times sqrt(d), logits behind a soft cap."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.models.layers import Embedding
from sparkchat.models.linear import Linear
from sparkchat.models.quant import Weight


class ScaledEmbedding(Embedding):
    """Rows of the table times sqrt(d), that factor rounded to the table's format as in training."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(weight, device, dtype)
        self._scale = float(torch.tensor(weight.shape[1] ** 0.5, dtype=dtype))

    def __call__(self, token_ids: Tensor) -> Tensor:
        return super().__call__(token_ids).mul_(self._scale)


class CappedHead:
    """A Linear whose outputs y become ``cap * tanh(y / cap)``."""

    def __init__(self, head: Linear, cap: float | None) -> None:
        self._head, self._cap = head, cap
        self.dtype, self.kernel = head.dtype, head.kernel

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        """x [n, d] -> [n, V] float32."""
        y = self._head(x, is_long).float()
        return y if self._cap is None else y.div_(self._cap).tanh_().mul_(self._cap)
