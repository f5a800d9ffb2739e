"""A loaded target and drafter with their caches: what the decode step works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.outlook import Outlook
from sparkchat.engine.refinement import Refinement
from sparkchat.engine.step_totals import StepTotals
from sparkchat.params import Correction, CostTable
from sparkchat.simulation import SimulatedAcceptance

if TYPE_CHECKING:
    from sparkchat.engine.ranks import Team
    from sparkchat.models.base import KVCache, TargetModel
    from sparkchat.models.dspark.drafter import Drafter


@dataclass
class LoadedPair:
    """Device state of the engine. One owner: the engine's own thread."""

    target: TargetModel
    cache: KVCache
    device: torch.device
    drafter: Drafter | None = None
    draft_cache: KVCache | None = None
    draft_index_of: torch.Tensor | None = None
    """[V] int64: index in the draft vocabulary of each target id, or -1. None without a reduced vocabulary."""
    reason_off: str | None = None
    """Why there is no drafter."""
    cost: CostLookup | None = None
    temperatures: tuple[float, ...] | None = None
    temperatures_source: str = "none"
    """profile | fitted | shipped | none"""
    calibration: dict[str, Correction] = field(default_factory=dict)
    """By kind of sampling, in the place of the temperatures."""
    refinement: Refinement | None = None
    """What finished steps correct; None unless asked for."""
    context: int = 0
    """Most tokens of one request, prompt and answer together."""
    cache_tokens: int | None = None
    """Tokens that all requests may have cached together; None where every request has a cache of its own."""
    kv_bytes_per_token: int = 0
    damaged_ids: frozenset[int] = frozenset()
    """Tokens whose embedding in the target is not of numbers."""

    outlook: Outlook = field(default_factory=Outlook)
    """Whether drafting pays for the requests that are planned together."""
    measure_steps: Callable[[Sequence[int]], CostTable] | None = None
    """Times captured steps of so many requests; None where the reference loop is timed."""
    is_lagged: bool = False
    """Verify lengths are planned from confidences two steps old (lagged_plan.py), as captured steps need it."""
    simulated: SimulatedAcceptance | None = None
    """Drafts pass by these chances, not by the models' laws: for timing alone."""
    totals: StepTotals | None = None
    """Of the step under way, where whole steps are told."""

    team: Team | None = None
    """The other ranks, where several devices share the model."""

    @property
    def num_devices(self) -> int:
        return 1 if self.team is None else self.team.size

    @property
    def block_size(self) -> int:
        return 0 if self.drafter is None else self.drafter.config.block_size

    @property
    def plain_ms(self) -> float | None:
        """A plain step of one request; None when not measured."""
        return None if self.cost is None else self.cost.plain_ms

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else tuple(self.drafter.config.target_layer_ids)


def draft_index_table(draft_to_target: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """Invert ``draft_to_target`` [Vd] into a table over the target vocabulary; -1 marks ids it lacks."""
    if draft_to_target is None:
        return None
    table = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_to_target.device)
    table[draft_to_target] = torch.arange(draft_to_target.numel(), device=draft_to_target.device)
    return table
