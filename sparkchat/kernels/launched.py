"""What launches turned out to be once compiled: registers, shared memory, programs of a multiprocessor; and how much of
a multiprocessor's memory they ask to have as shared memory.

A kernel asks for nothing by itself; the driver then chooses as it thinks best. Triton has a kernel of more than 48 KB
prefer shared memory over cache (cuFuncSetCacheConfig). CUDA's documentation: both are hints, and a launch that prefers
otherwise than the one before it may wait for it on the device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"""


@dataclass(frozen=True)
class Launched:
    """One compiled kernel."""

    name: str
    warps: int
    registers: int
    """Of a thread"""
    spilled: int
    """Words of a thread put aside"""
    shared: int
    """Bytes of a program"""
    fit: int
    """Programs of a multiprocessor, by the driver"""
    carveout: int
    """Percent that it asks for; -1: nothing"""


class LaunchLog:
    """Keeps every kernel that is launched, and has those that it is told to ask for a carveout."""

    def __init__(self, carveout: int | None = None, only: str | None = None) -> None:
        """``carveout``: percent, of the kernel ``only`` or of all."""
        self._carveout, self._only = carveout, only
        self._seen: dict[int, Any] = {}
        self._before: dict[int, int] = {}
        """What kernels asked for before, by handle"""

    def add(self, compiled: Any) -> None:
        """``compiled``: as Triton returns it from a launch; what the interpreter runs is not compiled."""
        if compiled is None or id(compiled) in self._seen:
            return
        self._seen[id(compiled)] = compiled
        if self._carveout is not None and self._only in (None, compiled.name):
            self._before[compiled.function] = carveout_of(compiled.function)
            _call("cuFuncSetAttribute", _handle(compiled.function), CARVEOUT, self._carveout)

    def kernels(self) -> list[Launched]:
        """By name."""
        found = {
            Launched(
                one.name, one.metadata.num_warps, one.n_regs, one.n_spills, one.metadata.shared, fit_of(one),
                carveout_of(one.function),
            )
            for one in self._seen.values()
        }  # fmt: skip
        return sorted(found, key=lambda one: (one.name, one.warps, one.shared, one.registers))

    def close(self) -> None:
        """Kernels ask for what they did before; graphs that were captured keep what they were captured with."""
        for function, percent in self._before.items():
            _call("cuFuncSetAttribute", _handle(function), CARVEOUT, percent)
        self._before.clear()


def carveout_of(function: int) -> int:
    """Percent that the function with this handle asks for; -1 where it does not."""
    value = ctypes.c_int(0)
    _call("cuFuncGetAttribute", ctypes.byref(value), CARVEOUT, _handle(function))
    return value.value


def fit_of(compiled: Any) -> int:
    """Programs of a multiprocessor."""
    value, threads = ctypes.c_int(0), 32 * compiled.metadata.num_warps
    shared = ctypes.c_size_t(compiled.metadata.shared)
    _call(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        ctypes.byref(value), _handle(compiled.function), ctypes.c_int(threads), shared,
    )  # fmt: skip
    return value.value


def _handle(function: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(function)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with error {error} of CUDA")
