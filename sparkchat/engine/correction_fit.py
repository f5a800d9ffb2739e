"""The fit of a temperature and a shift per draft position, for one kind of sampling.

A temperature alone (``calibration.fit_temperatures``, the paper's) turns confidences about one half. A drafter that was
trained over many settings is off by a shift in each of them, which no temperature mends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.engine.calibration import GRID, brier, corrected_survival
from sparkchat.params import Correction

_RIDGE = 4.0
"""Pull of each position towards temperature 1 and shift 0, in blocks of information p (1 - p) = 1."""
_STEPS = 50
_MOST_SHIFT = 4.0


def fit_correction(logits: Tensor, accepted_len: Tensor, drafted_len: Tensor) -> Correction:
    """Logistic regression of draft k's acceptance on its confidence, over the blocks that reached it, k = 1..g.

    ``logits [N, g]``, ``accepted_len [N]`` leading drafts accepted, ``drafted_len [N]`` drafts that counted. Their
    product is the likeliest law of accepted lengths. A position that no block reached goes with the one before it.
    """
    temperatures: list[float] = []
    shifts: list[float] = []
    for k in range(logits.shape[1]):
        reached = (drafted_len > k) & (accepted_len >= k)
        if bool(reached.any()) or not temperatures:
            slope, shift = _regression(logits[reached, k].double(), (accepted_len[reached] > k).double())
            temperatures.append(1.0 / slope)
            shifts.append(shift)
        else:
            temperatures.append(temperatures[-1])
            shifts.append(shifts[-1])
    return Correction(tuple(temperatures), tuple(shifts))


def _regression(z: Tensor, labels: Tensor) -> tuple[float, float]:
    """(slope, shift) by Newton's method, [N] confidences and [N] zeros and ones; within what temperatures may be."""
    z, most, least = z.clamp(-30.0, 30.0), 1.0 / GRID[0], 1.0 / GRID[-1]
    inputs = torch.stack([z, torch.ones_like(z)])
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = prior.clone()
    for _ in range(_STEPS):
        chance = torch.sigmoid(found @ inputs)
        gradient = inputs @ (chance - labels) + _RIDGE * (found - prior)
        curvature = (inputs * (chance * (1.0 - chance))) @ inputs.T + _RIDGE * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curvature, gradient)
        found = found - step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    return float(found[0].clamp(least, most)), float(found[1].clamp(-_MOST_SHIFT, _MOST_SHIFT))


def better_correction(
    logits: Tensor, accepted_len: Tensor, drafted_len: Tensor, plain: Correction, folds: Tensor
) -> Correction:
    """The fit with shifts, or ``plain`` where blocks that were not fitted to say that shifts do not help.

    ``folds [N]`` bool cuts the blocks in two: each part judges what was fitted to the other, by Brier score.
    """
    with_shifts = fit_correction(logits, accepted_len, drafted_len)
    if not bool(folds.any()) or bool(folds.all()):
        return with_shifts
    scores = [0.0, 0.0]
    for part in (folds, ~folds):
        other = fit_correction(logits[~part], accepted_len[~part], drafted_len[~part])
        for place, correction in enumerate((other, plain)):
            scores[place] += score(logits[part], accepted_len[part], drafted_len[part], correction)
    return with_shifts if scores[0] < scores[1] else plain


def score(logits: Tensor, accepted_len: Tensor, drafted_len: Tensor, correction: Correction) -> float:
    """Sum over positions of the Brier score times the blocks that count there."""
    alive, total = corrected_survival(logits, [correction] * len(logits)), 0.0
    for k in range(logits.shape[1]):
        counts = drafted_len > k
        if bool(counts.any()):
            total += brier(alive[counts, k], accepted_len[counts] > k) * int(counts.sum())
    return total
