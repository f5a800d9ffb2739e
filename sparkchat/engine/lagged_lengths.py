"""Verify lengths of a batch by lagged budgets: for the captured step, and for the reference loop beside it.

Both use the same numbers, so that with and without captured steps a seed gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sparkchat.engine.lagged_plan import Budget, admit, choose_budget, past_blocks
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.step_plan import (
    StepIntent,
    StepLengths,
    costs_of,
    is_planned,
    own_cap,
    paused,
    plain_ms,
    plain_theta,
)


@dataclass(frozen=True)
class BatchBudgets:
    """Who plans with which budget, by index in the batch."""

    own: dict[int, Budget]
    """Requests planned as if they were alone, capped by the user, or with no room for long: the first ``drafts`` of
    their block are verified, or may be committed."""
    sharing: tuple[int, ...]
    shared: Budget | None
    paused_ms: float | None = None
    """How long the step takes, for requests that would be planned and do not draft; None where that is not known."""

    @cached_property
    def _shares(self) -> frozenset[int]:
        return frozenset(self.sharing)

    def shares(self, index: int) -> bool:
        return index in self._shares

    def of(self, index: int) -> Budget | None:
        return self.own.get(index, self.shared if index in self._shares else None)


def choose_budgets(
    states: Sequence[RequestState], intents: Sequence[StepIntent], rounds: Sequence[int], pair: LoadedPair
) -> BatchBudgets:
    """Budgets of the coming step; ``rounds`` are the requests' round numbers in it.

    As in ``step_plan.choose_lengths``, a sampled request whose seed the user chose is planned alone.
    """

    def stale_of(indices: Sequence[int]) -> list[list[tuple[float, ...]]]:
        """Survivals of these requests, by age."""
        return [
            [_stale(states[i], rounds[i], intents[i].draft_len, back, pair) for i in indices]
            for back in range(past_blocks(len(indices)))
        ]

    own: dict[int, Budget] = {}
    for i, (state, intent) in enumerate(zip(states, intents, strict=True)):
        cap = own_cap(state, intent)
        if cap is not None:
            own[i] = Budget(cap, None, None, is_planned=False)
        elif is_planned(state, intent) and (state.is_reproducible or intent.floor):
            cost = costs_of([state], pair, is_reproducible=state.is_reproducible)
            newest, *older = stale_of([i])
            alone = choose_budget(newest, cost, older=older)
            own[i] = replace(alone, drafts=max(alone.drafts, intent.floor), plain_theta=plain_theta(1, cost))
    sharing = tuple(i for i, intent in enumerate(intents) if i not in own and is_planned(states[i], intent))
    if not sharing:
        return BatchBudgets(own, (), None, plain_ms(states, intents, pair))
    rows, tokens, is_shared = 0, 0.0, frozenset(sharing)
    for i, intent in enumerate(intents):
        if i not in is_shared:
            length = own[i].drafts if i in own else intent.draft_len
            alive = _stale(states[i], rounds[i], intents[i].draft_len, 0, pair)
            rows, tokens = rows + 1 + length, tokens + 1.0 + sum(alive[:length])
    # Captured drafts run over the seats up to the last that drafts.
    cost = costs_of(states, pair, drafting=1 + max(i for i, intent in enumerate(intents) if intent.draft_len))
    newest, *older = stale_of(sharing)
    shared = choose_budget(newest, cost, rows, tokens, older)
    shared = replace(shared, plain_theta=plain_theta(len(states), cost))
    if len(sharing) == 1:
        return BatchBudgets(own | {sharing[0]: shared}, (), None, shared.predicted_ms)
    return BatchBudgets(own, sharing, shared, shared.predicted_ms)


def _stale(state: RequestState, round_: int, block: int, back: int, pair: LoadedPair) -> tuple[float, ...]:
    """Survivals that a request's block is planned by. One that has shown nothing yet is taken for one like those that
    this engine saw; one whose seed was chosen must not look at others, and counts as certain."""
    if state.is_reproducible or state.stale.is_known(round_) or not block:
        return state.stale.before(round_, block, back)
    return pair.outlook.recent.expected(state.kind, block)


def choose_lagged(
    states: Sequence[RequestState],
    intents: Sequence[StepIntent],
    survival: Sequence[Sequence[float]],
    pair: LoadedPair,
) -> list[StepLengths]:
    """What ``step_plan.choose_lengths`` does, by lagged budgets."""
    budgets = choose_budgets(states, intents, [s.round for s in states], pair)
    sharing = budgets.sharing
    given: dict[int, int] = {i: min(budget.drafts, intents[i].limit) for i, budget in budgets.own.items()}
    if budgets.shared is not None:
        lens = admit([survival[i] for i in sharing], [intents[i].limit for i in sharing], budgets.shared.drafts)
        given |= dict(zip(sharing, lens, strict=True))
    return [lengths_of(intent, given.get(i), budgets.of(i), budgets.paused_ms) for i, intent in enumerate(intents)]


def lengths_of(
    intent: StepIntent, planned: int | None, budget: Budget | None, paused_ms: float | None = None
) -> StepLengths:
    """``planned``: drafts to verify, or in cap-accept to commit at most; None where nothing is planned."""
    if planned is None or budget is None:
        return paused(intent, paused_ms) or StepLengths(intent.draft_len, None, None, None, None)
    is_cap = intent.mode == "cap-accept"
    return StepLengths(
        verify_len=intent.draft_len if is_cap else planned,
        cap=planned if is_cap else None,
        budget=budget.drafts if budget.is_planned else None,
        predicted_ms=budget.predicted_ms,
        predicted_theta=budget.predicted_theta,
        plain_theta=budget.plain_theta,
    )
