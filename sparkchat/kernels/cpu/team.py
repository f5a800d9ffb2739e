"""Threads that work on one job together, and the one who gives it to them.

Workers look for the next job for a little while and then sleep; a job is a few words at an address, and all of them,
the giver too, run the same function over it.
"""

from __future__ import annotations

import functools
import os
import threading

import numpy as np
from numba import njit

from sparkchat.kernels.cpu.context import CONTEXT_COUNTERS, run_context
from sparkchat.kernels.cpu.job import LAYERS
from sparkchat.kernels.cpu.memory import (
    acquire,
    aligned,
    exchange,
    fetch_add,
    make_lock,
    pause,
    peek,
    release,
    words,
    yield_processor,
)
from sparkchat.kernels.cpu.product import KIND, RECORD_WORDS, STORE, multiply
from sparkchat.kernels.cpu.rows import GROUP_ROW_BYTES, NARROW_ROW_BYTES, pack, pack_narrow
from sparkchat.kernels.cpu.stack import COUNTERS, PHASES_A_LAYER, meet, run_stack
from sparkchat.kernels.cpu.tiles import NARROW

PRODUCT, STACK, CONTEXT = 0, 1, 2
"""What a part of a job asks for."""
(MATRIX, IN, IN_STRIDE, IN_COUNT, GROUPS, TO, TO_STRIDE, PACKED, PRODUCT_SCRATCH,
 PRODUCT_SCRATCH_STRIDE) = range(10)  # fmt: skip
"""Words of a product's job."""
MOST_COUNTERS = 4096
SEQUENCE, DONE, PARTS, ADDRESS, SLEEPERS = 0, 8, 16, 17, 24
"""Words of the board on which jobs are written; those that threads wait for lie in lines of their own."""
_LINE = 8
_LOCK = 1
"""Place in a thread's line behind SLEEPERS of the lock it sleeps on; before it, whether it sleeps."""
_LOOKS = 40_000
"""How often a worker looks for a job before it sleeps: about a millisecond, longer than between the jobs of one
round: waking it takes time."""
_LOOKS_AT_ONCE = 1000


@njit(nogil=True)
def _run_product(job_address, place, counter, thread, threads):
    job = words(job_address, 10)
    own = job[PRODUCT_SCRATCH] + thread * job[PRODUCT_SCRATCH_STRIDE]
    x, stride = job[IN], job[IN_STRIDE]
    if job[PACKED]:
        is_narrow = words(job[MATRIX], RECORD_WORDS)[KIND] == NARROW
        wide = job[GROUPS] * (NARROW_ROW_BYTES if is_narrow else GROUP_ROW_BYTES)
        for n in range(thread, job[IN_COUNT], threads):
            if is_narrow:
                pack_narrow(x + n * stride, job[GROUPS], job[PACKED] + n * wide)
            else:
                pack(x + n * stride, job[GROUPS], job[PACKED] + n * wide)
        meet(place, threads)
        x, stride = job[PACKED], wide
    multiply(job[MATRIX], x, stride, job[IN_COUNT], STORE, job[TO], job[TO_STRIDE], counter, thread, threads, own)


@njit(nogil=True)
def _wait_for_job(board, thread, seen):
    """Return when a job behind number ``seen`` has come; this thread sleeps if that takes long."""
    looks = 0
    while peek(board + 8 * SEQUENCE) == seen:
        looks += 1
        pause()
        if looks % _LOOKS_AT_ONCE == 0:
            yield_processor()
        if looks > _LOOKS:
            sleeper = board + 8 * (SLEEPERS + _LINE * thread)
            exchange(sleeper, 1)
            # A job may have come meanwhile. Whoever takes the 1 away settles it: the giver wakes whom it took it from.
            if peek(board + 8 * SEQUENCE) == seen or exchange(sleeper, 0) == 0:
                acquire(peek(sleeper + 8 * _LOCK))
            looks = 0


@njit(nogil=True)
def _run_parts(parts, address, place, thread, threads):
    """The parts of a job, [parts, 2] int64 words of what and where, one behind the other; each has its own counters."""
    counter = place + 8 * COUNTERS
    for i in range(parts):
        if i:
            meet(place, threads)
        part = words(address + 16 * i, 2)
        if part[0] == STACK:
            run_stack(part[1], place, counter, thread, threads)
            counter += 8 * PHASES_A_LAYER * words(part[1], LAYERS + 1)[LAYERS]
        elif part[0] == CONTEXT:
            run_context(part[1], place, counter, thread, threads)
            counter += 8 * CONTEXT_COUNTERS
        else:
            _run_product(part[1], place, counter, thread, threads)
            counter += 8


@njit(nogil=True)
def _publish(board, place, threads, parts, address):
    """Write a job on the board and wake those who sleep. All threads have left the job before."""
    counters = words(place + 8 * COUNTERS, MOST_COUNTERS)
    counters[:] = 0
    exchange(board + 8 * PARTS, parts)
    exchange(board + 8 * ADDRESS, address)
    exchange(board + 8 * DONE, 0)
    fetch_add(board + 8 * SEQUENCE, 1)
    for thread in range(1, threads):
        sleeper = board + 8 * (SLEEPERS + _LINE * thread)
        if exchange(sleeper, 0) == 1:
            release(peek(sleeper + 8 * _LOCK))


@njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def _take_part(board, place, thread, threads, parts, address):
    """Thread 0 gives the team a job and returns when all have done their part; the others do what is given, for ever.

    One function for all roles: it holds all the code there is, and every copy would have to be compiled. And one call:
    were the giver interrupted (Ctrl-C) between giving a job and taking part, the others would wait for it in vain.
    """
    seen = 0
    if thread == 0:
        _publish(board, place, threads, parts, address)
    while True:
        if thread != 0:
            _wait_for_job(board, thread, seen)
            seen += 1
        _run_parts(peek(board + 8 * PARTS), peek(board + 8 * ADDRESS), place, thread, threads)
        if thread != 0:
            fetch_add(board + 8 * DONE, 1)
            continue
        looks = 0
        while peek(board + 8 * DONE) < threads - 1:
            looks += 1
            pause()
            if looks > _LOOKS_AT_ONCE:
                yield_processor()
        return


class Team:
    """``size`` threads, the calling one among them. The others end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._board = aligned(SLEEPERS + _LINE * size)
        self._place = aligned(COUNTERS + MOST_COUNTERS)
        self._places = (self._board.ctypes.data, self._place.ctypes.data)
        for thread in range(1, size):
            self._board[SLEEPERS + _LINE * thread + _LOCK] = make_lock()
            threading.Thread(
                target=self._take_part, args=(thread,), name=f"sparkchat-cpu-{thread}", daemon=True
            ).start()

    def run(self, *parts: tuple[int, np.ndarray]) -> None:
        """Do these parts [words] int64 together, one behind the other; returns when all are done."""
        self.run_lines(np.array([(work, job.ctypes.data) for work, job in parts], np.int64))

    def run_lines(self, lines: np.ndarray) -> None:
        """As ``run``: lines [parts, 2] int64, what and the address of its job."""
        with self._lock:
            self._take_part(0, len(lines), lines.ctypes.data)

    def _take_part(self, thread: int, parts: int = 0, address: int = 0) -> None:
        _take_part(self._places[0], self._places[1], thread, self.size, parts, address)


@functools.cache
def _team(size: int, process: int) -> Team:
    return Team(size)


def team(size: int) -> Team:
    """The threads of this process; another process that was forked from it has its own."""
    return _team(size, os.getpid())
