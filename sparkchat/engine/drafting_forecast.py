"""Tokens per second that drafting is expected to bring, before anybody drafts."""

from __future__ import annotations

import numpy as np

from sparkchat.engine.cost_table import StepCosts


def forecast_theta(
    blocks: np.ndarray, requests: int, cost: StepCosts, rows: int = 0, tokens: float = 0.0, *, is_lagged: bool
) -> float:
    """Tokens per second of a step in which ``requests`` draft blocks like these, survivals [m, g].

    ``rows`` and ``tokens``: of others in the same step. As the planner will choose among drafts, by lagged budgets or
    by the early stop, so that what it gains by choosing is foreseen too.
    """
    together = min(requests, len(blocks))
    groups, scale = len(blocks) // together, requests / together
    # Every group has blocks from all over the sample, which is in order of time and kind; so do those left out.
    taken = blocks[np.arange(together * groups) * len(blocks) // (together * groups)]
    values = taken.reshape(together, groups, -1).swapaxes(0, 1).reshape(groups, -1)
    values[:, ::-1].sort(axis=1)
    gained = np.concatenate([np.zeros((groups, 1)), values.cumsum(axis=1)], axis=1) * scale
    drafts = np.ceil(np.arange(gained.shape[1]) * scale).astype(int)
    first = requests + rows
    times = cost.times(first, drafts[-1] + 1)[drafts]
    if is_lagged:
        return 1000.0 * float(((requests + tokens + gained.mean(axis=0)) / times).max())
    expected = requests + tokens + gained
    planned = _planned(cost, first + drafts, times)
    grows = expected[:, 1:] / planned[1:] > expected[:, :-1] / planned[:-1]
    goes_on = grows | (times[1:] <= times[:-1])
    # The first loss ends it; behind the last draft there is nothing.
    stops = np.argmin(np.concatenate([goes_on, np.zeros((groups, 1), dtype=bool)], axis=1), axis=1)
    return 1000.0 * float(expected[np.arange(groups), stops].sum() / times[stops].sum())


def _planned(cost: StepCosts, rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """``StepCosts.planned_ms`` of many numbers of rows, whose ``step_ms`` are ``times``."""
    if not cost.hull:
        return times
    corners, heights = zip(*cost.hull, strict=True)
    on_hull = np.interp(rows, corners, heights) + cost.fixed_ms + cost.row_ms * rows
    return np.where((rows >= corners[0]) & (rows <= corners[-1]), on_hull, times)
