"""What each request does in one step: its effective mode, how far it drafts, verifies and commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkchat.engine.correction import planning_costs
from sparkchat.engine.cost_table import StepCosts
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
    floor: int = 0
    """Drafts verified whatever the plan says: a request that found no room for long."""


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
    plain_theta: float | None = None
    """The same without drafting; None when not measured."""


def intend(state: RequestState, default: Mode, pair: LoadedPair, drafts: bool | None = None) -> StepIntent:
    """The effective mode and draft length of one request for the coming step.

    ``drafts``: whether a request in compact drafts; None asks its own gate.
    """
    requested = state.mode_override or default
    limit = max(0, state.remaining - 1)
    mode, fallback = _effective(requested, state, pair, state.gate.is_open if drafts is None else drafts)
    block = 0 if mode == "off" else state.block_size
    if mode == "compact" and limit == 0:
        block = 0
    limit = min(limit, block)
    return StepIntent(mode, requested, block, limit, fallback, min(1, limit) if state.gate.is_starved else 0)


def standing_mode(requested: Mode, pair: LoadedPair) -> tuple[Mode, str | None]:
    """What this pair makes of the mode asked for, and why it is another one."""
    if requested == "off":
        return "off", None
    if pair.drafter is None:
        return "off", pair.reason_off
    if requested != "static" and not pair.drafter.has_confidence:
        return "static", REASON_NO_CONFIDENCE
    return requested, None


def _effective(requested: Mode, state: RequestState, pair: LoadedPair, drafts: bool) -> tuple[Mode, str | None]:
    mode, fallback = standing_mode(requested, pair)
    if mode == "compact" and not drafts:
        return "off", REASON_DOES_NOT_PAY
    if mode == "cap-accept" and state.accept_cap is not None:
        return mode, None
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
    planned = [i for i, intent in enumerate(intents) if is_planned(states[i], intent)]
    alone = [i for i in planned if states[i].is_reproducible]
    shared = [i for i in planned if not states[i].is_reproducible]
    plans: dict[int, tuple[int, Plan, float | None]] = {}
    for i in alone:
        cost = costs_of([states[i]], pair, is_reproducible=True)
        own = plan([list(survival[i])], [intents[i].limit], cost, floors=[intents[i].floor])
        plans[i] = (own.verify_lens[0], own, plain_theta(1, cost))
    if shared:
        rows, tokens = 0, 0.0
        for i, intent in enumerate(intents):
            if i not in shared:
                length = plans[i][0] if i in plans else intent.draft_len
                rows, tokens = rows + 1 + length, tokens + 1.0 + sum(survival[i][:length])
        cost = costs_of(states, pair, drafting=sum(intent.draft_len > 0 for intent in intents))
        joint = plan(
            [list(survival[i]) for i in shared],
            [intents[i].limit for i in shared],
            cost,
            extra_rows=rows,
            extra_tokens=tokens,
            floors=[intents[i].floor for i in shared],
        )
        for i, length in zip(shared, joint.verify_lens, strict=True):
            plans[i] = (length, joint, plain_theta(len(states), cost))
    paused_ms = joint.predicted_ms if shared else plain_ms(states, intents, pair)
    return [
        paused(intent, paused_ms) or _lengths(state, intent, plans.get(i))
        for i, (state, intent) in enumerate(zip(states, intents, strict=True))
    ]


def paused(intent: StepIntent, predicted_ms: float | None) -> StepLengths | None:
    """What a request does that would be planned, and does not draft: a plain step of known length; None for others."""
    return StepLengths(0, None, None, predicted_ms, None) if is_paused(intent) else None


def is_paused(intent: StepIntent) -> bool:
    return intent.mode_requested == "compact" and not intent.draft_len


def is_planned(state: RequestState, intent: StepIntent) -> bool:
    """Whether the cost table settles this request's lengths; a cap of the user's own leaves nothing to plan."""
    if intent.mode == "cap-accept":
        return bool(intent.draft_len) and state.accept_cap is None
    return bool(intent.draft_len) and intent.mode == "compact"


def own_cap(state: RequestState, intent: StepIntent) -> int | None:
    """The cap the user chose, where it counts in this step."""
    if intent.mode != "cap-accept" or not intent.draft_len or state.accept_cap is None:
        return None
    return min(state.accept_cap, intent.limit)


def costs_of(
    states: Sequence[RequestState], pair: LoadedPair, *, is_reproducible: bool = False, drafting: int | None = None
) -> StepCosts | None:
    """What a step of these requests costs, with the context that they have now.

    ``is_reproducible``: as far as it can be told without looking at other answers. ``drafting``: how many of them
    draft; None means all.
    """
    table = planning_costs(pair, is_reproducible)
    if table is None:
        return None
    cached, is_filtered = sum(state.kv_len for state in states), any(state.is_filtered for state in states)
    return table.at(len(states), cached, drafting, is_filtered=is_filtered)


def plain_ms(states: Sequence[RequestState], intents: Sequence[StepIntent], pair: LoadedPair) -> float | None:
    """What a step takes in which nobody drafts and somebody pauses; None for other steps, and when not measured."""
    if any(intent.draft_len for intent in intents) or not any(map(is_paused, intents)):
        return None
    cost = costs_of(states, pair)
    return None if cost is None else cost.plain_ms


def plain_theta(requests: int, cost: StepCosts | None) -> float | None:
    """Tokens per second of as many requests without drafting; None when not measured."""
    return None if cost is None or cost.plain_ms is None else 1000.0 * requests / cost.plain_ms


def _lengths(state: RequestState, intent: StepIntent, planned: tuple[int, Plan, float | None] | None) -> StepLengths:
    if planned is None:
        return StepLengths(intent.draft_len, own_cap(state, intent), None, None, None)
    length, chosen, plain = planned
    is_cap = intent.mode == "cap-accept"
    return StepLengths(
        verify_len=intent.draft_len if is_cap else length,
        cap=length if is_cap else None,
        budget=chosen.budget,
        predicted_ms=chosen.predicted_ms,
        predicted_theta=chosen.predicted_theta,
        plain_theta=plain,
    )
