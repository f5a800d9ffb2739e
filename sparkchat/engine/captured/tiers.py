"""How many rows a captured verification has: exact where a row more or less shows, coarser beyond."""

from __future__ import annotations

from bisect import bisect_left

EXACT_WINDOWS = 4
"""Up to this many windows of block + 1 rows, every count has a graph of its own: at batch 1 a trimmed block then costs
what its rows cost."""


def row_tiers(block: int, seats: int) -> tuple[int, ...]:
    """Row counts that are captured for up to ``seats`` requests, ascending; the last is the most there can be."""
    window = block + 1
    most = window * seats
    tiers = list(range(1, min(most, EXACT_WINDOWS * window) + 1))
    windows = EXACT_WINDOWS
    while tiers[-1] < most:
        windows += 1 if windows < 8 else 2 if windows < 16 else 4 if windows < 32 else 8
        tiers.append(min(most, windows * window))
    return tuple(tiers)


def request_tiers(seats: int) -> tuple[int, ...]:
    """Request counts that a draft is captured for: exact to 8, then every fourth, then every eighth."""
    tiers = list(range(1, min(seats, 8) + 1))
    while tiers[-1] < seats:
        tiers.append(min(seats, tiers[-1] + (4 if tiers[-1] < 32 else 8)))
    return tuple(tiers)


def round_up(count: int, tiers: tuple[int, ...]) -> int:
    """The first tier that holds ``count``. Raises ValueError when none does."""
    place = bisect_left(tiers, count)
    if place == len(tiers):
        raise ValueError(f"{count} is more than the largest tier, {tiers[-1]}")
    return tiers[place]
