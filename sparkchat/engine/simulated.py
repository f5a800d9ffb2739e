"""Puts simulated chances in the place of what a drafter is confident of, and of what the laws would accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.engine import rng
from sparkchat.engine.request import RequestState
from sparkchat.simulation import SimulatedAcceptance

if TYPE_CHECKING:
    from sparkchat.engine.drafting import Draft


def chances(simulated: SimulatedAcceptance, uniforms: Tensor) -> Tensor:
    """uniforms [R, g] in [0, 1) -> each draft's own chance to pass [R, g], of the profile's mean at every position."""
    exponents = torch.tensor(simulated.exponents[: uniforms.shape[1]], dtype=uniforms.dtype, device=uniforms.device)
    return spread_chances(exponents, uniforms)


def spread_chances(exponents: Tensor, uniforms: Tensor) -> Tensor:
    """exponents [g] of a profile, uniforms [R, g] -> [R, g]"""
    return (uniforms * (2.0 - uniforms)) ** exponents


def simulate(simulated: SimulatedAcceptance, draft: Draft, states: Sequence[RequestState]) -> Draft:
    """The draft with simulated chances; its confidences are those chances, hence calibrated."""
    width = draft.proposal.ids.shape[1]
    drawn = rng.uniforms([s.seed for s in states], [s.round for s in states], 0, width, rng.SIMULATE)
    chance = chances(simulated, drawn)
    return replace(
        draft,
        proposal=replace(draft.proposal, confidence_logit=torch.logit(chance).float(), chance=chance),
    )
