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
_SLACK = 1e-6
_FIRST_TAIL = 1e-4
_FIRST_SORT = 1024


def filter_rows(
    law: Tensor,
    logits: Tensor,
    rows: Sequence[int],
    top_k: Sequence[float],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> None:
    """Filter and renormalise ``rows`` of ``law [n, V]`` in place; ``logits [n, V]`` rank the tokens for top-k."""
    if law.device.type != "cpu":
        filter_batched(law, logits, rows, top_k, top_p, min_p)
        return
    laws, ranks = law.numpy(), logits.detach().numpy()
    for i in rows:
        _filter_row(laws[i], ranks[i], int(top_k[i]), top_p[i], min_p[i])


def _filter_row(law: np.ndarray, logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    ids, values = _largest(law, logits, top_k, top_p)
    if top_p < 1.0:
        kept = _nucleus(values, top_p, total=values.sum(dtype=np.float64) if 0 < top_k < len(law) else 1.0)
        ids, values = ids[kept], values[kept]
    if min_p > 0.0:
        kept = values >= np.float32(min_p * (1.0 - _SLACK)) * values.max()
        ids, values = ids[kept], values[kept]
    law[:] = 0.0
    law[ids] = values / values.sum(dtype=np.float64)


def _largest(law: np.ndarray, logits: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids (ascending) and probabilities that top-k leaves, less a tail that top-p is certain to drop."""
    if 0 < top_k < len(law):
        least = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        ids = np.flatnonzero(logits >= least)
        return ids, law[ids]
    for tail in (_FIRST_TAIL, 0.0) if top_p < 1.0 else (0.0,):
        ids = np.flatnonzero(law > tail)
        values = law[ids]
        if tail == 0.0 or values.sum(dtype=np.float64) >= top_p:
            break
    return ids, values


def _nucleus(values: np.ndarray, top_p: float, total: float) -> np.ndarray:
    """Mask of the smallest set with ``top_p`` of ``total``; ``values`` are in id order, so the first ties win."""
    descending = np.sort(values)[::-1]
    reached = np.cumsum(descending, dtype=np.float64) >= (top_p - _SLACK) * total
    size = int(reached.argmax()) + 1 if reached[-1] else len(values)
    least = descending[size - 1]
    kept = values > least
    kept[np.flatnonzero(values == least)[: size - int(kept.sum())]] = True
    return kept


def filter_batched(
    law: Tensor,
    logits: Tensor,
    rows: Sequence[int],
    top_k: Sequence[float],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> None:
    """``filter_rows`` on any device, all rows at once."""
    vocab = law.shape[1]
    picked = torch.tensor(list(rows), device=law.device)
    p = law[picked]
    ks = [int(top_k[i]) if 0 < top_k[i] < vocab else vocab for i in rows]
    if min(ks) < vocab:
        p.masked_fill_(logits[picked] < _kth_largest(logits[picked], ks), 0.0)
        p /= p.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    ps = torch.tensor([top_p[i] for i in rows], dtype=torch.float64, device=law.device)[:, None]
    if min(top_p[i] for i in rows) < 1.0:
        p = p.where(_nucleus_batched(p, ps) | (ps >= 1.0), 0.0)
    floors = torch.tensor([min_p[i] * (1.0 - _SLACK) for i in rows], dtype=torch.float32, device=law.device)[:, None]
    p.masked_fill_(p < floors * p.amax(dim=-1, keepdim=True), 0.0)
    law[picked] = (p.double() / p.sum(dim=-1, keepdim=True, dtype=torch.float64)).float()


def _kth_largest(logits: Tensor, ks: Sequence[int]) -> Tensor:
    """``[n, 1]``: the k-th largest logit of each row; -inf for rows that keep the whole vocabulary."""
    vocab = logits.shape[1]
    top = logits.topk(max(k for k in ks if k < vocab), dim=-1).values
    places = torch.tensor([[k - 1 if k < vocab else 0] for k in ks], device=logits.device)
    unlimited = torch.tensor([[k == vocab] for k in ks], device=logits.device)
    return top.gather(1, places).masked_fill(unlimited, -torch.inf)


def _nucleus_batched(p: Tensor, top_p: Tensor) -> Tensor:
    """Mask ``[n, V]`` of the smallest set whose mass reaches ``top_p [n, 1]``, lowest ids first among equals."""
    need = top_p - _SLACK
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
