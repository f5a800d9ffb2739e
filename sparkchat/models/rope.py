"""Rotary position embedding as a product of complex numbers.

Model files pair dimension i of a head with i + head_dim/2. Loading interleaves the pairs (weights.py), so that a head
is a row of head_dim/2 complex numbers and the rotation is one multiplication; scores do not change, because queries
and keys are permuted alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Base frequency and long-context scaling, as in Hugging Face's ``rope_parameters``."""

    theta: float = 10000.0
    kind: str = "default"
    """default | linear | llama3 | yarn | proportional"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    rotated_share: float = 1.0
    """Of proportional: the first pairs, up to this share of a head, turn; the others stand still."""


ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angles per position [head_dim/2] float32 and the factor on cosine and sine."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**steps)
    if config.kind == "proportional":
        num_rotated = int(config.rotated_share * head_dim // 2)
        return torch.where(torch.arange(head_dim // 2) < num_rotated, plain / config.factor, 0.0), 1.0
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    return plain, 1.0


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Slow waves are stretched by ``factor``, fast ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    long_wave = config.original_context / config.low_freq_factor
    short_wave = config.original_context / config.high_freq_factor
    blend = (config.original_context / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    mixed = (1 - blend) * plain / config.factor + blend * plain
    scaled = torch.where(wavelength > long_wave, plain / config.factor, plain)
    is_between = (wavelength <= long_wave) & (wavelength >= short_wave)
    return torch.where(is_between, mixed, scaled)


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """NTK-by-parts interpolation with attention scaling (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = config.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = plain / config.factor * ramp + plain * (1 - ramp)
    attention = config.attention_factor
    if attention is None:
        attention = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return frequencies, attention


class RopeTable:
    """Rotations by position, computed as far as they have been asked for."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self._factor = inverse_frequencies(config, head_dim)
        self._frequencies = frequencies.to(device)
        self._table = self._rotations(0, 256)
        self._numbers: Tensor | None = None

    def _rotations(self, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        return torch.complex(angles.cos() * self._factor, angles.sin() * self._factor)

    def prepare(self, end: int) -> None:
        """Compute what lies below ``end`` now, so that ``at`` can be captured; doubles at least."""
        known = self._table.shape[0]
        if end > known:
            self._table = torch.cat([self._table, self._rotations(known, max(end, 2 * known))])
            self._numbers = None

    @property
    def numbers(self) -> Tensor:
        """[P, head_dim] float32, cosine and sine of each pair side by side, as far as they have been computed."""
        if self._numbers is None:
            self._numbers = torch.view_as_real(self._table).flatten(1)
        return self._numbers

    def at(self, positions: Tensor) -> Tensor:
        """As ``rows``, for positions that ``prepare`` has reached."""
        return self._table.index_select(0, positions)

    def rows(self, positions: Tensor, end: int) -> Tensor:
        """positions [N] int64, all below ``end`` -> [N, head_dim/2] complex64."""
        self.prepare(end)
        return self._table.index_select(0, positions)
