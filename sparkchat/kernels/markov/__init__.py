"""The sequential head of a block: each draft is drawn with the bias of the token before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.markov.reference import markov_block_reference
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.sampling import DrawSettings, Laws, LawScratch


@dataclass(frozen=True)
class MarkovBuffers:
    """What a block leaves, for R requests of g drafts."""

    tokens: Tensor
    """[R, g] int64 target ids"""
    index: Tensor
    """[R, g] int64 draft ids"""
    laws: Laws
    """R * g rows; its logits are the block's, bias included"""
    confidence: Tensor
    """[R, g] float32 raw logits"""
    scratch: LawScratch

    @classmethod
    def empty(cls, base: Tensor, has_filters: bool = False) -> MarkovBuffers:
        """Static buffers for the block whose base logits [R, g, Vd] float32 are ``base``; see ``AcceptBuffers``."""
        requests, width, vocab = base.shape
        ids = torch.zeros((2, requests, width), dtype=torch.int64, device=base.device)
        confidence = torch.zeros((requests, width), dtype=torch.float32, device=base.device)
        scratch = LawScratch.empty(requests, vocab, base.device, has_filters)
        return cls(ids[0], ids[1], Laws.empty(base.view(requests * width, vocab)), confidence, scratch)


def markov_block(
    base: Tensor,
    w1: Tensor | None,
    w2: Tensor | RoundedRows | None,
    anchors: Tensor,
    settings: DrawSettings,
    buffers: MarkovBuffers,
    *,
    draft_to_target: Tensor | None = None,
    hidden: Tensor | None = None,
    confidence: tuple[Tensor, Tensor | None] | None = None,
    fill: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Draw the g drafts of every request, left to right, and judge them.

    base [R, g, Vd] float32, in place: the bias W2 W1[token before] is added. w1 [V, r], w2 [Vd, r], which may be in 8
    bits; both None without a sequential head. anchors [R] int64: the token before the first draft. draft_to_target [Vd]
    int64. With hidden [R, g, d] and ``confidence`` (weight [d] or [d + r] float32, bias [1] or None) the raw confidence
    logits. Every draft is drawn from the law of ``settings``; peak is NaN in ``buffers.laws`` where logits are no
    numbers.
    ``fill``(k, the tokens before draft k) writes base[:, k] when it is needed, for a drafter that knows no sooner.
    """
    if not base.is_cuda:
        markov_block_reference(base, w1, w2, anchors, settings, buffers, draft_to_target, hidden, confidence, fill)
        return
    from sparkchat.kernels.markov.kernel import launch_markov_block

    launch_markov_block(base, w1, w2, anchors, settings, buffers, draft_to_target, hidden, confidence, fill)
