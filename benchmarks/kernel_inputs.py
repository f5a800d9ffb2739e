"""Inputs of the kernels that are timed: random on a GPU, shapes alone where kernels are only compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkchat.kernels.sampling import DrawSettings

HALF = torch.bfloat16
D, INTER, HEADS, KV, DIM, VOCAB, RANK, LAYERS = 4096, 12288, 32, 8, 128, 151936, 256, 36
PRODUCTS = (
    ("qkv", 6144, D, "partials"),
    ("o", D, D, "partials"),
    ("gate_up", 2 * INTER, D, "silu_mul"),
    ("down", D, INTER, "partials"),
    ("head", VOCAB, D, "none"),
)
ROTATE_BYTES = 400 << 20


Run = Callable[[int], None]


@dataclass
class Case:
    """Something to time."""

    name: str
    bytes: int
    """That must be read."""
    sets: int
    """Sets of inputs; a run takes the number of one."""
    variants: dict[str, Run]
    peer: Run | None = None
    found: dict[str, float] = field(default_factory=dict)


class Maker:
    """Makes tensors: random on a GPU; without contents on the CPU, where kernels are only compiled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_real = device.type == "cuda"

    def half(self, *shape: int, scale: float = 0.02) -> Tensor:
        t = torch.empty(shape, dtype=HALF, device=self.device)
        return t.normal_(0, scale) if self.is_real else t

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        t = torch.empty(shape, device=self.device)
        return t.normal_(0, scale) if self.is_real else t

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def sets(self, each: int) -> int:
        return max(2, -(-ROTATE_BYTES // each)) if self.is_real else 1


def settings_of(make: Maker, requests: int, law: tuple[float, int, float]) -> DrawSettings:
    settings = DrawSettings.empty(requests, make.device)
    settings.temperature.fill_(law[0])
    settings.top_k.fill_(law[1])
    settings.top_p.fill_(law[2])
    settings.seeds.copy_(torch.arange(requests))
    return settings


def logits_of(make: Maker, *shape: int) -> Tensor:
    """Peaked as a language model's are: most of the mass on a few tokens."""
    logits = make.floats(*shape, scale=2.0)
    if make.is_real:
        logits[..., ::3001] += 8
    return logits
