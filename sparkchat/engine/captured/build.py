"""Which pairs and requests captured steps serve, and how the parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.fused_step import FusedStep, can_fuse
from sparkchat.engine.captured.graphs import Stages
from sparkchat.engine.captured.head_step import HeadStep
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.shared import SharedStages, own_part, own_stages
from sparkchat.engine.captured.state import Block, Records, Room, Seats, StepInputs
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.kernels.cards import card_of
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.packed import has_kernels
from sparkchat.models.paged_cache import PagedCache
from sparkchat.models.parallel import ALONE

if TYPE_CHECKING:
    from sparkchat.kernels.launch import Overlap

BLOCKS_BEHIND = 3
"""Blocks of room behind the context: a block may be drafted over its end while the step before is still in flight."""
SPARE_ROWS = 1
"""Cache rows for rows that belong to nobody."""


def reason_against(pair: LoadedPair) -> str | None:
    """Why captured steps cannot serve a pair; None when they can."""
    pair = own_part(pair)
    if not hasattr(pair.target, "decode_rows"):
        return f"{pair.target.config.architecture} has no captured step"
    if pair.drafter is not None and not hasattr(pair.drafter, "draft_rows"):
        return "its drafter has no captured step"
    if pair.damaged_ids:
        return "some embeddings are damaged, which only the reference path handles"
    return None


def request_reason(state: RequestState) -> str | None:
    """Why a request takes the reference path; None when captured steps serve it."""
    sampling = state.sampling
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        return "penalties take the reference path"
    if sampling.logit_bias:
        return "logit_bias takes the reference path"
    if sampling.min_tokens > len(state.delivered) and not sampling.ignore_eos:
        return "min_tokens takes the reference path"
    if state.draft_temperature != "target":
        return "an adaptive draft temperature takes the reference path"
    if state.request.logprobs is not None:
        return "logprobs take the reference path"
    return None


def build_decoder(
    pair: LoadedPair,
    seats: int,
    block: int,
    stages: Stages | None = None,
    is_fused: bool | None = None,
    overlaps: Overlap | None = None,
) -> CapturedDecoder:
    """A decoder for up to ``seats`` requests; takes all the storage of the pair's caches for good.

    ``stages`` None captures on a GPU and runs eagerly elsewhere. ``is_fused`` None takes the kernels of
    ``sparkchat.kernels`` on a GPU that runs them (kernels/cards.py) where they compute all that the pair needs, True
    insists, False takes torch's own.
    ``overlaps``: which captured kernels may start while the one before them ends (kernels/launch.py); None takes what
    was measured to be best for the model.
    """
    overlaps = overlaps or _best_overlap(own_part(pair))
    shape = StepShape(
        seats=seats,
        block=block,
        spare_row=_spare(pair.cache),
        spare_draft_row=0 if pair.draft_cache is None else _spare(pair.draft_cache),
        temperatures=(pair.temperatures or (1.0,) * block)[:block],
        exponents=None if pair.simulated is None else tuple(pair.simulated.exponents[:block]),
        is_fused=pair.device.type == "cuda" and card_of(pair.device).runs_kernels if is_fused is None else is_fused,
        insists=is_fused is True,
        fuses_layers=_takes_layers(own_part(pair)),
    )
    if pair.team is not None:
        caches: tuple[Any, Any] = (pair.cache, pair.draft_cache)
        numbers = [None if cache is None else cache.number for cache in caches]
        pair.team.call("open_steps", caches=numbers, shape=asdict(shape), overlaps=overlaps and overlaps.value)
    stages = stages or own_stages(pair.device, overlaps)
    if pair.team is not None:
        stages = SharedStages(stages, pair.team)
    return CapturedDecoder(pair, seats, open_step(own_part(pair), shape), stages)


@dataclass(frozen=True)
class StepShape:
    """What a captured step is made for, the same on every rank."""

    seats: int
    block: int
    spare_row: int
    spare_draft_row: int
    temperatures: Sequence[float]
    exponents: Sequence[float] | None
    is_fused: bool
    """Take the kernels of ``sparkchat.kernels`` where they compute all that the pair needs."""
    insists: bool = False
    """Take them in any case."""
    fuses_layers: bool = False
    """DeepSeek V4's layers run by them as well."""


