"""Weights called into the L2 cache before they are needed, on a stream beside the one that computes.

Small kernels of a layer wait for each other and leave the memory idle. What a product behind them reads can come into
the cache meanwhile: a launch that asks for it and waits for nothing. Nothing is computed, so nothing can come out
otherwise; it helps where there is idle time and costs where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

SWITCH = "SPARKCHAT_WEIGHTS_AHEAD"
"""In the environment: 1 calls weights ahead. Not on by itself: what was measured speaks against it, though not side by
side (benchmarks/results/2026-11-30-v4-two-gpus.md)."""
MOST_PIECES = 4
"""Of memory, that one launch asks for."""


class Lane:
    """Asks for weights ahead of the stream that computes; without a stream of its own it does nothing."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        self._side, self._is_open = side, False

    @classmethod
    def of(cls, device: torch.device) -> Lane:
        """For a device, where ``SWITCH`` asks for it."""
        is_on = device.type == "cuda" and os.environ.get(SWITCH) == "1"
        return cls(torch.cuda.Stream(device) if is_on else None)

    def call(self, *weights: Tensor | None) -> None:
        """Ask for at most ``MOST_PIECES`` weights once all that was launched so far is done. It may stand in a graph,
        up to ``join``. Raises ValueError for more.

        Where kernels start early (launch.overlap), products call their own weights, and nothing is done here.
        """
        if self._side is None:
            return
        # Triton is not there where there is no GPU.
        from sparkchat.kernels.ahead.kernel import launch_call_ahead
        from sparkchat.kernels.launch import starts_early

        if starts_early(is_streaming=False):
            return

        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            launch_call_ahead(pieces(weights))
        self._is_open = True

    def join(self) -> None:
        """Behind the last ``call`` of a stage."""
        if self._side is not None and self._is_open:
            torch.cuda.current_stream().wait_stream(self._side)
            self._is_open = False


def pieces(weights: Sequence[Tensor | None]) -> list[tuple[Tensor, int]]:
    """Weights and their bytes, whole units of 16."""
    found = [(weight, weight.nbytes // 16 * 16) for weight in weights if weight is not None and weight.nbytes >= 16]
    if len(found) > MOST_PIECES or not all(weight.is_contiguous() for weight, _ in found):
        raise ValueError(f"{len(found)} weights cannot be asked for at once: at most {MOST_PIECES}, each in one piece")
    return found
