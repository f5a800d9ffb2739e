"""Draft: one parallel block pass, then the sequential head draws the tokens left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkchat.engine import rng, sampling, shortlist
from sparkchat.engine.acceptance import Proposal
from sparkchat.engine.batch import pack_rows
from sparkchat.engine.laws import draft_laws
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.simulated import simulate
from sparkchat.engine.slots import flush_contexts, take_pending


@dataclass(frozen=True)
class Draft:
    """A proposal for the whole batch, and the requests whose draft logits are no numbers."""

    proposal: Proposal
    damaged: frozenset[int]
    """Their indices in the batch."""


def propose(pair: LoadedPair, states: Sequence[RequestState], lens: Sequence[int]) -> Draft | None:
    """Draft ``lens[r]`` tokens for request r; None when no request drafts.

    The drafts of a block see: target features of positions before the anchor, the anchor's embedding,
    and each other through the Markov head (paper section 3). ``Proposal.probs`` are the very fp32 laws
    the tokens were drawn from, filters included.
    """
    drafting = [r for r, length in enumerate(lens) if length]
    if not drafting:
        return None
    assert pair.drafter is not None and pair.draft_cache is not None
    row_starts, hidden, base = _block_of_one(pair, states, lens, drafting) or _blocks(pair, states, lens, drafting)
    draw = _draw_from_shortlist if shortlist.suits(pair) else _draw_block
    draft = draw(pair, states, lens, drafting, row_starts, hidden, base)
    return draft if pair.simulated is None else simulate(pair.simulated, draft, states)


def _block_of_one(
    pair: LoadedPair, states: Sequence[RequestState], lens: Sequence[int], drafting: list[int]
) -> tuple[tuple[int, ...], Tensor, Tensor] | None:
    """As ``_blocks``, by a job that is kept; None where that cannot be done."""
    kept = getattr(pair.drafter, "kept_blocks", None)
    if kept is None or len(drafting) != 1:
        return None
    (r,) = drafting
    context = states[r].slot.draft
    if not 0 < context.num_pending <= kept.most_pending:
        return None
    pending, context.pending = context.pending, []
    context.length, context.num_pending = context.length + context.num_pending, 0
    return (0, lens[r]), *kept.draft(pending, states[r].anchor, lens[r], context.row, pair.draft_cache)


def _blocks(
    pair: LoadedPair, states: Sequence[RequestState], lens: Sequence[int], drafting: list[int]
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """First row of each drafting request and the end, hidden [N, d] and base logits [N, Vd] of all their blocks."""
    assert pair.drafter is not None and pair.draft_cache is not None
    contexts = [states[r].slot.draft for r in drafting]
    mask = pair.drafter.config.mask_token_id
    batch = pack_rows(
        [[states[r].anchor] + [mask] * (lens[r] - 1) for r in drafting],
        [states[r].kv_len for r in drafting],
        [states[r].slot.draft.row for r in drafting],
        pair.device,
    )
    if hasattr(pair.drafter, "draft_block"):
        hidden, base = pair.drafter.draft_block(take_pending(contexts), batch, pair.draft_cache)
    else:
        flush_contexts(pair.drafter, pair.draft_cache, contexts)
        hidden = pair.drafter.backbone(batch, pair.draft_cache)
        base = pair.drafter.base_logits(hidden)
    return batch.row_starts, hidden, base


def _draw_from_shortlist(
    pair: LoadedPair,
    states: Sequence[RequestState],
    lens: Sequence[int],
    drafting: list[int],
    row_starts: tuple[int, ...],
    hidden: Tensor,
    base: Tensor,
) -> Draft:
    """As ``_draw_block``, over the likeliest tokens alone."""
    assert pair.drafter is not None
    uniforms = _uniforms(states, drafting, max(lens))
    heads = getattr(pair.drafter, "lane_heads", None)
    if heads is not None:
        drawn = shortlist.draw_by_kernel(pair, heads, states, lens, drafting, row_starts, hidden, base, uniforms)
        return Draft(drawn[0], frozenset(drawn[1]))
    # NaN and +inf both reach the peak of a row.
    is_sound = sampling.row_peaks(base).isfinite().tolist()
    proposal, befores, damaged = shortlist.draw_block(pair, states, lens, drafting, row_starts, hidden, base, uniforms)
    places = [(r, k) for r in drafting for k in range(lens[r])]
    before = [torch.tensor(tokens) for tokens in befores]
    confidence = _confidence(pair, (len(states), max(lens)), places, hidden, before)
    damaged |= {r for (r, _), sound in zip(places, is_sound, strict=True) if not sound}
    return Draft(replace(proposal, confidence_logit=confidence), frozenset(damaged))


def _uniforms(states: Sequence[RequestState], drafting: list[int], width: int) -> Tensor:
    """[drafting, width] float64: what the drafts of this round are drawn with."""
    return rng.uniforms([states[r].seed for r in drafting], [states[r].round for r in drafting], 0, width, rng.DRAFT)


def _draw_block(
    pair: LoadedPair,
    states: Sequence[RequestState],
    lens: Sequence[int],
    drafting: list[int],
    row_starts: tuple[int, ...],
    hidden: Tensor,
    base: Tensor,
) -> Draft:
    """hidden [N, d], base [N, Vd] -> tokens drawn one position after the other, for all requests at once."""
    assert pair.drafter is not None
    width, size = max(lens), base.shape[1]
    ids = torch.full((len(states), width), -1, dtype=torch.int64)
    index = torch.zeros((len(states), width), dtype=torch.int64)
    is_sampled = not all(states[r].is_greedy for r in drafting)
    probs = torch.zeros((len(states), width, size), device=pair.device) if is_sampled else None
    uniforms = _uniforms(states, drafting, width)
    drafted: list[list[int]] = [[] for _ in drafting]
    previous = torch.tensor([states[r].anchor for r in drafting], device=pair.device)
    markov_state = pair.drafter.initial_state(len(drafting))
    survivors = list(range(len(drafting)))
    # Of every draft, in the order drawn: request and position, row of ``hidden``, token before it, largest logit.
    places: list[tuple[int, int]] = []
    rows_of: list[Tensor] = []
    prefixes: list[Tensor] = []
    peaks: list[Tensor] = []
    for k in range(width):
        active = [i for i, r in enumerate(drafting) if lens[r] > k]
        if len(active) < previous.shape[0]:
            # Block lengths differ: the shorter blocks are done.
            keep = torch.tensor([survivors.index(i) for i in active], device=pair.device)
            previous, markov_state = previous[keep], _select(markov_state, keep)
        survivors = active
        rows = torch.tensor([row_starts[i] + k for i in active], device=pair.device)
        places += [(drafting[i], k) for i in active]
        rows_of.append(rows)
        prefixes.append(previous)
        bias, markov_state = pair.drafter.markov_step(previous, hidden[rows], markov_state)
        logits = base[rows] + bias
        peaks.append(logits.amax(dim=1))
        group = [states[drafting[i]] for i in active]
        law = draft_laws(logits, group, [drafted[i] for i in active], pair.draft_index_of)
        chosen = sampling.argmax_ids(logits) if law is None else sampling.draw(law, uniforms[active, k])
        target_ids = chosen if pair.drafter.draft_to_target is None else pair.drafter.draft_to_target[chosen]
        at = torch.tensor([drafting[i] for i in active])
        on_host = target_ids.cpu()
        ids[at, k] = on_host
        index[at, k] = on_host if target_ids is chosen else chosen.cpu()
        if probs is not None:
            # All-greedy rows of a mixed batch may be missing a law; their entries are never read.
            probs[at, k] = law if law is not None else 0.0
        for i, token in zip(active, on_host.tolist(), strict=True):
            drafted[i].append(token)
        previous = target_ids
    proposal = Proposal(
        ids=ids,
        lens=torch.tensor(list(lens)),
        probs=probs,
        draft_index=index,
        confidence_logit=_confidence(pair, (len(states), width), places, hidden[torch.cat(rows_of)], prefixes),
        draft_to_target=pair.drafter.draft_to_target,
    )
    # NaN and +inf both reach the maximum of a row.
    is_sound = torch.cat(peaks).isfinite().tolist()
    return Draft(proposal, frozenset(r for (r, _), sound in zip(places, is_sound, strict=True) if not sound))


def _confidence(
    pair: LoadedPair, shape: tuple[int, int], places: list[tuple[int, int]], hidden: Tensor, prefixes: list[Tensor]
) -> Tensor:
    """Raw confidence logits [R, g]; c_k judges draft k from h_k and the token before it, never from draft k.

    ``places`` names request and position of every draft, in the order of ``hidden [M, d]`` and ``prefixes``.
    """
    assert pair.drafter is not None
    logits = torch.zeros(shape, dtype=torch.float32)
    if pair.drafter.has_confidence:
        values = pair.drafter.confidence(torch.cat(prefixes), hidden)
        logits[[r for r, _ in places], [k for _, k in places]] = values.float().cpu()
    return logits


def _select(state: Tensor | None, keep: Tensor) -> Tensor | None:
    return None if state is None else state[keep]
