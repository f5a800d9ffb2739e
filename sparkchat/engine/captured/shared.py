"""Captured steps of a pair that ranks share: all replay the same stages, in the order in which rank 0 says so.

Rank 0's host alone knows requests and decides; what it decides lies on its device (``Seats``, ``StepInputs``) and goes
from there to the other devices as the first thing of each stage (``CapturedStep.agree``), a few kilobytes. So the other
hosts are told one number a stage, which graph to replay, on the pipe that all else is told on as well: that keeps the
order, and a line of 30 bytes is read long before the device has come to what it is about, because a step is launched
while the one before runs.

The others draw and accept as rank 0 does, and nothing comes of it: what they made is written over when the next stage
begins. A number that came out otherwise on another device can therefore not part the ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sparkchat.engine.captured.graphs import EagerStages, GraphStages, Stage, Stages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.pair import LoadedPair
from sparkchat.kernels.cards import card_of

if TYPE_CHECKING:
    from sparkchat.engine.ranks import Team
    from sparkchat.kernels.launch import Overlap
    from sparkchat.kernels.plans import LaunchPlans

Command = dict[str, Any]


def own_part(pair: LoadedPair) -> LoadedPair:
    """The pair with what this rank itself holds of it; calls of that are told to nobody."""
    if pair.team is None:
        return pair
    parts: Any = pair
    return replace(
        pair,
        target=parts.target.inner,
        cache=parts.cache.inner,
        drafter=None if pair.drafter is None else parts.drafter.inner,
        draft_cache=None if pair.draft_cache is None else parts.draft_cache.inner,
    )


def own_stages(device: torch.device, overlaps: Overlap | str | None = None) -> Stages:
    """Captured on a GPU, run as they are elsewhere. ``overlaps``: as of ``GraphStages``, or what it is called;
    none on cards that cannot start a kernel early."""
    if device.type != "cuda":
        return EagerStages()
    from sparkchat.kernels.launch import Overlap

    return GraphStages(device, Overlap(overlaps or "none") if card_of(device).starts_early else Overlap.NONE)


class SharedStages:
    """Stages of rank 0, each told to the other ranks and then run here."""

    def __init__(self, inner: Stages, team: Team) -> None:
        self._inner, self._team = inner, team
        self.name = inner.name
        self._numbers: dict[Hashable, int] = {}

    @property
    def num_graphs(self) -> int:
        return self._inner.num_graphs

    @property
    def seconds(self) -> float:
        return self._inner.seconds

    def is_ready(self, key: Hashable) -> bool:
        return key in self._numbers and self._inner.is_ready(key)

    def prepare(self, key: Hashable, stage: Stage) -> None:
        number = self._numbers.setdefault(key, len(self._numbers))
        assert isinstance(key, tuple)
        plain = [part.value if isinstance(part, Draws) else part for part in key]
        self._team.call("prepare_stage", number=number, stage=plain)
        with self._team.partners():
            self._inner.prepare(key, stage)

    def run(self, key: Hashable, stage: Stage) -> None:
        self._team.call("run_stage", number=self._numbers[key])
        with self._team.partners():
            self._inner.run(key, stage)

    def close(self) -> None:
        self._inner.close()
        self._numbers.clear()

    def renew(self, plans: LaunchPlans) -> None:
        self._team.call("renew_stages", plans=asdict(plans))
        self._numbers.clear()
        with self._team.partners():
            self._inner.renew(plans)


class FollowedSteps:
    """The same steps on another rank, as rank 0 says; see the module."""

    def __init__(self, step: CapturedStep, stages: Stages) -> None:
        self._step, self._stages = step, stages
        self._known: dict[int, tuple[Hashable, Stage]] = {}

    def prepare(self, number: int, stage: Sequence[Any]) -> None:
        """``stage``: its key as ``SharedStages`` tells it."""
        kind, count, draws, *rest = stage
        run = {"draft": self._step.draft, "verify": self._step.verify}[kind]
        self._known[number] = (number, partial(run, count, Draws(draws), *rest))
        self._stages.prepare(*self._known[number])

    def run(self, number: int) -> None:
        self._stages.run(*self._known[number])

    def close(self) -> None:
        self._stages.close()

    def renew(self, plans: dict[str, Any]) -> None:
        """``plans``: the fields of ``LaunchPlans``."""
        from sparkchat.kernels.plans import LaunchPlans

        self._known.clear()
        self._stages.renew(LaunchPlans(**plans))
