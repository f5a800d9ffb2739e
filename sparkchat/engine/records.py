"""The step record: everything the screen and the trace know about one decode step of one request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkchat.engine.acceptance import Acceptance
from sparkchat.engine.drafting import Draft
from sparkchat.engine.laws import TargetRows
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.step_plan import REASON_BAD_CONFIDENCE, StepIntent, StepLengths
from sparkchat.params import Correction


class StepClock:
    """Host time of the parts of one step; on a GPU each lap waits for the device, so parts add up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = time.perf_counter_ns()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter_ns()
        self.laps[name] = (now - self._last) / 1e6
        self._last = now

    def end(self, events: Sequence[dict[str, Any]]) -> None:
        """The step is over, and has been told: its records show how long it took in all, as its costs are measured."""
        self._last = time.perf_counter_ns()
        for event in events:
            if event["event"] == "step":
                event["step_ms"] = self.total_ms

    @property
    def total_ms(self) -> float:
        return (self._last - self._start) / 1e6


@dataclass(frozen=True)
class StepTimes:
    """Times of one step that were measured elsewhere."""

    laps: dict[str, float]
    """Milliseconds by the names of the step record; what is missing was not measured."""
    total_ms: float


@dataclass(frozen=True)
class RowOutcome:
    """What one step of one request came to, on the host."""

    draft_ids: list[int]
    confidence_logit: list[float]
    """Raw; one per draft."""
    p_draft: list[float]
    p_target: list[float]
    """NaN where nothing was verified."""
    taken: int
    """Drafts committed."""
    full: int
    """Drafts that passed, before a cap."""
    next_id: int
    target_rank: Callable[[], int]
    """Rank of draft ``full`` among the target's logits, 1 for the best; asked for only when that draft was refused."""


def outcome_of(
    row: int, draft_len: int, draft: Draft | None, accepted: Acceptance, target: TargetRows, starts: Sequence[int]
) -> RowOutcome:
    """The outcome of request ``row`` of a batch, from tensors on the host."""
    # NumPy reads single numbers in a fraction of what torch takes; all of these are on the host.
    taken, full, next_id = (
        int(t.numpy()[row]) for t in (accepted.accepted_len, accepted.full_accepted_len, accepted.next_ids)
    )
    p_draft, p_target = (t.numpy()[row, :draft_len].tolist() for t in (accepted.p_draft, accepted.p_target))

    def rank() -> int:
        assert draft is not None
        logits, refused = target.logits[starts[row] + full], int(draft.proposal.ids[row, full])
        if logits.device.type == "cpu":
            # NumPy compares and counts a vocabulary an order of magnitude faster than torch, which wakes its threads.
            values = logits.numpy()
            return int(np.count_nonzero(values > values[refused])) + 1
        return int((logits > logits[refused]).sum()) + 1

    return RowOutcome(
        draft_ids=[] if draft is None else draft.proposal.ids.numpy()[row, :draft_len].tolist(),
        confidence_logit=[] if draft is None else draft.proposal.confidence_logit.numpy()[row, :draft_len].tolist(),
        p_draft=p_draft,
        p_target=p_target,
        taken=taken,
        full=full,
        next_id=next_id,
        target_rank=rank,
    )


