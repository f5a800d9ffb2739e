"""The output head of a quantised model on the CPU: a bf16 product over the vocabulary, then the likeliest in fp32.

The head is the largest matrix a decode step reads. In fp32 it costs twice the bytes of bf16; in bf16 alone its
outputs fall on steps of 1/8 near 20, which ties tokens that are not tied. So every logit comes from the bf16
product, and those within ``REACH`` of a row's largest are computed again in fp32 from the stored codes. What is left
in bf16 is off by 1 part in 256 at most, on tokens 20 times less likely than the first.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparkchat.models.linear import PackedLinear
from sparkchat.models.quant import GroupedWeight

REACH = 3.0
"""Holds 18 tokens on average in answers of SmolLM2-135M; 8 holds 830, and refining them costs more than the product."""
MOST = 1024
"""A flatter row than any real one: its largest this many are refined."""


class RefinedHead:
    """Looks like a Linear with fp32 inputs and outputs; a row's result does not depend on the rows beside it."""

    dtype = torch.float32
    kernel = "onednn-bf16, likeliest in fp32"

    def __init__(self, weight: GroupedWeight) -> None:
        self._weight = weight
        self._coarse = PackedLinear(weight.dense().to(torch.bfloat16), None)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        """x [n, d] float32 -> [n, V] float32."""
        logits = self._coarse(x.to(torch.bfloat16)).float()
        for row, hidden in zip(logits, x, strict=True):
            index = torch.from_numpy(_likeliest(row.numpy()))
            row[index] = torch.mv(self._weight.rows(index).dense(), hidden)
        return logits


def _likeliest(values: np.ndarray) -> np.ndarray:
    """Ids of the logits [V] worth refining; none of a row that is not numbers."""
    found = np.flatnonzero(values >= values.max() - REACH)
    if len(found) <= MOST:
        return found
    return np.argpartition(values, len(values) - MOST)[len(values) - MOST :]
