"""Made-up weights in the stored forms of a config, made on the device: for timing and memory without a download.

A tensor is a function of its name and shape alone, so every rank of any group holds its part of the same model. Weights
are near normal with standard deviation 0.02 and so keep activations of order one; what such a model says means nothing.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.formats import FP4_BLOCK, FP8_BLOCK, ScaledWeight, Stored
from sparkchat.models.deepseek_v4.layout import Layout
from sparkchat.models.deepseek_v4.weights import Part, check_ranks, part_of
from sparkchat.models.parallel import ALONE, Group

STD = 0.02
# Codes drawn evenly from the 16 of e2m1 have a standard deviation of 2.9; normal e4m3 codes one of 1.
_FP4_SCALE, _FP8_SCALE = 127 - 7, 127 - 6


class DummyCheckpoint:
    """A ``TensorReader`` that has every tensor of a layout."""

    def __init__(self, config: DeepseekV4Config, layout: Layout, device: torch.device, group: Group = ALONE) -> None:
        """Raises UsageError where the group does not divide the model."""
        check_ranks(config, group.size)
        self._config, self._layout, self._device, self._group = config, layout, device, group

    def take(self, name: str) -> Stored:
        spec = self._layout[name]
        part = part_of(name, spec.shape, self._group.rank, self._group.size)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        if spec.storage in ("fp4", "fp8"):
            weight = self._scaled(spec.shape, spec.storage == "fp4", generator)
            # A copy, so that what belongs to other ranks is not kept with it.
            return weight if part is None else _copied(weight.part(part.axis, part.start, part.stop))
        return _cut(self._plain(name, spec.shape, spec.storage, generator), part)

    def finish(self) -> None:
        """Nothing is ever left over."""

    def _scaled(self, shape: tuple[int, ...], is_fp4: bool, generator: torch.Generator) -> ScaledWeight:
        rows, columns = shape
        block, byte = (FP4_BLOCK, _FP4_SCALE) if is_fp4 else (FP8_BLOCK, _FP8_SCALE)
        scale_shape = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        scales = torch.full(scale_shape, byte, dtype=torch.uint8, device=self._device)
        if is_fp4:
            codes = torch.empty((rows, columns // 2), dtype=torch.int8, device=self._device)
            return ScaledWeight(codes.random_(-128, 128, generator=generator), scales, block)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(generator=generator)
        return ScaledWeight(values.to(torch.float8_e4m3fn), scales, block)

    def _plain(self, name: str, shape: tuple[int, ...], storage: str, generator: torch.Generator) -> Tensor:
        if storage == "i64":
            # Experts of a token all differ.
            first = torch.randint(self._config.num_experts, (shape[0], 1), generator=generator, device=self._device)
            return (first + torch.arange(shape[1], device=self._device)) % self._config.num_experts
        dtype = torch.bfloat16 if storage == "bf16" else torch.float32
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if name.endswith(("norm.weight", "_scale")):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, STD, generator=generator)


def _copied(weight: ScaledWeight) -> ScaledWeight:
    return ScaledWeight(weight.codes.clone(), weight.scales.clone(), weight.block)


def _cut(tensor: Tensor, part: Part | None) -> Tensor:
    return tensor if part is None else tensor.narrow(part.axis, part.start, part.stop - part.start).clone()
