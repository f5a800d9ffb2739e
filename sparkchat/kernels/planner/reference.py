"""Algorithm 1 in plain Python on float64 survivals."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_lengths_reference(
    confidence: Tensor,
    temperatures: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    verify_lens: Tensor,
    extra_rows: int,
    extra_tokens: float,
    budget: Tensor | None,
) -> None:
    """See ``plan_lengths``."""
    logits = confidence.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    alive = torch.sigmoid(logits / temperatures.double()).cumprod(dim=1).tolist()
    cost, most = cost_ms.tolist(), limits.tolist()
    candidates = sorted(
        (-value, place, request)
        for request, (values, limit) in enumerate(zip(alive, most, strict=True))
        for place, value in enumerate(values[: max(0, limit)], start=1)
        if value > 0.0
    )
    present = sum(limit >= 0 for limit in most)
    rows, tokens = present + extra_rows, present + extra_tokens
    lens = [0] * len(most)
    for number, (negative, place, request) in enumerate(candidates):
        if budget is None:
            now, more = (cost[min(n, len(cost) - 1)] for n in (rows, rows + 1))
            if (tokens - negative) / more <= tokens / now:
                break
        elif number >= int(budget):
            break
        lens[request] = place
        rows, tokens = rows + 1, tokens - negative
    verify_lens.copy_(torch.tensor(lens, dtype=torch.int32))
