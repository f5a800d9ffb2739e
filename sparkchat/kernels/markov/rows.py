"""W2 of a sequential head in 8 bits: half of what is read for every draft.

A drafter's law may be rounded: a draft is accepted by the law that it was drawn from, whatever that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 448.0


@dataclass(frozen=True)
class RoundedRows:
    """[Vd, r] as codes with a scale for each row."""

    codes: Tensor
    """[Vd, r] float8_e4m3fn"""
    scales: Tensor
    """[Vd] float32"""

    @classmethod
    def of(cls, rows: Tensor) -> RoundedRows:
        """rows [Vd, r], each rounded by the scale that makes its largest number 448."""
        scales = rows.abs().amax(dim=1).float().clamp_(min=1e-30) / _MOST
        return cls((rows.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def float(self) -> Tensor:
        """[Vd, r] float32"""
        return self.codes.float() * self.scales[:, None]
