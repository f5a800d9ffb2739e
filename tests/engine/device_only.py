"""A guard around code that is to be captured: it may ask the host nothing, and take nothing from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "unique",
    "equal",
    "masked_select",
    "lift_fresh",  # torch.tensor(...): a copy from the host
    "repeat_interleave.Tensor",
)
"""Operations that wait for the device on a GPU, or whose result has a size that only the device knows."""


READING = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that hand its numbers to the host; on the CPU some of them are no operation."""


class AskedHost(AssertionError):
    """Code that is to be captured called one of ``ASKING``."""


class _Guard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if any(word in name for word in ASKING):
            raise AskedHost(name)
        if name.startswith("index") and any(
            _is_choice(at) for at in args[1] or () if isinstance(args[1], list | tuple)
        ):
            raise AskedHost(f"{name} by truth values")
        return func(*args, **(kwargs or {}))


def _is_choice(at: Any) -> bool:
    """Truth values choose a number of elements that only the device knows."""
    return at is not None and at.dtype in (torch.bool, torch.uint8)


class _ReadingGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING:
            raise AskedHost(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def asking_nothing() -> Iterator[None]:
    with _Guard(), _ReadingGuard():
        yield
