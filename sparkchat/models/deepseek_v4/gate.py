"""Which experts a row goes to, and with which weights: by token id in the first layers, by score in the others.

Shapes: N rows, d hidden size, E experts, k experts of a row. All in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.errors import DamagedFile
from sparkchat.kernels.gate import Routing, route
from sparkchat.kernels.gemm import gemm_splits, small_gemm
from sparkchat.models.deepseek_v4.activation import sqrt_softplus
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.packed import StoredLinear, has_kernels
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.linear import Linear


class Gate:
    """The router of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, *, is_hashed: bool) -> None:
        """``scope``: ffn of a layer. Raises DamagedFile when the table names experts that there are not."""
        weight = scope.weight("gate")
        self._weight: Tensor | None = None
        """[E, d] as it is stored, where kernels multiply by it."""
        if scope.is_packed and has_kernels(scope.device, scope.dtype) and isinstance(weight, Tensor):
            self._weight = weight.to(scope.device).contiguous()
            self._scores: Linear = StoredLinear(self._weight, torch.float32)
        else:
            self._scores = scope.multiply_by(weight, torch.float32, False)
        self._count, self._scale = config.num_experts_per_token, config.routed_scale
        # Of a launch's programs: none may run beside another of the same layer.
        self._arrived = torch.zeros(1, dtype=torch.int32, device=scope.device)
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

    @property
    def has_kernel(self) -> bool:
        """Whether ``route`` may be called."""
        return self._weight is not None

    def route(self, x: Tensor, token_ids: Tensor) -> Routing:
        """What ``__call__`` gives, with the lists that the experts' kernels read. Asks nothing of the host."""
        weight = self._weight
        assert weight is not None
        logits = torch.empty((gemm_splits(weight), x.shape[0], weight.shape[0]), device=x.device)
        small_gemm(x, weight, logits, epilogue="partials")
        routing = Routing.empty(x.shape[0], self._count, weight.shape[0], x.device)
        ids = None if self._experts_of is None else token_ids
        route(
            logits, routing, self._scale, bias=self._bias, table=self._experts_of, token_ids=ids, arrived=self._arrived
        )
        return routing

    def _choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        if self._experts_of is not None:
            return self._experts_of[token_ids]
        # The bias decides who is chosen and weighs nothing. Equal scores: the lowest expert first.
        assert self._bias is not None
        return (scores + self._bias).argsort(dim=-1, descending=True, stable=True)[:, : self._count]
