"""The temperature drafts are drawn at.

Any will do: the acceptance test and the residual use the very law that was drawn from. ``adaptive`` draws closer to the
drafter's favourite where it is sure, and wider where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.engine.request import RequestState

SPREAD = 0.2
"""A drafter that is certain drafts at so much less than the request's temperature, one that knows nothing at so much
more."""


def adapted(temperature: float, peak: float) -> float:
    """``peak``: the largest probability of the draft law at the request's own temperature."""
    return temperature * (1.0 + SPREAD * (1.0 - 2.0 * peak))


def draft_temperatures(logits: Tensor, states: Sequence[RequestState]) -> list[float]:
    """Of every row of logits [R, Vd], penalties applied."""
    found = [state.sampling.temperature for state in states]
    rows = [r for r, state in enumerate(states) if state.draft_temperature == "adaptive" and not state.is_greedy]
    if rows:
        scales = torch.tensor([found[r] for r in rows], device=logits.device)
        peaks = torch.softmax(logits[rows] / scales[:, None], dim=-1).amax(dim=-1).tolist()
        for r, peak in zip(rows, peaks, strict=True):
            found[r] = adapted(found[r], peak)
    return found
