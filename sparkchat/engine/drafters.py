"""Who drafts in a step: settled for all requests that are planned together, before anybody drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparkchat.engine.outlook import FEW, Company, Outlook
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import FIRST_ROUND, RequestState
from sparkchat.engine.step_plan import StepIntent, costs_of, intend, plain_theta, standing_mode
from sparkchat.params import Mode


def intend_all(
    states: Sequence[RequestState], default: Mode, pair: LoadedPair, apart: str | None = None
) -> list[StepIntent]:
    """The effective mode and draft length of every request for the coming step, in which these decode, in this order.

    Call it once for each step: plain steps are counted. ``apart``: why these decode in steps of their own, beside
    captured ones; None for all others.
    """
    sharing = [i for i, state in enumerate(states) if _shares(state, default, pair)]
    if not sharing:
        return [intend(state, default, pair) for state in states]
    sharers = frozenset(sharing)
    others = {i: intend(state, default, pair) for i, state in enumerate(states) if i not in sharers}
    drafting = [i for i, intent in others.items() if intent.draft_len]
    key = (len(states), len(sharing), len(drafting), id(pair.cost))
    outlook = pair.outlook.of(apart)
    if all(states[i].round <= FIRST_ROUND for i in sharing):
        outlook.begin()
    count = outlook.admit(key, len(sharing), lambda: _company(states, sharing, others, pair, outlook))
    drafters = frozenset(sharing[:count])
    return [
        others[i] if i in others else intend(state, default, pair, drafts=i in drafters)
        for i, state in enumerate(states)
    ]


def learn_blocks(
    pair: LoadedPair,
    states: Sequence[RequestState],
    survivals: Sequence[Sequence[float]],
    apart: str | None = None,
) -> None:
    """Tell the engine's outlook of the blocks of a finished step: survivals of each request, none where it drafted
    nothing. ``apart``: as of ``intend_all``."""
    blocks: dict[str, list[Sequence[float]]] = {}
    for state, alive in zip(states, survivals, strict=True):
        if alive and not state.is_reproducible:
            blocks.setdefault(state.kind, []).append(alive)
    if blocks:
        pair.outlook.of(apart).learn(blocks)


def _shares(state: RequestState, default: Mode, pair: LoadedPair) -> bool:
    """Whether the outlook of all settles if this request drafts; a last token needs no drafts."""
    if state.is_reproducible or state.remaining < 2:
        return False
    return standing_mode(state.mode_override or default, pair)[0] == "compact"


def _company(
    states: Sequence[RequestState],
    sharing: Sequence[int],
    others: dict[int, StepIntent],
    pair: LoadedPair,
    outlook: Outlook,
) -> Company | None:
    """None where no plain step was measured."""
    busy = [i for i, intent in others.items() if intent.draft_len]

    def drafting(indices: Sequence[int]) -> int:
        # Captured drafts run over the seats up to the last that drafts.
        return 1 + max(indices) if pair.is_lagged else len(indices)

    cost = costs_of(states, pair, drafting=drafting([*sharing, *busy]))
    plain = plain_theta(len(states), cost)
    if cost is None or plain is None:
        return None
    # Others may verify less than they draft; how much less is not known yet.
    rows = len(others) + sum(others[i].draft_len for i in busy)
    tokens = float(len(others))
    for i in busy:
        tokens += sum(outlook.recent.expected(states[i].kind, others[i].draft_len))
    first = len(sharing) + rows
    if busy:
        beside = costs_of(states, pair, drafting=drafting(busy))
        assert beside is not None
        plain = 1000.0 * (len(sharing) + tokens) / beside.step_ms(first)
    loss = 0.0
    if not outlook.is_open:
        trial = costs_of(states, pair, drafting=drafting([*sharing[:FEW], *busy]))
        assert trial is not None
        loss = max(0.0, trial.step_ms(first) * plain / (1000.0 * (len(sharing) + tokens)) - 1.0)
    return Company(
        kinds=Counter(states[i].kind for i in sharing),
        block=max(states[i].block_size for i in sharing),
        cost=cost,
        plain_theta=plain,
        is_lagged=pair.is_lagged,
        trial_loss=loss,
        others=rows,
        others_tokens=tokens,
    )
