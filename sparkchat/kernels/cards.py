"""What a graphics card offers that kernels, and how they are started, depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Card:
    """Of one make; cards before compute capability 9.0 (A100, RTX 30 and 40) lack some of what an H200 has."""

    capability: tuple[int, int]
    shared_bytes: int
    """Shared memory that one program may have."""
    is_nvidia: bool = True

    @property
    def runs_kernels(self) -> bool:
        """Whether the compiler serves it, and it multiplies bfloat16 by matrix instructions."""
        return self.is_nvidia and self.capability >= (8, 0)

    @property
    def starts_early(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return self.is_nvidia and self.capability >= (9, 0)

    @property
    def reads_tiles(self) -> bool:
        """Whether it runs the kernels of weights in tiles, whose plans fill the shared memory of these cards."""
        return self.starts_early and self.shared_bytes >= H200.shared_bytes


H200 = Card((9, 0), 232_448)
_stand_in = H200


def card_of(device: torch.device) -> Card:
    """What ``device`` offers; of tensors on the CPU, that is where kernels are interpreted or compiled ahead, what
    ``assumed`` says."""
    return _read(device) if device.type == "cuda" else _stand_in


@contextmanager
def assumed(card: Card) -> Iterator[None]:
    """Within the block kernels are planned for ``card`` where there is none."""
    global _stand_in
    before, _stand_in = _stand_in, card
    try:
        yield
    finally:
        _stand_in = before


@cache
def _read(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    return Card(
        (properties.major, properties.minor), properties.shared_memory_per_block_optin, torch.version.hip is None
    )
