"""Drafting from a shortlist: on a CPU, the sequential head and the draw look at the likeliest few hundred tokens only.

The law a draft is drawn from is renormalised over the shortlist, and that very law is what the acceptance test and
the residual use, so the output law stays the target's: a token the shortlist lacks is one the drafter never drafts.
A full vocabulary costs the Markov head, the filters and the draw a pass over every token for every position, which
on two cores is more than the drafter's layers cost; see benchmarks/results for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparkchat.engine.acceptance import Proposal
from sparkchat.engine.draft_temperature import SHARPENING, WIDEST, adapted
from sparkchat.engine.filters import SLACK, filter_law, top_k_law
from sparkchat.engine.laws import bias_draft_rows
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.sampling import GREEDY_BELOW
from sparkchat.models.dspark.lane_heads import NOTHING, SMALLEST_SCREENED, LaneHeads

SIZE = 256
SMALLEST_VOCABULARY = SMALLEST_SCREENED
"""Below this a pass over everything is cheap, and the exact law of the whole vocabulary is used."""
_NOTHING, _NO_COUNTS = np.zeros(0, dtype=bool), np.zeros(0, dtype=np.float32)


def suits(pair: LoadedPair) -> bool:
    """Whether this pair drafts from shortlists. Were it up to the requests of a batch, a seeded one would depend on
    its mates."""
    assert pair.drafter is not None
    if pair.device.type != "cpu" or pair.drafter.config.draft_vocab_size < SMALLEST_VOCABULARY:
        return False
    # One that makes the logits of a position when that is reached has nothing to choose from before.
    return hasattr(pair.drafter, "markov_rows")


class Shortlist:
    """The likeliest tokens of every block row by base logits, with what the sequential head needs of them."""

    def __init__(self, pair: LoadedPair, base: Tensor) -> None:
        """base [N, Vd] float32."""
        assert pair.drafter is not None
        columns = _largest(base.numpy(), SIZE)
        self.logits = np.take_along_axis(base.numpy(), columns, axis=1)
        """[N, M]"""
        index = torch.from_numpy(columns)
        mapping = pair.drafter.draft_to_target
        self.targets = columns if mapping is None else mapping.numpy()[columns]
        """[N, M] target ids"""
        rows = pair.drafter.markov_rows(index)
        self._rows = None if rows is None else rows.numpy()

    def biased(self, row: int, vector: np.ndarray | None) -> np.ndarray:
        """Logits [M] of one block row after the sequential head; vector [r]."""
        if self._rows is None or vector is None:
            return self.logits[row].copy()
        return self.logits[row] + self._rows[row] @ vector


def _largest(logits: np.ndarray, size: int) -> np.ndarray:
    """[N, size] columns of the largest entries of each row, ascending."""
    return np.sort(np.argpartition(logits, logits.shape[1] - size, axis=1)[:, logits.shape[1] - size :], axis=1)


def draw_by_kernel(
    pair: LoadedPair,
    heads: LaneHeads,
    states: Sequence[RequestState],
    lens: Sequence[int],
    drafting: Sequence[int],
    row_starts: Sequence[int],
    hidden: Tensor,
    base: Tensor,
    uniforms: Tensor,
) -> tuple[Proposal, set[int]]:
    """As ``draw_block``, a request in one call, the proposal with its confidences; and the requests with logits or
    biases that are no numbers."""
    from sparkchat.kernels.cpu import shortlist as kernel

    # A head whose columns were filled up to whole lanes gives a view of what it made.
    base = base.contiguous()
    width, rows, hidden_rows, u = max(lens), base.numpy(), hidden.numpy(), uniforms.numpy()
    ids = np.full((len(states), width), -1, dtype=np.int64)
    index = np.zeros((len(states), width), dtype=np.int64)
    probs = np.zeros((len(states), width, SIZE), dtype=np.float32)
    support = np.zeros((len(states), width, SIZE), dtype=np.int64)
    confidence = np.zeros((len(states), width), dtype=np.float32)
    vocab, damaged = pair.target.config.vocab_size, set()
    for i, r in enumerate(drafting):
        state, first, last, n = states[r], row_starts[i], row_starts[i + 1], lens[r]
        exact = heads.exact
        if state.sampling.logit_bias or state.sampling.min_tokens:
            # What is added lies in the logits of the whole vocabulary alone.
            exact = NOTHING
            bias_draft_rows(base[first:last], state, pair.draft_index_of)
        s = state.sampling
        is_counted = bool(s.presence_penalty or s.frequency_penalty)
        is_sound = kernel.draw_block(
            rows[first:last],
            hidden_rows[first:last],
            heads.mapping,
            heads.w1,
            heads.w2,
            heads.judge,
            state.history.seen_below(vocab) if s.repetition_penalty != 1.0 else _NOTHING,
            state.history.counts_below(vocab) if is_counted else _NO_COUNTS,
            _settings(state, heads.bias),
            state.anchor,
            u[i, :n],
            ids[r, :n],
            index[r, :n],
            probs[r, :n],
            support[r, :n],
            confidence[r, :n],
            *exact,
        )
        if not is_sound:
            damaged.add(r)
    proposal = Proposal(
        ids=torch.from_numpy(ids),
        lens=torch.tensor(list(lens)),
        probs=torch.from_numpy(probs),
        draft_index=torch.from_numpy(index),
        confidence_logit=torch.from_numpy(confidence),
        draft_to_target=torch.from_numpy(support),
    )
    return proposal, damaged


def _settings(state: RequestState, confidence_bias: float) -> np.ndarray:
    """Of the kernel, by the places that it names."""
    s = state.sampling
    is_adaptive = state.draft_temperature == "adaptive"
    return np.array(
        (
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            state.is_greedy,
            WIDEST if is_adaptive else 0.0,
            SHARPENING,
            SLACK,
            confidence_bias,
        ),
        np.float64,
    )


@np.errstate(over="ignore", invalid="ignore")  # what is no number is found and reported
def draw_block(
    pair: LoadedPair,
    states: Sequence[RequestState],
    lens: Sequence[int],
    drafting: Sequence[int],
    row_starts: Sequence[int],
    hidden: Tensor,
    base: Tensor,
    uniforms: Tensor,
) -> tuple[Proposal, list[list[int]], set[int]]:
    """Draw every block from its shortlist; hidden [N, d], base [N, Vd] changed in place, uniforms [drafting, g].

    Returns the proposal, its confidences not filled in; the token before each draft, per drafting request; and the
    requests whose sequential head gave no numbers.
    """
    assert pair.drafter is not None
    for i, r in enumerate(drafting):
        bias_draft_rows(base[row_starts[i] : row_starts[i + 1]], states[r], pair.draft_index_of)
    shortlist, width = Shortlist(pair, base), max(lens)
    ids = np.full((len(states), width), -1, dtype=np.int64)
    index = np.zeros((len(states), width), dtype=np.int64)
    probs = np.zeros((len(states), width, SIZE), dtype=np.float32)
    support = np.zeros((len(states), width, SIZE), dtype=np.int64)
    befores: list[list[int]] = []
    damaged: set[int] = set()
    for i, r in enumerate(drafting):
        state, previous, before = states[r], states[r].anchor, []
        markov = pair.drafter.initial_state(1)
        for k in range(lens[r]):
            row = row_starts[i] + k
            before.append(previous)
            vector, markov = pair.drafter.markov_vector(torch.tensor([previous]), hidden[row : row + 1], markov)
            logits = shortlist.biased(row, None if vector is None else vector[0].numpy())
            targets = shortlist.targets[row]
            if np.isnan(logits).any() or logits.max() == np.inf:
                damaged.add(r)
            _penalise(logits, targets, state, before[1:])
            law = _law(logits, state)
            place = _draw(law, float(uniforms[i, k]))
            previous = int(targets[place])
            ids[r, k], index[r, k], probs[r, k], support[r, k] = previous, place, law, targets
        befores.append(before)
    proposal = Proposal(
        ids=torch.from_numpy(ids),
        lens=torch.tensor(list(lens)),
        probs=torch.from_numpy(probs),
        draft_index=torch.from_numpy(index),
        draft_to_target=torch.from_numpy(support),
    )
    return proposal, befores, damaged


def _penalise(logits: np.ndarray, targets: np.ndarray, state: RequestState, drafted: Sequence[int]) -> None:
    """Repetition, presence and frequency penalties in place, by the rules of ``sampling.shape_logits``."""
    s = state.sampling
    if s.repetition_penalty != 1.0:
        seen = state.history.has_seen(targets)
        if drafted:
            seen |= np.isin(targets, drafted)
        values = logits[seen]
        logits[seen] = np.where(values < 0, values * s.repetition_penalty, values / s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        counts = state.history.counts_of(targets)
        for token, times in Counter(drafted).items():
            counts[targets == token] += times
        logits -= np.where(counts > 0, s.presence_penalty + s.frequency_penalty * counts, 0.0).astype(np.float32)


def _law(logits: np.ndarray, state: RequestState) -> np.ndarray:
    """[M] float32: the law the draft is drawn from; one-hot when greedy."""
    s = state.sampling
    law = np.zeros_like(logits)
    if s.temperature < GREEDY_BELOW or not np.isfinite(logits.max()):
        # Without a number to go by it drafts blindly, and the target turns the draft down.
        law[int(np.nan_to_num(logits, nan=-np.inf).argmax())] = 1.0
        return law
    temperature = s.temperature
    if state.draft_temperature == "adaptive":
        temperature = adapted(temperature, 1.0 / float(np.exp((logits - logits.max()) / temperature).sum()))
    if 0 < s.top_k < len(logits):
        top_k_law(logits, temperature, s.top_k, s.top_p, s.min_p, law)
        return law
    law = np.exp((logits - logits.max()) / np.float32(temperature))
    law /= law.sum(dtype=np.float64)
    if s.top_p < 1.0 or s.min_p > 0.0:
        filter_law(law, s.top_p, s.min_p)
    return law


def _draw(law: np.ndarray, u: float) -> int:
    """Inverse CDF; an entry of zero is never drawn."""
    sums = np.cumsum(law, dtype=np.float64)
    place = int(np.searchsorted(sums, u * sums[-1], side="right"))
    # The first sum above a number is that of an entry above zero; rounding may leave none above it.
    return place if place < len(law) else int(np.flatnonzero(law)[-1])
