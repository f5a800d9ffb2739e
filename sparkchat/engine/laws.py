"""From logits to the law a token is drawn from, the same way on the target's and on the drafter's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparkchat.engine import sampling
from sparkchat.engine.draft_temperature import draft_temperatures
from sparkchat.engine.filters import filter_law
from sparkchat.engine.request import RequestState
from sparkchat.errors import UsageError

DAMAGED_MODEL = "the model's logits are not numbers: its weights are damaged; fetch it again"
DAMAGED_DRAFTER = "the drafter's logits are not numbers: its weights are damaged; run with --drafter none"
TOO_STRONG = (
    "repetition_penalty, presence_penalty or frequency_penalty pushes logits past what numbers hold; give a milder one"
)


@dataclass(frozen=True)
class TargetRows:
    """What the target says at every row of a step."""

    logits: Tensor
    """[N, V] float32, bias and penalties applied."""
    law: Tensor | None
    """[N, V] float32, one-hot at greedy rows; None when every request is greedy."""
    argmax: Tensor | None
    """[N] int64; None when no request is greedy."""
    is_greedy: tuple[bool, ...]
    """Per request."""
    damaged_from: dict[int, int] = field(default_factory=dict)
    """Of requests with logits that are no numbers behind some draft: how many drafts stand before the first such row.
    Harmless unless all of them are accepted."""


def target_laws(
    logits: Tensor, states: Sequence[RequestState], row_starts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> TargetRows:
    """logits [N, V] float32, changed in place, to laws.

    Row ``row_starts[r] + i`` of request r stands behind its first i drafts. A request whose first row is not of
    numbers, or whose settings leave no token, ends with an error; rows that are none become uniform.
    """
    law = _plain_laws(logits, states, row_starts, drafts)
    if law is not None:
        return TargetRows(logits, law, None, (False,) * len(states))
    damaged_from: dict[int, int] = {}
    bad = ~sampling.row_peaks(logits).isfinite()
    if bool(bad.any()):
        logits[bad] = 0.0
        for r, (first, last) in enumerate(pairwise(row_starts)):
            if bool(bad[first]):
                states[r].finish("error", error=DAMAGED_MODEL)
            elif bool(bad[first:last].any()):
                damaged_from[r] = int(bad[first:last].int().argmax())
    _shape_all(logits, states, row_starts, drafts)
    is_greedy = tuple(state.is_greedy for state in states)
    law = None
    if not all(is_greedy):
        law = _laws(logits, states, [last - first for first, last in pairwise(row_starts)])
    argmax = sampling.argmax_ids(logits) if any(is_greedy) else None
    return TargetRows(logits, law, argmax, is_greedy, damaged_from)


def _shape_all(
    logits: Tensor, states: Sequence[RequestState], row_starts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> None:
    for state, tokens, first, last in zip(states, drafts, row_starts, row_starts[1:], strict=False):
        extra = [tuple(tokens[:i]) for i in range(last - first)]
        try:
            _shape(state, logits[first:last], extra, None)
        except UsageError as error:
            logits[first:last] = 0.0
            state.finish("error", error=error.message)


def _plain_laws(
    logits: Tensor, states: Sequence[RequestState], row_starts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> Tensor | None:
    """The laws of requests that draw by penalties, temperature, top-p and min-p alone, in one call; None for all
    others, and where a row is not of numbers, which is found before anything is changed."""
    if not all(_is_plain(state) for state in states) or not sampling.has_kernels(logits):
        return None
    if any(_is_penalised(state) for state in states):
        if not sampling.are_numbers(logits):
            return None
        _shape_all(logits, states, row_starts, drafts)
    from sparkchat.kernels.cpu.laws import make_laws

    settings = [state.sampling for state in states]
    counts = [last - first for first, last in pairwise(row_starts)]
    temperatures = np.array([s.temperature for s, n in zip(settings, counts, strict=True) for _ in range(n)])
    law = torch.empty(logits.shape)
    logits = logits.contiguous()
    if not make_laws(logits.numpy(), temperatures, law.numpy()):
        return None
    for s, first, last in zip(settings, row_starts, row_starts[1:], strict=False):
        if s.top_p < 1.0 or s.min_p > 0.0:
            for row in law[first:last].numpy():
                filter_law(row, s.top_p, s.min_p)
    return law


def _is_plain(state: RequestState) -> bool:
    """Whether logits become the law by penalties, temperature, top-p and min-p alone."""
    s = state.sampling
    return not (state.is_greedy or s.logit_bias or s.top_k > 0 or s.min_tokens > len(state.delivered))


def _is_penalised(state: RequestState) -> bool:
    s = state.sampling
    return s.repetition_penalty != 1.0 or bool(s.presence_penalty or s.frequency_penalty)


def draw_next(rows: TargetRows, uniforms: Tensor) -> list[int]:
    """One token per row [N] from its law; uniforms [N]. For rows that belong to one request each."""
    if rows.law is None:
        assert rows.argmax is not None
        return rows.argmax.tolist()
    drawn = sampling.draw(rows.law, uniforms)
    if rows.argmax is not None:
        drawn = torch.where(torch.tensor(rows.is_greedy, device=drawn.device), rows.argmax, drawn)
    return drawn.tolist()


def draft_laws(
    logits: Tensor, states: Sequence[RequestState], drafted: Sequence[Sequence[int]], index_of: Tensor | None
) -> Tensor | None:
    """logits [R, Vd] float32, changed in place -> the laws [R, Vd] the next draft of each request is drawn from.

    None when all requests are greedy: the draft is the argmax of the changed logits.

    Any law is lossless as long as it is the one drawn from; where the settings leave the drafter no token of
    its vocabulary, it drafts blindly and the target turns the draft down.
    """
    logits.nan_to_num_(nan=0.0, posinf=1e30, neginf=-1e30)  # the caller ends requests with such logits
    for row, (state, tokens) in enumerate(zip(states, drafted, strict=True)):
        try:
            _shape(state, logits[row : row + 1], [tuple(tokens)], index_of)
        except UsageError:
            logits[row] = 0.0
    if all(state.is_greedy for state in states):
        return None
    return _laws(logits, states, [1] * len(states), draft_temperatures(logits, states))


def bias_draft_rows(logits: Tensor, state: RequestState, index_of: Tensor | None) -> None:
    """Logit bias and minimum length on logits [n, Vd] of a whole block, in place: what the drafts do not change."""
    params = replace(state.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    try:
        sampling.shape_logits(
            logits,
            state.history,
            params,
            num_output=len(state.delivered),
            extra=[(0,) * i for i in range(len(logits))],
            eos_ids=state.output.eos_ids,
            index_of=index_of,
        )
    except UsageError:
        logits.zero_()  # nothing is left that may be drafted


def _shape(state: RequestState, logits: Tensor, extra: list[tuple[int, ...]], index_of: Tensor | None) -> None:
    """Raises UsageError when the settings leave no token, or no number."""
    params = state.sampling
    sampling.shape_logits(
        logits,
        state.history,
        params,
        num_output=len(state.delivered),
        extra=extra,
        eos_ids=state.output.eos_ids,
        index_of=index_of,
    )
    if _is_penalised(state) and not sampling.are_numbers(logits):
        raise UsageError(TOO_STRONG)


def _laws(
    logits: Tensor,
    states: Sequence[RequestState],
    rows_each: Sequence[int],
    temperatures: Sequence[float] | None = None,
) -> Tensor:
    """``temperatures``, one a row, in the place of the requests' own."""
    settings = [
        (s.sampling.temperature, s.sampling.top_k, s.sampling.top_p, s.sampling.min_p)
        for s, rows in zip(states, rows_each, strict=True)
        for _ in range(rows)
    ]
    temperature, top_k, top_p, min_p = map(list, zip(*settings, strict=True))
    return sampling.probabilities(logits, temperatures or temperature, top_k, top_p, min_p)
