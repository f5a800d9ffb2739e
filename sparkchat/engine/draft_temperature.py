"""The temperature drafts are drawn at.

Any will do: the acceptance test and the residual use the very law that was drawn from. ``adaptive`` draws closer to the
drafter's favourite where it is sure, and wider where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.engine.request import RequestState

WIDEST, SHARPENING = 1.05, 0.25
"""Of the request's temperature: where the drafter knows nothing, and how much less where it is certain. Chosen on
held-out chats of the embedded model (benchmarks/results/2026-11-30-draft-temperature.md)."""


def adapted(temperature: float, peak: float) -> float:
    """``peak``: the largest probability of the draft law at the request's own temperature."""
    return temperature * (WIDEST - SHARPENING * peak)


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
