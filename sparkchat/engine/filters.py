"""Top-k, top-p and min-p on rows of a law. ``sampling.probabilities`` states the rules; this file makes them fast.

Two implementations of one definition: numpy row by row on the CPU, where a vocabulary-wide comparison or sort in
torch costs ten times as much, and batched torch elsewhere. Thresholds are values, never ranks, so that the outcome
does not depend on how a sort orders equal values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# fp32 probabilities carry errors near 1e-7; a set that reaches its bound but for rounding counts as reaching it.
SLACK = 1e-6
_TAILS = (1e-4, 1e-5, 1e-6, 0.0)
_FIRST_SORT = 1024


@np.errstate(over="ignore")  # a bias of infinity lies further from the others than a cold temperature can divide
def top_k_law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, law: np.ndarray) -> None:
    """Write the law of one row ``[V]`` into ``law``, which holds zeros: all work after top-k is on what it leaves."""
    least = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
    ids = np.flatnonzero(logits >= least)
    values = logits[ids]
    values = np.exp((values - values.max()) / np.float32(temperature))
    values /= values.sum(dtype=np.float64)
    _write(law, *_shrink(ids, values, top_p, min_p))


def filter_law(law: np.ndarray, top_p: float, min_p: float) -> None:
    """Apply top-p, then min-p, to one row ``[V]`` in place; it is renormalised."""
    ids, values = _candidates(law, top_p, min_p)
    law[:] = 0.0
    _write(law, *_shrink(ids, values, top_p, min_p))


def _candidates(law: np.ndarray, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids (ascending) and probabilities of the row less a tail that the filters are certain to drop."""
    if min_p > 0.0:
        # If the tokens above min-p's floor do not reach top_p, all of them are in top-p's set.
        ids = np.flatnonzero(law >= _floor(min_p) * law.max())
        return ids, law[ids]
    for tail in _TAILS:
        ids = np.flatnonzero(law > tail)
        values = law[ids]
        # A top_p of 0 is reached by nothing at all, and still leaves the likeliest token.
        if len(ids) and values.sum(dtype=np.float64) >= top_p:
            break
    return ids, values


def _shrink(ids: np.ndarray, values: np.ndarray, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    if top_p < 1.0:
        kept = _nucleus(values, top_p)
        ids, values = ids[kept], values[kept]
    if min_p > 0.0:
        kept = values >= _floor(min_p) * values.max()
        ids, values = ids[kept], values[kept]
    return ids, values


def _floor(min_p: float) -> np.float32:
    return np.float32(min_p * (1.0 - SLACK))


def _write(law: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    law[ids] = values / values.sum(dtype=np.float64)


def _nucleus(values: np.ndarray, top_p: float) -> np.ndarray:
    """Mask of the smallest set with mass ``top_p``; ``values`` are in id order, so the first of equals win."""
    descending = np.sort(values)[::-1]
    reached = np.cumsum(descending, dtype=np.float64) >= top_p - SLACK
    size = int(reached.argmax()) + 1 if reached[-1] else len(values)
    least = descending[size - 1]
    kept = values > least
    kept[np.flatnonzero(values == least)[: size - int(kept.sum())]] = True
    return kept


def filter_batched(
    laws: Tensor,
    logits: Tensor,
    rows: Sequence[int],
    top_k: Sequence[float],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> None:
    """Filter and renormalise ``rows`` of ``laws [n, V]`` in place, on any device; settings are per listed row.

    ``logits [n, V]`` rank the tokens for top-k.
    """
    vocab = laws.shape[1]
    picked = torch.tensor(list(rows), device=laws.device)
    p = laws[picked]
    ks = [int(k) if 0 < k < vocab else vocab for k in top_k]
    if min(ks) < vocab:
        p.masked_fill_(logits[picked] < _kth_largest(logits[picked], ks), 0.0)
        p /= p.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    if min(top_p) < 1.0:
        shares = torch.tensor(top_p, dtype=torch.float64, device=laws.device)[:, None]
        p = p.where(_nucleus_batched(p, shares) | (shares >= 1.0), 0.0)
    floors = torch.tensor([m * (1.0 - SLACK) for m in min_p], dtype=torch.float32, device=laws.device)[:, None]
    p.masked_fill_(p < floors * p.amax(dim=-1, keepdim=True), 0.0)
    laws[picked] = (p.double() / p.sum(dim=-1, keepdim=True, dtype=torch.float64)).float()


def _kth_largest(logits: Tensor, ks: Sequence[int]) -> Tensor:
    """``[n, 1]``: the k-th largest logit of each row; -inf for rows that keep the whole vocabulary."""
    vocab = logits.shape[1]
    top = logits.topk(max(k for k in ks if k < vocab), dim=-1).values
    places = torch.tensor([[k - 1 if k < vocab else 0] for k in ks], device=logits.device)
    unlimited = torch.tensor([[k == vocab] for k in ks], device=logits.device)
    return top.gather(1, places).masked_fill(unlimited, -torch.inf)


def _nucleus_batched(p: Tensor, top_p: Tensor) -> Tensor:
    """Mask ``[n, V]`` of the smallest set whose mass reaches ``top_p [n, 1]``, lowest ids first among equals."""
    need = top_p - SLACK
    for width in (min(_FIRST_SORT, p.shape[1]), p.shape[1]):
        descending = p.topk(width, dim=-1).values
        reached = descending.cumsum(dim=-1, dtype=torch.float64) >= need
        if width == p.shape[1] or bool((reached[:, -1] | (top_p >= 1.0)[:, 0]).all()):
            break
    place = torch.where(reached.any(dim=-1, keepdim=True), reached.int().argmax(dim=-1, keepdim=True), width - 1)
    least = descending.gather(1, place)
    above, equal = p > least, p == least
    room = place + 1 - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
