"""Pinned copies between host and device that nobody waits for before they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEPTH = 3
"""Steps whose host buffers are alive at once: one being filled, one in flight, one being read."""


class HostClock:
    """Stands in for CUDA events on a CPU, where everything has happened when it was asked for."""

    def record(self) -> None:
        import time

        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostClock) -> float:
        """Milliseconds, as CUDA events give them."""
        return (later._at - self._at) * 1e3


def new_event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostClock()


@dataclass
class RingSlot:
    """Host buffers and marks in time of one step in flight."""

    words: Tensor
    records: Tensor
    started: Any
    drafted: Any
    verified: Any
    copied: Any


class PinnedRing:
    """``DEPTH`` slots in turn. A slot comes round again only after its step was read, so nothing is overwritten."""

    def __init__(self, words: Tensor, records: Tensor) -> None:
        device = words.device
        pin = device.type == "cuda"

        def host(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=like.dtype, pin_memory=pin)

        self._device_words, self._device_records = words, records
        self._slots = [
            RingSlot(host(words), host(records), *(new_event(device) for _ in range(4))) for _ in range(DEPTH)
        ]
        self._next = 0

    def take(self) -> RingSlot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % DEPTH
        return slot

    def upload(self, slot: RingSlot) -> None:
        self._device_words.copy_(slot.words, non_blocking=True)

    def download(self, slot: RingSlot) -> None:
        slot.records.copy_(self._device_records, non_blocking=True)
        slot.copied.record()
