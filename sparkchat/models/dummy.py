"""Random weights in the shapes that a config asks for, made on the device: for timing without a download.

They are a pure function of tensor name and shape, so two loads give the same model. Linear weights are normal with
standard deviation 0.02, the initial value of the published families; norms are one. Activations stay of order one, and
what such a model says means nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

STD = 0.02


class DummySource:
    """A ``TensorSource`` that has every tensor it is asked for."""

    has_paired_rotary = False

    def __init__(self, device: torch.device, dtype: torch.dtype, absent: Iterable[str] = ()) -> None:
        """``absent``: names that are not there, where a checkpoint may leave a tensor out."""
        self._device, self._dtype, self._absent = device, dtype, frozenset(absent)

    def __contains__(self, name: str) -> bool:
        return name not in self._absent

    def dtype_of(self, name: str) -> str:
        """As safetensors names it."""
        return {torch.float32: "F32", torch.float16: "F16"}.get(self._dtype, "BF16")

    def take(self, name: str, *shape: int, allow_nan: bool = False) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.normal_(0.0, STD, generator=generator)

    def take_whole_numbers(self, name: str) -> Tensor:
        raise ValueError(f"{name} is no weight, and cannot be made up")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Nothing is ever left over."""


DRAFTER_ABSENT = ("embed_tokens.weight", "lm_head.weight", "d2t", "markov_head.markov_w2.bias")
"""A dummy drafter shares the target's embedding and head, as a loaded one does."""
