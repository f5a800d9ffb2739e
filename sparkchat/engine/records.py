"""The step record: everything the screen and the trace know about one decode step of one request."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.acceptance import Acceptance
from sparkchat.engine.drafting import Draft
from sparkchat.engine.laws import TargetRows
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.step_plan import REASON_BAD_CONFIDENCE, StepIntent, StepLengths


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

    @property
    def total_ms(self) -> float:
        return (self._last - self._start) / 1e6


def step_event(
    pair: LoadedPair,
    state: RequestState,
    row: int,
    intent: StepIntent,
    chosen: StepLengths,
    draft: Draft | None,
    accepted: Acceptance,
    alive: Sequence[float],
    target: TargetRows,
    starts: Sequence[int],
    num_committed: int,
    clock: StepClock,
) -> dict[str, Any]:
    """The ``step`` event of request ``row``; also counts the step in the request's statistics."""
    draft_ids = [] if draft is None else draft.proposal.ids[row, : intent.draft_len].tolist()
    taken, full = int(accepted.accepted_len[row]), int(accepted.full_accepted_len[row])
    correct = min(taken, num_committed)
    state.statistics.record(
        proposed=len(draft_ids), verified=chosen.verify_len, accepted=correct, committed=num_committed
    )
    next_id = int(accepted.next_ids[row])
    committed = state.delivered[len(state.delivered) - num_committed :] if num_committed else []
    reclaimed = intent.draft_len - chosen.verify_len if intent.mode == "compact" else 0
    logits = [] if draft is None else draft.proposal.confidence_logit[row, : intent.draft_len].tolist()
    has_confidence = pair.drafter is not None and pair.drafter.has_confidence
    fallback = intent.fallback
    if chosen.budget is not None and any(map(math.isnan, logits)):
        fallback = REASON_BAD_CONFIDENCE
    reject = None
    if num_committed >= taken:
        reject = _rejection(draft_ids, full, taken, chosen.verify_len, row, next_id, accepted, target, starts)
    return {
        "event": "step",
        "id": state.id,
        "i": state.statistics.num_steps - 1,
        "t_ns": time.monotonic_ns(),
        "mode": intent.mode,
        "mode_requested": intent.mode_requested,
        "prefix_len": len(state.prompt_ids) + len(state.delivered) - num_committed - 1,
        "draft_ids": draft_ids,
        "draft_text": [state.output.text_of(token) for token in draft_ids],
        "draft_prob": _row(accepted.p_draft, row, len(draft_ids)),
        "confidence_logit": [finite(v) for v in logits] if has_confidence else [],
        "confidence": _calibrated(logits, pair.temperatures) if has_confidence else [],
        "survival": list(alive) if has_confidence else [],
        "budget": chosen.budget,
        "verify_len": chosen.verify_len,
        "rows": chosen.verify_len + 1,
        "correct_drafts": correct,
        "cap_trim": None if intent.mode == "compact" else full - taken,
        "committed_ids": committed,
        "bonus_token": next_id if num_committed > taken else None,
        "reject": reject,
        **{name: clock.laps.get(name) for name in ("draft_ms", "plan_ms", "verify_ms", "accept_ms")},
        "step_ms": clock.total_ms,
        "predicted_step_ms": chosen.predicted_ms,
        "predicted_theta": chosen.predicted_theta,
        "graph": {"replayed": False, "key": None},
        "fallback": fallback,
        "simulated": None if pair.simulated is None else pair.simulated.label,
        "rows_reclaimed": reclaimed,
        "bytes_reclaimed": reclaimed * pair.kv_bytes_per_token,
        "tokens_per_second": state.tokens_per_second,
    }


def _rejection(
    draft_ids: Sequence[int],
    full: int,
    taken: int,
    verify_len: int,
    row: int,
    next_id: int,
    accepted: Acceptance,
    target: TargetRows,
    starts: Sequence[int],
) -> dict[str, Any] | None:
    """The draft that the target turned down, when it is what ended the committed run."""
    if full >= verify_len or full > taken:
        return None
    logits = target.logits[starts[row] + full]
    return {
        "pos": full,
        "draft_id": draft_ids[full],
        "target_id": next_id,
        "p_draft": finite(float(accepted.p_draft[row, full])),
        "p_target": finite(float(accepted.p_target[row, full])),
        "target_rank": int((logits > logits[draft_ids[full]]).sum()) + 1,
    }


def _calibrated(logits: Sequence[float], temperatures: Sequence[float] | None) -> list[float | None]:
    scales = temperatures or [1.0] * len(logits)
    return [finite(_sigmoid(logit / scale)) for logit, scale in zip(logits, scales, strict=False)]


def _sigmoid(value: float) -> float:
    if value < -700.0:
        return 0.0
    return 1.0 / (1.0 + math.exp(-value))


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity; such a value is reported as not measured."""
    return value if math.isfinite(value) else None


def _row(values: Tensor | None, row: int, length: int) -> list[float | None]:
    return [] if values is None or not length else [finite(v) for v in values[row, :length].tolist()]
