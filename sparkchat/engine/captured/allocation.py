"""Verify lengths on the device: the budget was settled before this step, who gets it by this step's confidences.

Lossless: the budget comes from the past alone, and whether draft k of a request is admitted depends on its own
confidences up to k and on other requests (paper, appendix A; engine/lagged_plan.py chooses the budget).
"""

from __future__ import annotations

import torch
from torch import Tensor


def survival_of(confidence: Tensor, temperatures: Tensor) -> Tensor:
    """Confidence logits [R, g] and temperatures [g] -> survivals [R, g] float64; what is no number survives nothing."""
    logits = confidence.double()
    logits = logits.masked_fill(logits.isnan(), -torch.inf) / temperatures
    return torch.sigmoid(logits).cumprod(dim=1)


def allocate(survival: Tensor, limits: Tensor, is_sharing: Tensor, budget: Tensor) -> Tensor:
    """The ``budget`` [1] likeliest drafts of the sharing requests -> how many of each [R] int64.

    survival [R, g] never grows along g, so what is admitted of a request is always its first drafts; of equals the
    earlier position comes first, then the lower request. limits [R]: most drafts of a request.
    """
    count, width = survival.shape
    place = torch.arange(width, device=survival.device)
    is_open = (place < limits[:, None]) & is_sharing[:, None]
    # Position-major, so that a stable sort breaks ties by position, then request.
    scores = torch.where(is_open, survival, -1.0).T.flatten()
    order = scores.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(count * width, device=order.device))
    admitted = (rank < budget).view(width, count).T & is_open
    return admitted.sum(dim=1)
