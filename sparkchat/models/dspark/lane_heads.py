"""The heads of a drafter as ``kernels.cpu.shortlist`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels import cpu
from sparkchat.models.dspark.heads import ConfidenceHead, VanillaHead
from sparkchat.models.native import LaneLinear
from sparkchat.models.quant import GROUP, GroupedWeight

_LANES = 16
SMALLEST_SCREENED = 4096
"""Draft vocabularies below this are passed over whole."""
_SHARES = (1.0, 0.94, 0.88, 0.82, 0.76)
"""Of a group's range, tried for 4 bits."""


class ExactRows(NamedTuple):
    """A base head in 8 bits, where the one that all logits are computed with has 4."""

    codes: np.ndarray
    """[Vd, d] int8"""
    scale: np.ndarray
    """[Vd, d / 32] float32"""


NOTHING = ExactRows(np.empty((0, 0), np.int8), np.empty((0, 0), np.float32))


def screened_head(weight: Tensor) -> tuple[LaneLinear, ExactRows]:
    """weight [Vd, d] float32 -> the head that finds the likeliest tokens, of 4 bits and for rows of 8, and their exact
    rows."""
    from sparkchat.kernels.cpu.matrix import quantize

    codes, scale = quantize(weight)
    return LaneLinear(_four_bits(weight), None, is_narrow=True), ExactRows(codes.numpy(), scale.numpy())


def _four_bits(weight: Tensor) -> GroupedWeight:
    """By the least and the largest of each group, both moved inwards as far as it brings the codes nearer."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    least, most = groups.amin(dim=2), groups.amax(dim=2)
    middle, half = (most + least) / 2, (most - least) / 2
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for share in _SHARES:
        scale = (half * (2 * share / 15)).clamp_(min=2e-5).half().float()
        shift = (middle - half * share).half().float()
        codes = ((groups - shift[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        error = (codes * scale[..., None] + shift[..., None] - groups).square_().sum(dim=2)
        if best is None:
            best = (error, codes, scale, shift)
        else:
            is_better = error < best[0]
            found = zip((error, codes, scale, shift), best, strict=True)
            best = tuple(torch.where(is_better[..., None] if n.dim() == 3 else is_better, n, o) for n, o in found)
    assert best is not None
    return GroupedWeight(best[1].to(torch.uint8).view(weight.shape), best[2], best[3])


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
    exact: ExactRows = NOTHING
    """What base logits are computed with again for the likeliest tokens."""

    @classmethod
    def of(
        cls,
        head: VanillaHead | None,
        confidence: ConfidenceHead | None,
        mapping: Tensor | None,
        device: torch.device,
        exact: ExactRows = NOTHING,
    ) -> LaneHeads | None:
        """None where the kernel does not take them: it knows the vanilla head in bfloat16."""
        if not is_drawn_by_kernel(head, device):
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
            exact=exact,
        )


def is_drawn_by_kernel(head: VanillaHead | None, device: torch.device) -> bool:
    """Whether ``LaneHeads.of`` can be made."""
    return device.type == "cpu" and cpu.is_supported() and (head is None or _takes(head))


def _takes(head: VanillaHead) -> bool:
    tables = (head.embedding, head.w2_rows)
    is_bf16 = all(table is not None and table.dtype == torch.bfloat16 for table in tables)
    return type(head) is VanillaHead and is_bf16 and head.embedding.shape[1] % _LANES == 0


def _bits(table: Tensor | None) -> np.ndarray:
    if table is None:
        return np.empty((0, 0), np.uint16)
    return table.contiguous().view(torch.int16).numpy().view(np.uint16)
