"""What each request does in one step: its effective mode, how far it drafts, verifies and commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.planner import Plan, plan
from sparkchat.engine.request import RequestState
from sparkchat.params import Mode

REASON_NO_CONFIDENCE = "the drafter has no confidence head, so the whole block is verified"
REASON_DOES_NOT_PAY = "plain decoding is predicted to be faster here, so drafting pauses"
REASON_NO_TABLE = "no step-cost table, so nothing is trimmed"
REASON_BAD_CONFIDENCE = "the drafter's confidence is not a number, so its drafts are not trusted"


@dataclass(frozen=True)
class StepIntent:
    """Decided before drafting, from the past alone."""

    mode: Mode
    """Effective mode."""
    mode_requested: Mode
    draft_len: int
    limit: int
    """Most drafts worth verifying: one less than the tokens that may still be delivered."""
    fallback: str | None
    """Why the effective mode is not the one asked for, or why it trims nothing."""


@dataclass(frozen=True)
class StepLengths:
    """Decided after drafting, from confidences that do not depend on the token they judge."""

    verify_len: int
    cap: int | None
    """cap-accept: most drafts that may be committed."""
    budget: int | None
    """Drafts admitted over the whole batch."""
    predicted_ms: float | None
    predicted_theta: float | None
    """Tokens per second of what was planned together, the paper's theta."""


def intend(state: RequestState, default: Mode, pair: LoadedPair) -> StepIntent:
    """The effective mode and draft length of one request for the coming step."""
    requested = state.mode_override or default
    limit = max(0, state.remaining - 1)
    mode, fallback = _effective(requested, state, pair)
    block = 0 if mode == "off" else state.block_size
    if mode == "compact" and limit == 0:
        block = 0
    return StepIntent(mode, requested, block, min(limit, block), fallback)


def standing_mode(requested: Mode, pair: LoadedPair) -> tuple[Mode, str | None]:
    """What this pair makes of the mode asked for, and why it is another one."""
    if requested == "off":
        return "off", None
    if pair.drafter is None:
        return "off", pair.reason_off
    if requested != "static" and not pair.drafter.has_confidence:
        return "static", REASON_NO_CONFIDENCE
    return requested, None


def _effective(requested: Mode, state: RequestState, pair: LoadedPair) -> tuple[Mode, str | None]:
    mode, fallback = standing_mode(requested, pair)
    if mode == "compact" and not state.gate.is_open:
        return "off", REASON_DOES_NOT_PAY
    if mode in ("compact", "cap-accept") and pair.cost is None:
        return mode, REASON_NO_TABLE
    return mode, fallback


def choose_lengths(
    states: Sequence[RequestState],
    intents: Sequence[StepIntent],
    survival: Sequence[Sequence[float]],
    pair: LoadedPair,
) -> list[StepLengths]:
    """Verify lengths by Algorithm 1 over the batch.

    A sampled request whose seed the user chose is planned as if it were alone: its tokens are then the
    same whatever else is decoded beside it. Greedy tokens do not depend on the plan, and without a
    chosen seed there is nothing to reproduce, so all other requests share one plan.
    """
    planned = [i for i, intent in enumerate(intents) if intent.draft_len and intent.mode in ("compact", "cap-accept")]
    alone = [i for i in planned if states[i].is_reproducible]
    shared = [i for i in planned if not states[i].is_reproducible]
    plans: dict[int, tuple[int, Plan]] = {}
    for i in alone:
        own = plan([list(survival[i])], [intents[i].limit], pair.cost)
        plans[i] = (own.verify_lens[0], own)
    if shared:
        rows, tokens = 0, 0.0
        for i, intent in enumerate(intents):
            if i not in shared:
                length = plans[i][0] if i in plans else intent.draft_len
                rows, tokens = rows + 1 + length, tokens + 1.0 + sum(survival[i][:length])
        joint = plan(
            [list(survival[i]) for i in shared],
            [intents[i].limit for i in shared],
            pair.cost,
            extra_rows=rows,
            extra_tokens=tokens,
        )
        for i, length in zip(shared, joint.verify_lens, strict=True):
            plans[i] = (length, joint)
    return [_lengths(intent, plans.get(i)) for i, intent in enumerate(intents)]


def _lengths(intent: StepIntent, planned: tuple[int, Plan] | None) -> StepLengths:
    if planned is None:
        return StepLengths(intent.draft_len, None, None, None, None)
    length, chosen = planned
    is_cap = intent.mode == "cap-accept"
    return StepLengths(
        verify_len=intent.draft_len if is_cap else length,
        cap=length if is_cap else None,
        budget=chosen.budget,
        predicted_ms=chosen.predicted_ms,
        predicted_theta=chosen.predicted_theta,
    )
