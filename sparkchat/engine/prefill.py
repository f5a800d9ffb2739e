"""The prompt pass: prompts in chunks, several requests side by side, then the first token of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from sparkchat.engine import rng
from sparkchat.engine.batch import pack_rows
from sparkchat.engine.laws import draw_next, target_laws
from sparkchat.engine.logprobs import keep_scores
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import FIRST_ROUND, RequestState
from sparkchat.engine.slots import FLUSH_ROWS, flush_contexts, keep_prompt

CHUNK_ROWS = 256
"""Prompt rows of one request in one pass; sliding-window rings have room for exactly this many."""
PASS_ROWS = 1024
"""Prompt rows of all requests in one pass."""


def prefill_step(pair: LoadedPair, states: Sequence[RequestState]) -> list[dict[str, Any]]:
    """Run the next chunk of every waiting prompt that fits one pass; returns the events of first tokens."""
    chosen: list[RequestState] = []
    runs: list[tuple[int, ...]] = []
    room = PASS_ROWS
    for state in states:
        run = state.prompt_ids[state.prefilled : state.prefilled + min(CHUNK_ROWS, room)]
        if not run:
            break
        chosen.append(state)
        runs.append(run)
        room -= len(run)
        if room <= 0:
            break
    batch = pack_rows(runs, [s.prefilled for s in chosen], [s.slot.row for s in chosen], pair.device)
    hidden, features = pair.target.forward(batch, pair.cache, pair.tap_layers)
    for r, (state, run) in enumerate(zip(chosen, runs, strict=True)):
        state.prefilled += len(run)
        if features is not None:
            state.slot.draft.add(features[batch.row_starts[r] : batch.row_starts[r + 1]])
    if pair.drafter is not None and pair.draft_cache is not None:
        flush_contexts(pair.drafter, pair.draft_cache, [s.slot.draft for s in chosen], FLUSH_ROWS)
    ready = [r for r, state in enumerate(chosen) if state.prefilled == len(state.prompt_ids)]
    if not ready:
        return []
    for state in (chosen[r] for r in ready):
        if state.request.session is not None:
            keep_prompt(pair, state.slot, state.prefilled)
    last = torch.tensor([batch.row_starts[r + 1] - 1 for r in ready], device=pair.device)
    return _first_tokens(pair, [chosen[r] for r in ready], pair.target.logits(hidden[last]))


def _first_tokens(pair: LoadedPair, states: Sequence[RequestState], logits: torch.Tensor) -> list[dict[str, Any]]:
    """logits [R, V] of the last prompt rows -> the first token of every answer."""
    events: list[dict[str, Any]] = []
    keep_scores(logits, states, range(len(states) + 1))
    rows = target_laws(logits, states, range(len(states) + 1), [()] * len(states))
    uniforms = rng.uniforms([s.seed for s in states], [0] * len(states), 0, 1, rng.NEXT)
    chosen = draw_next(rows, uniforms[:, 0])
    for state, token in zip(states, chosen, strict=True):
        state.tokens = list(state.prompt_ids)
        state.round = FIRST_ROUND
        if state.is_finished:
            continue
        state.first_token_ns = time.monotonic_ns()
        state.deliver([token], ["prefill"], events)
    return events
