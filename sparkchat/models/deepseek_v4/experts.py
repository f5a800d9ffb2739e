"""The mixture of experts of a layer: those a row is sent to, and one that every row goes to.

Shapes: N rows, d hidden size, k experts of a row. Sums are taken in float32, expert by expert in ascending order, so
that a row's bits do not depend on where its batch mates are sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.experts import COUNTERS, ExpertBuffers, TiledBank, TiledExperts, add_parts, run_experts
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.models.deepseek_v4.activation import silu
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.formats import Stored
from sparkchat.models.deepseek_v4.gate import Gate
from sparkchat.models.deepseek_v4.packed import WeightBank, fp8_parts, lies_in_tiles
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.linear import Linear

Projections = tuple[Linear, Linear, Linear]
NAMES = ("w1", "w2", "w3")
MOST = 1024
"""Rows that the experts' kernels take at once; their buffers hold k + 1 outputs of each."""


class Expert:
    """w2(silu(w1 x) * w3 x), both factors clamped."""

    def __init__(self, projections: Projections, config: DeepseekV4Config) -> None:
        """``projections``: w1, w2, w3"""
        self._w1, self._w2, self._w3 = projections
        self._limit = config.swiglu_limit

    def __call__(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [n, d], weights [n, 1] float32 or None for 1 -> [n, d] float32"""
        gate = self._w1(x).float().clamp(max=self._limit)
        up = self._w3(x).float().clamp(-self._limit, self._limit)
        inner = silu(gate) * up
        if weights is not None:
            inner = inner * weights
        return self._w2(inner.to(self._w2.dtype)).float()


class ExpertMixture:
    """The feed-forward sub-block of one layer."""

    def __init__(self, scope: Scope, config: DeepseekV4Config, *, is_hashed: bool) -> None:
        """``scope``: ffn of a layer."""
        self.gate = Gate(scope, config, is_hashed=is_hashed)
        shared = scope.within("shared_experts")
        stored = [shared.weight(name) for name in NAMES]
        self.banks = {name: _bank(scope, config, name) for name in NAMES} if scope.is_packed else {}
        """Packed weights of all experts by name, each in one piece."""
        self._limit, self._is_rounded, self._group = config.swiglu_limit, scope.has_roundings, scope.group
        self._tiles = _tiles(scope, self.banks, stored) if self.gate.has_kernel else None
        if self._tiles is not None:
            self.banks = {}
            # Of a launch's programs: none may run beside another of the same layer.
            self._state = torch.zeros(COUNTERS, dtype=torch.int32, device=scope.device)
            return
        w1, w2, w3 = (shared.multiply_by(weight, None, True) for weight in stored)
        self._shared = Expert((w1, w2, w3), config)
        self._experts = [
            Expert(_banked(scope, self.banks, index) if self.banks else _expert(scope, index), config)
            for index in range(config.num_experts)
        ]

    def __call__(self, x: Tensor, token_ids: Tensor, asks_host: bool = True) -> Tensor:
        """x [N, d], token_ids [N] -> [N, d] in x's dtype. ``asks_host``: as of ``Sight``."""
        if self._tiles is not None:
            # Rows know nothing of each other, so that cutting a long prompt changes no bit.
            parts = [
                self._by_kernels(*cut, self._tiles) for cut in zip(x.split(MOST), token_ids.split(MOST), strict=True)
            ]
            return self._group.sum(parts[0] if len(parts) == 1 else torch.cat(parts)).to(x.dtype)
        weights, chosen = self.gate(x, token_ids)
        mix = self.mix if asks_host else self.mix_of_all
        return self._group.sum(mix(x, weights, chosen) + self._shared(x)).to(x.dtype)

    def own_part(self, x: Tensor, token_ids: Tensor, may_be_parts: bool) -> Tensor:
        """This rank's part of the sum [N, d] float32, or parts of that [P, N, d] to be added in order; nothing is asked
        of the host."""
        if self._tiles is None:
            weights, chosen = self.gate(x, token_ids)
            return self.mix_of_all(x, weights, chosen) + self._shared(x)
        if x.shape[0] <= MOST:
            parts = self._parts_by_kernels(x, token_ids, self._tiles)
            return parts if may_be_parts else _added(parts, self._group.room(x.shape, torch.float32, x.device))
        cuts = zip(x.split(MOST), token_ids.split(MOST), strict=True)
        return torch.cat([self._by_kernels(*cut, self._tiles) for cut in cuts])

    def _by_kernels(self, x: Tensor, token_ids: Tensor, tiles: TiledExperts) -> Tensor:
        """This rank's part of the sum [N, d] float32, the shared expert's in it."""
        return _added(self._parts_by_kernels(x, token_ids, tiles), torch.empty(x.shape, device=x.device))

    def _parts_by_kernels(self, x: Tensor, token_ids: Tensor, tiles: TiledExperts) -> Tensor:
        """As ``_by_kernels``, not added up: [k + 1, N, d] float32."""
        routing = self.gate.route(x, token_ids)
        buffers = ExpertBuffers.empty(*routing.weights.shape, tiles, x.dtype)
        run_experts(x, tiles, routing, buffers, limit=self._limit, is_rounded=self._is_rounded, state=self._state)
        return buffers.parts

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [N, d], weights [N, k] float32, chosen [N, k] ascending -> this rank's part of the sum [N, d] float32"""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, slots in _visits(chosen):
            total.index_add_(0, rows, self._experts[expert](x[rows], weights[rows, slots].unsqueeze(-1)))
        return total

    def mix_of_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As ``mix`` bit for bit, asking the host nothing: all experts take all rows. A reference, not for speed."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, expert in enumerate(self._experts):
            is_sent = chosen == number
            weight = torch.where(is_sent, weights, 0.0).sum(dim=-1, keepdim=True)
            total += torch.where(is_sent.any(dim=-1, keepdim=True), expert(x, weight), 0.0)
        return total


def _added(parts: Tensor, total: Tensor) -> Tensor:
    add_parts(parts, total)
    return total


def _tiles(scope: Scope, banks: dict[str, WeightBank], shared: list[Stored]) -> TiledExperts | None:
    """All experts of a layer as kernels read them; None where some do not lie in tiles. ``banks`` are used up."""
    if not all(banks[name].has_tiles() for name in NAMES) or not all(lies_in_tiles(weight) for weight in shared):
        return None
    w1, w2, w3 = (fp8_parts(weight, scope.device) for weight in shared)
    return TiledExperts(
        TiledBank.of_two(banks["w1"].parts(), banks["w3"].parts()),
        TiledBank.in_place(*banks["w2"].parts()),
        TiledFp8.of_two(w1, w3),
        TiledFp8.of(*w2),
    )


def _expert(scope: Scope, index: int) -> Projections:
    expert = scope.within(f"experts.{index}")
    w1, w2, w3 = (expert.linear(name, has_fp8_input=True) for name in NAMES)
    return w1, w2, w3


def _bank(scope: Scope, config: DeepseekV4Config, name: str) -> WeightBank:
    experts = scope.within("experts")
    return WeightBank.fill(config.num_experts, lambda index: experts.weight(f"{index}.{name}"), scope.device)


def _banked(scope: Scope, banks: dict[str, WeightBank], index: int) -> Projections:
    w1, w2, w3 = (scope.multiply_by(banks[name][index], None, True) for name in NAMES)
    return w1, w2, w3


def _visits(chosen: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """chosen [N, k] -> for each expert that is needed, ascending: its number, its rows and their places among k."""
    order = chosen.flatten().argsort(stable=True)
    experts, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    width = chosen.shape[1]
    visits, at = [], 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        places = order[at : at + count]
        visits.append((expert, places // width, places % width))
        at += count
    return visits
