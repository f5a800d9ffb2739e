"""What counts as a number wherever one comes from outside: in a request, a profile, a config, a file we wrote."""

from __future__ import annotations

import sys
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """A whole or floating-point number that a float can hold: JSON and TOML write whole numbers that none can."""
    # A comparison, for math.isfinite raises OverflowError over 10**400; NaN is not below anything.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def short(value: object) -> str:
    """How a value is named in an error: its repr, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
