"""How the router is launched. Nothing here changes a bit of what it gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatePlan:
    """One way to launch it."""

    warps: int = 1
    """Of a row's program: with one, nothing is said between warps in finding the largest, time after time."""
    is_one: bool = True
    """Whether of few rows the program that ends last makes the lists; a launch of its own where not."""
    listed: int = 2
    """Experts of a program where lists are a launch of their own: each compares all choices with all of its experts."""


PLAN = GatePlan()
TRIED = (
    PLAN,
    GatePlan(2),
    GatePlan(4),
    GatePlan(1, False),
    GatePlan(4, False),
    GatePlan(1, False, 4),
    GatePlan(1, False, 8),
)
FEW_CHOICES = 64
"""Of all rows: so many are listed by one program, each compared with each; of 96 two launches were faster."""
