"""The heads of a drafter as ``kernels.cpu.shortlist`` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels import cpu
from sparkchat.models.dspark.heads import ConfidenceHead, VanillaHead

_LANES = 16


@dataclass(frozen=True)
class LaneHeads:
    """V target and Vd draft tokens, r Markov rank, d hidden size. What a drafter lacks is empty."""

    mapping: np.ndarray
    """[Vd] int64 target ids"""
    w1: np.ndarray
    """[V, r] uint16, the bits of bfloat16"""
    w2: np.ndarray
    """[Vd, r], as w1"""
    judge: np.ndarray
    """[d + r] or [d] float32: weight of the confidence"""
    bias: float
    """Of the confidence."""

    @classmethod
    def of(
        cls,
        head: VanillaHead | None,
        confidence: ConfidenceHead | None,
        mapping: Tensor | None,
        device: torch.device,
    ) -> LaneHeads | None:
        """None where the kernel does not take them: it knows the vanilla head in bfloat16."""
        if device.type != "cpu" or not cpu.is_supported() or (head is not None and not _takes(head)):
            return None
        # Compiled when it is first imported, once for a version and processor: now, and not at the first draft.
        import sparkchat.kernels.cpu.shortlist  # noqa: F401

        weight, bias = (torch.empty(0), None) if confidence is None else confidence.parameters
        w1, w2 = (None, None) if head is None else (head.embedding, head.w2_rows)
        return cls(
            mapping=np.empty(0, np.int64) if mapping is None else mapping.contiguous().numpy(),
            w1=_bits(w1),
            w2=_bits(w2),
            judge=weight.contiguous().numpy(),
            bias=0.0 if bias is None else float(bias),
        )


def _takes(head: VanillaHead) -> bool:
    tables = (head.embedding, head.w2_rows)
    is_bf16 = all(table is not None and table.dtype == torch.bfloat16 for table in tables)
    return type(head) is VanillaHead and is_bf16 and head.embedding.shape[1] % _LANES == 0


def _bits(table: Tensor | None) -> np.ndarray:
    if table is None:
        return np.empty((0, 0), np.uint16)
    return table.contiguous().view(torch.int16).numpy().view(np.uint16)
