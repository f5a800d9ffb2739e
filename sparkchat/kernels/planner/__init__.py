"""Verify lengths on the device. The rule, and why it keeps the output law, are ``engine/planner.py``'s."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.planner.reference import plan_lengths_reference

MOST_CANDIDATES = 4096


def plan_lengths(
    confidence: Tensor,
    temperatures: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    verify_lens: Tensor,
    *,
    extra_rows: int = 0,
    extra_tokens: float = 0.0,
    budget: Tensor | None = None,
) -> None:
    """Fill verify_lens [R] int32: drafts to verify of each request.

    confidence [R, g] float32 raw logits (one that is no number admits nothing), temperatures [g] float32, limits [R]
    int32 (-1: no such request), cost_ms [rows + 1] float64: milliseconds of a step by its rows, entry 0 unused, the
    last entry standing for more. ``extra_rows`` and ``extra_tokens`` as in engine/planner.py. Without ``budget``
    Algorithm 1 with early stop; with budget [1] int32 its likeliest drafts of the batch, whatever they cost. Raises
    ValueError for more than 4096 candidates.
    """
    requests, width = confidence.shape
    if requests * width > MOST_CANDIDATES:
        raise ValueError(f"{requests} requests of {width} drafts are more than {MOST_CANDIDATES} candidates")
    arguments = (confidence, temperatures, limits, cost_ms, verify_lens, extra_rows, extra_tokens, budget)
    if not confidence.is_cuda:
        plan_lengths_reference(*arguments)
        return
    from sparkchat.kernels.planner.kernel import launch_plan_lengths

    launch_plan_lengths(*arguments)
