"""Which pairs and requests captured steps serve, and how the parts are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.fused_step import FusedStep, can_fuse
from sparkchat.engine.captured.graphs import EagerStages, GraphStages, Stages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.state import Block, Records, Seats, StepInputs
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState

if TYPE_CHECKING:
    from sparkchat.kernels.launch import Overlap

BLOCKS_BEHIND = 3
"""Blocks of room behind the context: a block may be drafted over its end while the step before is still in flight."""
SPARE_ROWS = 1
"""Cache rows for rows that belong to nobody."""


def reason_against(pair: LoadedPair) -> str | None:
    """Why captured steps cannot serve a pair; None when they can."""
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
    overlaps: Overlap | bool = False,
) -> CapturedDecoder:
    """A decoder for up to ``seats`` requests; takes all the storage of the pair's caches for good.

    ``stages`` None captures on a GPU and runs eagerly elsewhere. ``is_fused`` None takes the kernels of
    ``sparkchat.kernels`` on a GPU where they compute all that the pair needs, True insists, False takes torch's own.
    ``overlaps``: which captured kernels may start while the one before them ends (kernels/launch.py).
    """
    device = pair.device
    pair.cache.fill()
    end = pair.cache.context
    if pair.draft_cache is not None:
        pair.draft_cache.fill()
        end = max(end, pair.draft_cache.context)
        pair.drafter.prepare(end)
    pair.target.prepare(end)
    if is_fused is None:
        is_fused = device.type == "cuda" and can_fuse(pair)
    if is_fused:
        pair.target.fuse(pair.cache, row_tiers(block, seats)[-1], block + 1)
        if pair.drafter is not None:
            pair.drafter.fuse(pair.draft_cache, block * seats, block)
    draft_vocab = 1 if pair.drafter is None else pair.drafter.config.draft_vocab_size
    temperatures = pair.temperatures or (1.0,) * block
    chances = None if pair.simulated is None else pair.simulated.conditional[:block]

    def numbers(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    with torch.inference_mode():
        step = (FusedStep if is_fused else CapturedStep)(
            pair=pair,
            seats=Seats.empty(seats, device),
            inputs=StepInputs(seats, block, device),
            block=Block.empty(seats, block, draft_vocab, device),
            records=Records(seats, block, device),
            spare_row=pair.cache.allocate(),
            spare_draft_row=0 if pair.draft_cache is None else pair.draft_cache.allocate(),
            temperatures=numbers(temperatures[:block]),
            chances=None if chances is None else numbers(chances),
        )
        if stages is None:
            stages = GraphStages(device, overlaps) if device.type == "cuda" else EagerStages()
        return CapturedDecoder(pair, seats, step, stages)


def warm_up(decoder: CapturedDecoder, window: int, progress: Callable[[dict[str, Any]], None]) -> None:
    """Capture what a first request replays, and say how far it is; the rest is captured when it is first needed."""

    def say(done: int, total: int) -> None:
        what = {"event": "loading", "stage": "graphs", "message": "capturing CUDA graphs"}
        progress({**what, "done": done, "total": total})

    decoder.warm((Draws.GREEDY, Draws.SAMPLED), window, say)
