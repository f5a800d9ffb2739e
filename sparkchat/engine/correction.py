"""How the raw confidences of one request become chances, and what a finished step teaches about them.

Confidences are corrected by kind of sampling where something is known of that kind, else by the pair's temperatures,
else as those of the nearest kind are.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.refinement import JudgedBlock
from sparkchat.engine.request import RequestState
from sparkchat.params import Correction
from sparkchat.sampling_kind import nearest_kind


def fixed_correction(state: RequestState, pair: LoadedPair) -> Correction | None:
    """Without refinement; None leaves confidences as they are."""
    kind = state.kind
    if kind in pair.calibration:
        return pair.calibration[kind]
    if pair.temperatures is not None:
        return Correction(pair.temperatures, (0.0,) * len(pair.temperatures))
    near = nearest_kind(kind, tuple(pair.calibration))
    return None if near is None else pair.calibration[near]


def correction_of(state: RequestState, pair: LoadedPair) -> Correction | None:
    """What the coming step of a request is planned with. One whose seed was chosen knows nothing of other answers."""
    found = fixed_correction(state, pair)
    if pair.refinement is None or state.is_reproducible:
        return found
    return pair.refinement.confidences.corrected(state.kind, found or _nothing(pair.block_size))


def planning_costs(pair: LoadedPair, is_reproducible: bool) -> CostLookup | None:
    """The table that a request is planned with."""
    if pair.cost is None or pair.refinement is None or is_reproducible:
        return pair.cost
    return pair.refinement.costs_for(pair.cost).now


def learn(
    pair: LoadedPair,
    states: Sequence[RequestState],
    drafted: Sequence[int],
    verified: Sequence[int],
    logits: Sequence[Sequence[float]],
    accepted: Sequence[int],
    measured_ms: float | None,
) -> None:
    """Refine by a step that is over: drafts made, verified and accepted of each request, and how long it took.

    ``measured_ms`` None: nothing of costs, as for a step that did something else as well. Steps in which some requests
    draft and others do not are in no table.
    """
    if pair.refinement is None:
        return
    blocks = [
        JudgedBlock(
            state.kind,
            fixed_correction(state, pair) or _nothing(pair.block_size),
            raw,
            judged,
            passed,
        )
        for state, raw, judged, passed in zip(states, logits, verified, accepted, strict=True)
        # What ends an answer may have been cut.
        if raw and not state.is_finished
    ]
    is_plain = not any(drafted)
    if not is_plain and not all(drafted):
        measured_ms = None
    rows = None if is_plain else len(states) + sum(verified)
    context, is_filtered = sum(state.kv_len for state in states), any(state.is_filtered for state in states)
    pair.refinement.observe(blocks, pair.cost, len(states), rows, context, measured_ms, is_filtered=is_filtered)


def refined_record(state: RequestState, pair: LoadedPair, correction: Correction | None, requests: int) -> dict | None:
    """What the trace says about refinement in a step; None where it had no part."""
    if pair.refinement is None or state.is_reproducible or correction is None:
        return None
    before = fixed_correction(state, pair) or _nothing(pair.block_size)
    return {
        "shifts": [now - then for now, then in zip(correction.shifts, before.shifts, strict=True)],
        "cost_factor": None if pair.cost is None else pair.refinement.costs_for(pair.cost).factor(requests),
    }


def _nothing(block: int) -> Correction:
    return Correction((1.0,) * max(1, block), (0.0,) * max(1, block))
