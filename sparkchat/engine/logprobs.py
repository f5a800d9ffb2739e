"""Log-probabilities of delivered tokens, for the requests that ask for them; nobody else pays for them.

They are the model's own: of its raw logits, before bias, penalties, temperature and filters (as vLLM's default, so that
figures of two engines can be laid side by side).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.output import OutputStream
from sparkchat.engine.request import RequestState

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (OpenAI's and vLLM's convention)."""


class Scores:
    """The model's log-probabilities at the rows of one request in one pass."""

    def __init__(self, rows: Tensor, num_top: int) -> None:
        """``rows [n, V]`` float32; ``num_top`` likeliest tokens are reported beside the delivered one."""
        self._rows = rows
        self._num_top = num_top

    def of(self, run: Sequence[int], output: OutputStream) -> list[dict[str, Any]]:
        """One record per token of a run, whose i-th token was decided by row i."""
        places = torch.tensor(run, dtype=torch.int64, device=self._rows.device)[:, None]
        rows = self._rows[: len(run)]
        chosen = rows.gather(1, places)[:, 0].tolist()
        values, ids = rows.topk(min(self._num_top, rows.shape[1]), dim=1)
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        return [
            {**_record(token, value, output), "top": [_record(other, score, output) for other, score in top]}
            for token, value, top in zip(run, chosen, tops, strict=True)
        ]


def keep_scores(logits: Tensor, states: Sequence[RequestState], row_starts: Sequence[int]) -> None:
    """Give each request that wants log-probabilities those of its rows of ``logits [N, V]``, before they are shaped."""
    for state, first, last in zip(states, row_starts, row_starts[1:], strict=False):
        if state.request.logprobs is not None:
            state.scores = Scores(torch.log_softmax(logits[first:last], dim=-1), state.request.logprobs)


def _record(token: int, value: float, output: OutputStream) -> dict[str, Any]:
    return {
        "id": token,
        "token": output.text_of(token),
        "bytes": list(output.bytes_of(token)),
        "logprob": max(value, LOWEST),
    }
