"""Laws of rows with settings of their own, by launches that fit any settings: what ``sampling.probabilities`` says."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from sparkchat.engine.filters import SLACK
from sparkchat.engine.sampling import GREEDY_BELOW


class Draws(Enum):
    """What the requests of a step need of a law; a captured step is made for one of these."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"


def row_laws(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, draws: Draws
) -> Tensor | None:
    """logits [n, V] float32 and settings [n] -> laws [n, V] float32; None when all are greedy.

    Rows of greedy requests hold a law at temperature 1, which nothing reads. A row that no filter applies to has the
    same bits with and without filtered rows beside it.
    """
    if draws is Draws.GREEDY:
        return None
    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    laws = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / scale, dim=-1)
    if draws is Draws.SAMPLED:
        return laws
    is_filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return torch.where(is_filtered[:, None], _filtered(laws, logits, top_k, top_p, min_p), laws)


def _filtered(laws: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Top-k with ties, then the smallest set that reaches top-p, then min-p; renormalised."""
    vocab = logits.shape[1]
    ordered, places = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    p = laws.masked_fill(logits < ordered.gather(1, k[:, None] - 1), 0.0)
    p = p / p.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    descending = p.gather(1, places)
    share = top_p.double()[:, None]
    reached = descending.cumsum(dim=-1, dtype=torch.float64) >= share - SLACK
    last = torch.where(reached.any(dim=-1, keepdim=True), reached.int().argmax(dim=-1, keepdim=True), vocab - 1)
    # Equal laws stand in the order of their ids, because the sort is stable: of equals the lowest ids are kept.
    is_in = torch.zeros_like(reached).scatter_(1, places, torch.arange(vocab, device=p.device) <= last)
    p = torch.where(is_in | (share >= 1.0), p, 0.0)
    floor = (min_p.double() * (1.0 - SLACK)).float()[:, None] * p.amax(dim=-1, keepdim=True)
    p = p.masked_fill(p < floor, 0.0)
    return (p.double() / p.sum(dim=-1, keepdim=True, dtype=torch.float64)).float()
