"""Which launches of an attention sub-block are joined, for few rows."""

from __future__ import annotations

import os
from dataclasses import dataclass

SWITCH = "SPARKCHAT_V4_LAUNCHES"
"""In the environment: the fields below that are on, by commas; ``apart`` for none."""


@dataclass(frozen=True)
class Launches:
    """How a sub-block is launched."""

    input: bool = False
    """What is made of its input up to queries, in one launch (kernels/compressor/input.py)"""
    output: bool = False
    """Attention and the products behind it, in one launch (kernels/latent_attention/output.py)"""
    asks: bool = False
    """Small launches call the weights of those behind them into L2"""

    @classmethod
    def chosen(cls) -> Launches:
        """As ``SWITCH`` says, or the best that was measured. Raises ValueError for a name that is none."""
        names = os.environ.get(SWITCH)
        if names is None:
            return cls()
        on = set() if names == "apart" else set(names.split(","))
        if unknown := on - {"input", "output", "asks"}:
            raise ValueError(f"{SWITCH} names {', '.join(sorted(unknown))}; choose from input, output, asks, or apart")
        return cls(**dict.fromkeys(on, True))