def step_event(
    pair: LoadedPair,
    state: RequestState,
    intent: StepIntent,
    chosen: StepLengths,
    outcome: RowOutcome,
    alive: Sequence[float],
    num_committed: int,
    clock: StepClock | StepTimes,
    graph: dict[str, Any] | None = None,
    correction: Correction | None = None,
    refined: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The ``step`` event of a request, unless it asked for none; also counts the step in its statistics.

    ``correction``: of its confidences; ``refined``: the part of it that earlier steps made.
    """
    draft_ids, logits, taken = outcome.draft_ids, outcome.confidence_logit, outcome.taken
    correct = min(taken, num_committed)
    state.statistics.record(
        proposed=len(draft_ids), verified=chosen.verify_len, accepted=correct, committed=num_committed
    )
    _total(pair, state, chosen, outcome, num_committed, clock)
    if not state.request.steps:
        return []
    committed = state.delivered[len(state.delivered) - num_committed :] if num_committed else []
    reclaimed = intent.draft_len - chosen.verify_len if intent.mode == "compact" else 0
    has_confidence = pair.drafter is not None and pair.drafter.has_confidence
    fallback = intent.fallback
    if chosen.budget is not None and any(map(math.isnan, logits)):
        fallback = REASON_BAD_CONFIDENCE
    event = {
        "event": "step",
        "id": state.id,
        "i": state.statistics.num_steps - 1,
        "t_ns": time.monotonic_ns(),
        "mode": intent.mode,
        "mode_requested": intent.mode_requested,
        "prefix_len": len(state.prompt_ids) + len(state.delivered) - num_committed - 1,
        "draft_ids": draft_ids,
        "draft_text": [state.output.text_of(token) for token in draft_ids],
        "draft_prob": [finite(v) for v in outcome.p_draft],
        "target_prob": [finite(v) for v in outcome.p_target],
        "confidence_logit": [finite(v) for v in logits] if has_confidence else [],
        "confidence": _calibrated(logits, correction) if has_confidence else [],
        "survival": list(alive) if has_confidence else [],
        "budget": chosen.budget,
        "verify_len": chosen.verify_len,
        "rows": chosen.verify_len + 1,
        "correct_drafts": correct,
        "cap_trim": None if intent.mode == "compact" else outcome.full - taken,
        "committed_ids": committed,
        "bonus_token": outcome.next_id if num_committed > taken else None,
        "reject": _rejection(outcome, chosen.verify_len) if num_committed >= taken else None,
        **{name: clock.laps.get(name) for name in ("draft_ms", "plan_ms", "verify_ms", "accept_ms")},
        "gpu_idle_ms": clock.laps.get("gpu_idle_ms"),
        "step_ms": clock.total_ms,
        "predicted_step_ms": chosen.predicted_ms,
        "predicted_theta": chosen.predicted_theta,
        "graph": graph or {"replayed": False, "key": None},
        "fallback": fallback,
        "refined": refined,
        "simulated": None if pair.simulated is None else pair.simulated.label,
        "rows_reclaimed": reclaimed,
        "bytes_reclaimed": reclaimed * pair.kv_bytes_per_token,
        "tokens_per_second": state.tokens_per_second,
    }
    return [event]


def _total(
    pair: LoadedPair,
    state: RequestState,
    chosen: StepLengths,
    outcome: RowOutcome,
    num_committed: int,
    clock: StepClock | StepTimes,
) -> None:
    """The request's part of the whole step, where whole steps are told."""
    if pair.totals is None:
        return
    pair.totals.add(
        proposed=len(outcome.draft_ids),
        verified=chosen.verify_len,
        accepted=min(outcome.taken, num_committed),
        tokens=num_committed,
        remaining=state.remaining,
        clock=clock,
        # With a cap it is what the plan would take, and all is verified.
        predicted_ms=chosen.predicted_ms if chosen.cap is None else None,
    )
    if pair.simulated is not None:
        most = chosen.verify_len if chosen.cap is None else min(chosen.verify_len, chosen.cap)
        pair.totals.add_chances(pair.simulated, outcome.confidence_logit, most)


def _rejection(outcome: RowOutcome, verify_len: int) -> dict[str, Any] | None:
    """The draft that the target turned down, when it is what ended the committed run."""
    full = outcome.full
    if full >= verify_len or full > outcome.taken:
        return None
    return {
        "pos": full,
        "draft_id": outcome.draft_ids[full],
        "target_id": outcome.next_id,
        "p_draft": finite(outcome.p_draft[full]),
        "p_target": finite(outcome.p_target[full]),
        "target_rank": outcome.target_rank(),
    }


def _calibrated(logits: Sequence[float], correction: Correction | None) -> list[float | None]:
    if correction is None:
        return [finite(_sigmoid(logit)) for logit in logits]
    pairs = zip(logits, correction.temperatures, correction.shifts, strict=False)
    return [finite(_sigmoid(logit / scale + shift)) for logit, scale, shift in pairs]


def _sigmoid(value: float) -> float:
    if value < -700.0:
        return 0.0
    return 1.0 / (1.0 + math.exp(-value))


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity; such a value is reported as not measured."""
    return value if math.isfinite(value) else None
