"""Numbers at addresses, and what threads agree by: atomic words and locks."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_IS_X86 = binding.get_process_triple().startswith("x86_64")
_own = threading.local()


def scratch(num_bytes: int) -> np.ndarray:
    """At least ``num_bytes`` uint8 of this thread's own, for one job: the next one writes over them."""
    room = getattr(_own, "room", None)
    if room is None or room.nbytes < num_bytes:
        room = _own.room = aligned((num_bytes + num_bytes // 4) // 8).view(np.uint8)
    return room


def aligned(count: int) -> np.ndarray:
    """[count] int64 zeros at the beginning of a cache line."""
    spare = np.zeros(count + 8, np.int64)
    first = (-spare.ctypes.data // 8) % 8
    return spare[first : first + count]


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(inline="always")
def words(address: int, count: int) -> np.ndarray:
    """[count] int64 at an address."""
    return carray(_pointer(address), (count,), np.int64)


@njit(inline="always")
def floats(address: int, count: int) -> np.ndarray:
    """[count] float32 at an address."""
    return carray(_pointer(address), (count,), np.float32)


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to the word at an address, for all threads in one order; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Put a word at an address; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("xchg", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def peek(typing: Any, address: Any) -> Any:
    """The word at an address, and with it all that was written before it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Between two looks at a word: processors that share a core with this one get what looking would take of it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, given = ("llvm.x86.sse2.pause", []) if _IS_X86 else ("llvm.aarch64.hint", [ir.IntType(32)(1)])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_processor(typing: Any) -> Any:
    """Let another thread of this processor run: who is waited for may have none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


def make_lock() -> int:
    """The address of a new lock of Python's own, taken already; it lives as long as the process.

    Of a ``threading.Lock`` the address is not known, and only code that holds the interpreter may use it.
    """
    python = ctypes.pythonapi
    python.PyThread_allocate_lock.restype = ctypes.c_void_p
    python.PyThread_acquire_lock.argtypes = (ctypes.c_void_p, ctypes.c_int)
    lock = python.PyThread_allocate_lock()
    if not lock:
        raise MemoryError("no memory for a lock")
    python.PyThread_acquire_lock(lock, 1)
    return int(lock)


@intrinsic
def acquire(typing: Any, lock: Any) -> Any:
    """Sleep until the lock is free and take it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(8).as_pointer(), ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "PyThread_acquire_lock")
        builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer()), ir.IntType(32)(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typing: Any, lock: Any) -> Any:
    """Free the lock, which another thread may have taken."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "PyThread_release_lock")
        builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64), generate
