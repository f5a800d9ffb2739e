"""The decode step: draft -> calibrate -> plan -> verify -> accept -> commit.

The order is what makes the output law the target's: lengths are chosen from confidences that do not
depend on the token they judge, and every token is accepted, or replaced, by the rule of
``acceptance`` against the very laws it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.engine import rng
from sparkchat.engine.acceptance import Acceptance, accept
from sparkchat.engine.batch import pack_rows
from sparkchat.engine.calibration import survival_of
from sparkchat.engine.correction import correction_of, learn, refined_record
from sparkchat.engine.drafters import intend_all, learn_blocks
from sparkchat.engine.drafting import Draft, propose
from sparkchat.engine.lagged_lengths import choose_lagged
from sparkchat.engine.laws import DAMAGED_DRAFTER, DAMAGED_MODEL, TargetRows, target_laws
from sparkchat.engine.logprobs import keep_scores
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.records import StepClock, outcome_of, step_event
from sparkchat.engine.request import RequestState
from sparkchat.engine.slots import FLUSH_ROWS, flush_contexts
from sparkchat.engine.step_plan import StepIntent, StepLengths, choose_lengths
from sparkchat.params import Correction, Mode

Event = dict


def decode_step(
    pair: LoadedPair,
    states: Sequence[RequestState],
    default: Mode,
    choose: Callable[..., list[StepLengths]] | None = None,
    graph: dict | None = None,
) -> list[Event]:
    """One step for every request of the batch; returns their delta and step events in order.

    ``choose`` settles the verify lengths in the place of the pair's own planner; ``graph`` is what the step records say
    about captured steps, with the ``reason`` why these requests take none.
    """
    choose = choose or (choose_lagged if pair.is_lagged else choose_lengths)
    clock = StepClock(pair.device)
    apart = None if graph is None else graph.get("reason")
    intents = intend_all(states, default, pair, apart)
    draft = propose(pair, states, [intent.draft_len for intent in intents])
    clock.lap("draft_ms")
    corrections = [correction_of(state, pair) for state in states]
    alive = _calibrate(draft, corrections)
    lengths = choose(states, intents, alive, pair)
    clock.lap("plan_ms")
    target, starts, features = _verify(pair, states, draft, lengths)
    clock.lap("verify_ms")
    accepted = _accept(target, starts, states, draft, lengths, pair.damaged_ids)
    calibrated = Calibrated(corrections, alive)
    events = _commit(
        pair, states, intents, lengths, draft, accepted, features, starts, calibrated, target, clock, graph
    )
    clock.end(events)
    learn_blocks(pair, states, alive, apart)
    _learn(pair, states, intents, lengths, draft, accepted, clock)
    return events


@dataclass(frozen=True)
class Calibrated:
    """Of each request: how its confidences were corrected, and the survivals that came of it."""

    corrections: list[Correction | None]
    alive: list[list[float]]


def _calibrate(draft: Draft | None, corrections: Sequence[Correction | None]) -> list[list[float]]:
    """Survival a_k of every draft: the running product of calibrated confidences."""
    if draft is None:
        return [[] for _ in corrections]
    rows = zip(draft.proposal.confidence_logit.tolist(), draft.proposal.lens.tolist(), corrections, strict=True)
    # A confidence is advice: one that is no number admits nothing, and harms no token.
    return [survival_of(logits[:length], correction) for logits, length, correction in rows]


def _verify(
    pair: LoadedPair, states: Sequence[RequestState], draft: Draft | None, lengths: Sequence[StepLengths]
) -> tuple[TargetRows, list[int], Tensor | None]:
    """Run [anchor, drafts...] of every request through the target.

    Returns what the target says at each of the N rows, the first row of each request, and the tapped features.
    A draft whose embedding is damaged is judged like any other, but another token runs in its place: numbers that are
    none would reach every row of the request through the cache. ``_accept`` lets nothing behind it count.
    """
    drafts = [[]] * len(states) if draft is None else draft.proposal.ids.tolist()
    runs = [
        [state.anchor, *ids[: chosen.verify_len]] for state, ids, chosen in zip(states, drafts, lengths, strict=True)
    ]
    sound = [[run[0], *(run[0] if i in pair.damaged_ids else i for i in run[1:])] for run in runs]
    batch = pack_rows(sound, [s.kv_len for s in states], [s.slot.row for s in states], pair.device)
    if hasattr(pair.target, "forward_logits"):
        logits, features = pair.target.forward_logits(batch, pair.cache, pair.tap_layers)
    else:
        hidden, features = pair.target.forward(batch, pair.cache, pair.tap_layers)
        logits = pair.target.logits(hidden)
    for index in draft.damaged if draft else ():
        states[index].finish("error", error=DAMAGED_DRAFTER)
    keep_scores(logits, states, batch.row_starts)
    target = target_laws(logits, states, batch.row_starts, [run[1:] for run in runs])
    return target, list(batch.row_starts), features


def _accept(
    target: TargetRows,
    starts: list[int],
    states: Sequence[RequestState],
    draft: Draft | None,
    lengths: Sequence[StepLengths],
    damaged_ids: frozenset[int],
) -> Acceptance:
    """The outcome on the host. A draft with a damaged embedding is the last token that may be committed: the step
    behind it then ends the request, as it does in plain decoding."""
    seeds, rounds = [s.seed for s in states], [s.round for s in states]
    width = 1 if draft is None else draft.proposal.ids.shape[1]
    caps = None
    if damaged_ids or any(chosen.cap is not None for chosen in lengths):
        ends = [c.verify_len if c.cap is None else c.cap for c in lengths]
        if damaged_ids and draft is not None:
            blocks = draft.proposal.ids.tolist()
            ends = [_before(damaged_ids, ids[:end]) for ids, end in zip(blocks, ends, strict=True)]
        caps = torch.tensor(ends)
    accepted = accept(
        target.law,
        starts[:-1],
        [chosen.verify_len for chosen in lengths],
        None if draft is None else draft.proposal,
        *rng.acceptance_uniforms(seeds, rounds, width),
        caps,
        greedy=target.is_greedy,
        target_argmax=target.argmax,
    )
    accepted = accepted.on_host()
    for r, row in target.damaged_from.items():
        if row <= int(accepted.accepted_len[r]):
            states[r].finish("error", error=DAMAGED_MODEL)
    return accepted


def _before(damaged_ids: frozenset[int], ids: Sequence[int]) -> int:
    """How many of ``ids`` come before the first damaged one."""
    return next((k for k, token in enumerate(ids) if token in damaged_ids), len(ids))


def _commit(
    pair: LoadedPair,
    states: Sequence[RequestState],
    intents: Sequence[StepIntent],
    lengths: Sequence[StepLengths],
    draft: Draft | None,
    accepted: Acceptance,
    features: Tensor | None,
    starts: list[int],
    calibrated: Calibrated,
    target: TargetRows,
    clock: StepClock,
    graph: dict | None,
) -> list[Event]:
    """Keep what was accepted: tokens, caches, features for the drafter, text; forget the rest."""
    events: list[Event] = []
    taken, nexts = accepted.accepted_len.tolist(), accepted.next_ids.tolist()
    commits: list[int] = []
    for r, state in enumerate(states):
        drafts = [] if draft is None else draft.proposal.ids[r, : taken[r]].tolist()
        before = state.kv_len
        pair.cache.truncate(state.slot.row, before + taken[r] + 1)
        if features is not None:
            state.slot.draft.add(features[starts[r] : starts[r] + taken[r] + 1])
        if state.is_finished:
            commits.append(0)
            continue
        origins = ["draft"] * taken[r] + ["plain" if intents[r].draft_len == 0 else "bonus"]
        commits.append(state.deliver([*drafts, nexts[r]], origins, events))
        observe(state, intents[r], lengths[r])
    if pair.drafter is not None and pair.draft_cache is not None:
        # Plain steps pile up features that no block has asked for.
        flush_contexts(pair.drafter, pair.draft_cache, [s.slot.draft for s in states], FLUSH_ROWS)
    clock.lap("accept_ms")
    for r, state in enumerate(states):
        if state.finish_reason != "error":
            outcome = outcome_of(r, intents[r].draft_len, draft, accepted, target, starts)
            survivals, correction = calibrated.alive[r], calibrated.corrections[r]
            refined = refined_record(state, pair, correction, len(states))
            events += step_event(
                pair, state, intents[r], lengths[r], outcome, survivals, commits[r], clock, graph, correction, refined
            )
        state.stale.keep(state.round, calibrated.alive[r])
        state.round += 1
    return events


def _learn(
    pair: LoadedPair,
    states: Sequence[RequestState],
    intents: Sequence[StepIntent],
    lengths: Sequence[StepLengths],
    draft: Draft | None,
    accepted: Acceptance,
    clock: StepClock,
) -> None:
    """What this step, now that it is over, shows for the coming ones."""
    if pair.refinement is None:
        return
    drafted = [intent.draft_len for intent in intents]
    raw = [[] for _ in states] if draft is None else draft.proposal.confidence_logit.tolist()
    learn(
        pair,
        states,
        drafted,
        [chosen.verify_len for chosen in lengths],
        [row[:length] for row, length in zip(raw, drafted, strict=True)],
        accepted.full_accepted_len.tolist(),
        clock.total_ms,
    )


def observe(state: RequestState, intent: StepIntent, chosen: StepLengths) -> None:
    """Tell the gate of a compact request what this step was predicted to bring."""
    if intent.mode_requested != "compact":
        return
    if intent.draft_len and chosen.predicted_theta is not None:
        # Whether those drafted that are planned together was not settled by their gates.
        plain = chosen.plain_theta if state.is_reproducible else None
        state.gate.observe(chosen.predicted_theta, plain, chosen.verify_len)
    elif intent.mode == "off":
        state.gate.pass_plain_step()
