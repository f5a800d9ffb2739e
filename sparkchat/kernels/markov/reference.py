"""The sequential head of a block in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.sampling import GREEDY_BELOW, DrawSettings, Laws
from sparkchat.kernels.sampling.reference import DRAFT, draw_reference, laws_reference, uniforms_reference

if TYPE_CHECKING:
    from sparkchat.kernels.markov import MarkovBuffers


def markov_block_reference(
    base: Tensor,
    w1: Tensor | None,
    w2: Tensor | RoundedRows | None,
    anchors: Tensor,
    settings: DrawSettings,
    buffers: MarkovBuffers,
    draft_to_target: Tensor | None,
    hidden: Tensor | None,
    confidence: tuple[Tensor, Tensor | None] | None,
    fill: Callable[[int, Tensor], None] | None = None,
) -> None:
    """See ``markov_block``."""
    requests, width, _ = base.shape
    numbers = uniforms_reference(settings, width, DRAFT)
    owner = torch.arange(requests, device=base.device)
    is_greedy = settings.temperature < GREEDY_BELOW
    previous = anchors
    for k in range(width):
        if fill is not None:
            fill(k, previous)
        if w1 is not None and w2 is not None:
            base[:, k] += w1[previous].float() @ w2.float().T
        rows = owner * width + k
        laws_reference(base[:, k], owner, settings, buffers.laws, rows)
        law = _rows(buffers.laws, rows).probabilities()
        drawn = torch.where(is_greedy, buffers.laws.last_tie[rows].long(), draw_reference(law, numbers[:, k]))
        drawn = torch.where(buffers.laws.peak[rows].isnan(), 0, drawn)
        if hidden is not None and confidence is not None:
            buffers.confidence[:, k] = _judge(hidden[:, k].float(), w1, previous, *confidence)
        buffers.index[:, k] = drawn
        previous = drawn if draft_to_target is None else draft_to_target[drawn]
        buffers.tokens[:, k] = previous


def _rows(laws: Laws, rows: Tensor) -> Laws:
    numbers = (laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie)
    return Laws(laws.logits[rows], *(values[rows] for values in numbers))


def _judge(hidden: Tensor, w1: Tensor | None, previous: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    size = hidden.shape[1]
    logit = hidden @ weight[:size]
    if weight.shape[0] > size:
        assert w1 is not None
        logit = logit + w1[previous].float() @ weight[size:]
    return logit if bias is None else logit + bias
