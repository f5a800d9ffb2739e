"""What the compressors of a layer project of their rows, in one product where weights are plain numbers.

Shapes: N rows, d hidden size, w outputs of one projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.gemm import small_gemm
from sparkchat.models.deepseek_v4.compressor import Compressor
from sparkchat.models.deepseek_v4.indexer import Indexer
from sparkchat.models.deepseek_v4.packed import MOST_ROWS
from sparkchat.models.linear import Linear


@dataclass(frozen=True)
class Pooled:
    """Values and scores of a layer's compressors, and the weights of its index heads."""

    main: tuple[Tensor, Tensor]
    """[N, w] float32 each, or parts of them [P, N, w] to be added in order, laid out alike"""
    index: tuple[Tensor, Tensor] | None
    weights: Tensor | None
    """[N, heads]"""


class PoolProducts:
    """The projections of one layer."""

    def __init__(self, projections: Sequence[Linear], joined: Tensor | None) -> None:
        """``projections`` in the order of ``Pooled``; ``joined`` [all outputs, d]: their weights in one piece, or None
        where each is multiplied by itself."""
        self._projections, self.joined = list(projections), joined
        self._sizes = [] if joined is None else [_weight_of(linear).shape[0] for linear in self._projections]

    @property
    def whole_from(self) -> int | None:
        """The first output of ``joined`` that no kernel takes in parts: those of the index heads' weights."""
        return sum(self._sizes[:4]) if len(self._sizes) > 4 else None

    def cut(self, parts: Tensor, whole: Tensor) -> Pooled:
        """parts [P, N, all outputs] float32 of the product with ``joined``; whole [N, ...] those from ``whole_from``
        on, added up."""
        cut = parts.split(self._sizes, dim=-1)
        return Pooled((cut[0], cut[1]), (cut[2], cut[3]) if len(cut) > 2 else None, whole if len(cut) > 2 else None)

    @classmethod
    def of(cls, compressor: Compressor, indexer: Indexer | None) -> PoolProducts:
        """The weights are moved into one piece of memory of which the projections keep their parts."""
        projections = list(compressor.projections)
        if indexer is not None:
            projections += [*indexer.compressor.projections, indexer.projections[1]]
        weights = [getattr(linear, "weight", None) for linear in projections]
        plain = [w for w in weights if isinstance(w, Tensor) and w.is_cuda and w.dtype == torch.bfloat16]
        if len(plain) < len(projections):
            return cls(projections, None)
        joined = torch.cat(plain)
        parts = joined.split([w.shape[0] for w in plain])
        for linear, part in zip(projections, parts, strict=True):
            linear.weight = part  # type: ignore[attr-defined]
        return cls(projections, joined)

    def __call__(self, x: Tensor) -> Pooled:
        """x [N, d]"""
        if self.joined is not None and x.shape[0] <= MOST_ROWS and x.dtype == self.joined.dtype:
            out = torch.empty((x.shape[0], self.joined.shape[0]), device=x.device)
            small_gemm(x, self.joined, out)
            parts = list(out.split(self._sizes, dim=1))
        else:
            parts = [linear(x.to(linear.dtype)) for linear in self._projections]
        index, weights = ((parts[2], parts[3]), parts[4]) if len(parts) > 2 else (None, None)
        return Pooled((parts[0], parts[1]), index, weights)


def _weight_of(linear: Linear) -> Tensor:
    return linear.weight  # type: ignore[attr-defined]
