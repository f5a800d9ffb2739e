"""From logits to the law a token is drawn from, the same way on the target's and on the drafter's side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkchat.engine import sampling
from sparkchat.engine.request import RequestState
from sparkchat.errors import UsageError

DAMAGED_MODEL = "the model's logits are not numbers: its weights are damaged; fetch it again"


def target_laws(
    logits: Tensor, states: Sequence[RequestState], row_starts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> Tensor:
    """logits [N, V] float32, changed in place -> laws [N, V] float32.

    Row ``row_starts[r] + i`` of request r stands behind its first i drafts. A request whose logits are not
    numbers, or whose settings leave no token, ends with an error; its rows become uniform and are not used.
    """
    bad = ~logits.amax(dim=1).isfinite()
    if bool(bad.any()):
        logits[bad] = 0.0
        for state, first, last in zip(states, row_starts, row_starts[1:], strict=False):
            if bool(bad[first:last].any()):
                state.finish("error", error=DAMAGED_MODEL)
    for state, tokens, first, last in zip(states, drafts, row_starts, row_starts[1:], strict=False):
        extra = [tuple(tokens[:i]) for i in range(last - first)]
        try:
            _shape(state, logits[first:last], extra, None)
        except UsageError as error:
            logits[first:last] = 0.0
            state.finish("error", error=error.message)
    rows_each = [last - first for first, last in zip(row_starts, row_starts[1:], strict=False)]
    return _laws(logits, states, rows_each)


def draft_laws(
    logits: Tensor, states: Sequence[RequestState], drafted: Sequence[Sequence[int]], index_of: Tensor | None
) -> Tensor:
    """logits [R, Vd] float32, changed in place -> the laws [R, Vd] the next draft of each request is drawn from.

    Any law is lossless as long as it is the one drawn from; where the settings leave the drafter no token of
    its vocabulary, it drafts blindly and the target turns the draft down.
    """
    logits.nan_to_num_(nan=0.0, posinf=1e30, neginf=-1e30)  # damage is found and reported by the caller
    for row, (state, tokens) in enumerate(zip(states, drafted, strict=True)):
        try:
            _shape(state, logits[row : row + 1], [tuple(tokens)], index_of)
        except UsageError:
            logits[row] = 0.0
    return _laws(logits, states, [1] * len(states))


def _shape(state: RequestState, logits: Tensor, extra: list[tuple[int, ...]], index_of: Tensor | None) -> None:
    sampling.shape_logits(
        logits,
        state.history,
        state.sampling,
        num_output=len(state.delivered),
        extra=extra,
        eos_ids=state.output.eos_ids,
        index_of=index_of,
    )


def _laws(logits: Tensor, states: Sequence[RequestState], rows_each: Sequence[int]) -> Tensor:
    settings = [
        (s.sampling.temperature, s.sampling.top_k, s.sampling.top_p, s.sampling.min_p)
        for s, rows in zip(states, rows_each, strict=True)
        for _ in range(rows)
    ]
    temperature, top_k, top_p, min_p = map(list, zip(*settings, strict=True))
    return sampling.probabilities(logits, temperature, top_k, top_p, min_p)