@torch.inference_mode()
def open_step(pair: LoadedPair, shape: StepShape) -> CapturedStep:
    """The stages over what one rank holds, whose caches are filled."""
    device, seats, block = pair.device, shape.seats, shape.block
    end = pair.cache.context
    if pair.draft_cache is not None:
        end = max(end, pair.draft_cache.context)
        pair.drafter.prepare(end)
    pair.target.prepare(end)
    draft_vocab = 1 if pair.drafter is None else pair.drafter.config.draft_vocab_size

    def numbers(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    room = Room(seats, block, device)
    step = _kind_of(pair, shape)(
        pair=pair,
        seats=Seats.empty(seats, device, room),
        inputs=StepInputs(seats, block, device, room),
        block=Block.empty(seats, block, draft_vocab, device, room),
        records=Records(seats, block, device),
        spare_row=shape.spare_row,
        spare_draft_row=shape.spare_draft_row,
        temperatures=numbers(shape.temperatures),
        exponents=None if shape.exponents is None else numbers(shape.exponents),
    )
    group = getattr(pair.target, "group", ALONE)
    if group.size > 1:
        step.agree = partial(group.follow_first, room.used)
    return step


def _kind_of(pair: LoadedPair, shape: StepShape) -> type[CapturedStep]:
    """The step's class; models whose layers run by the kernels are told so."""
    if not shape.is_fused:
        return CapturedStep
    if isinstance(pair.target, DeepseekV4):
        if shape.fuses_layers:
            _fuse_layers(pair, shape)
        return HeadStep
    if not shape.insists and not can_fuse(pair):
        return CapturedStep
    pair.target.fuse(pair.cache, row_tiers(shape.block, shape.seats)[-1], shape.block + 1)
    if pair.drafter is not None:
        pair.drafter.fuse(pair.draft_cache, shape.block * shape.seats, shape.block)
    return FusedStep


def _takes_layers(pair: LoadedPair) -> bool:
    """Whether the kernels take the numbers of DeepSeek V4's layers."""
    target: Any = pair.target
    return isinstance(target, DeepseekV4) and has_kernels(target.device, target.kv_dtype)


def _best_overlap(pair: LoadedPair) -> Overlap | None:
    """Small kernels start early in dense models: `off` 4.42 -> 4.23 ms, a round 5.67 -> 5.48 ms on an H200
    (benchmarks/results/2026-11-30-gpu-decode.md). In DeepSeek V4, where products would call weights ahead by it, it is
    a loss (7.81 -> 8.26 ms a round on two); what starts behind products alone is none: one rank of two takes 4.33 ->
    4.17 and 6.96 -> 6.77 ms (2026-11-30-v4-two-gpus.md)."""
    if pair.device.type != "cuda":
        return None
    from sparkchat.kernels.launch import Overlap

    return Overlap.BEHIND if isinstance(pair.target, DeepseekV4) else Overlap.SMALL


def _fuse_layers(pair: LoadedPair, shape: StepShape) -> None:
    target: Any = pair.target
    target.fuse(pair.cache, row_tiers(shape.block, shape.seats)[-1], shape.block + 1)
    if pair.drafter is not None:
        pair.drafter.fuse(pair.draft_cache, shape.block * shape.seats, shape.block)


def _spare(cache: Any) -> int:
    """Take all of a cache's storage, and a row of it that is nobody's."""
    cache.fill()
    return cache.allocate_spare() if isinstance(cache, PagedCache) else cache.allocate()


def warm_up(decoder: CapturedDecoder, window: int, progress: Callable[[dict[str, Any]], None]) -> None:
    """Capture what a first request replays, and say how far it is; the rest is captured when it is first needed."""

    def say(done: int, total: int) -> None:
        what = {"event": "loading", "stage": "graphs", "message": "capturing CUDA graphs"}
        progress({**what, "done": done, "total": total})

    decoder.warm((Draws.GREEDY, Draws.SAMPLED), window, say)
