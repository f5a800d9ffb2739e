"""Which experts a row goes to, and with which weights: by token id in the first layers, by score in the others.

Shapes: N rows, d hidden size, E experts, k experts of a row. All in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.errors import DamagedFile
from sparkchat.models.deepseek_v4.activation import sqrt_softplus
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.scope import Scope


class Gate:
    """The router of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, *, is_hashed: bool) -> None:
        """``scope``: ffn of a layer. Raises DamagedFile when the table names experts that there are not."""
        self._scores = scope.linear("gate", dtype=torch.float32)
        self._count, self._scale = config.num_experts_per_token, config.routed_scale
        self._experts_of: Tensor | None = None
        self._bias: Tensor | None = None
        if is_hashed:
            self._experts_of = scope.tensor("gate.tid2eid", torch.int64)
            if bool((self._experts_of < 0).any() | (self._experts_of >= config.num_experts).any()):
                raise DamagedFile(
                    f"{scope.prefix}gate.tid2eid names experts outside of the {config.num_experts} there are; "
                    "fetch the model again"
                )
        else:
            self._bias = scope.tensor("gate.bias")

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d], token_ids [N] -> weights [N, k] float32 and experts [N, k] int64, ascending in every row."""
        scores = sqrt_softplus(self._scores(x.float()))
        experts = self._choose(scores, token_ids).sort(dim=-1).values
        weights = scores.gather(1, experts)
        return weights / weights.sum(dim=-1, keepdim=True) * self._scale, experts

    def _choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        if self._experts_of is not None:
            return self._experts_of[token_ids]
        # The bias decides who is chosen and weighs nothing. Equal scores: the lowest expert first.
        assert self._bias is not None
        return (scores + self._bias).argsort(dim=-1, descending=True, stable=True)[:, : self._count]
