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

from sparkchat.kernels.cpu.memory import exchange, fetch_add, peek, words, yield_processor
from sparkchat.kernels.cpu.product import STORE, multiply
from sparkchat.kernels.cpu.rows import GROUP_ROW_BYTES, pack
from sparkchat.kernels.cpu.stack import COUNTERS, meet, run_stack

PRODUCT, STACK = 0, 1
"""What a job asks for."""
(MATRIX, IN, IN_STRIDE, IN_COUNT, GROUPS, TO, TO_STRIDE, PACKED, PRODUCT_SCRATCH,
 PRODUCT_SCRATCH_STRIDE) = range(10)  # fmt: skip
"""Words of a product's job."""
MOST_COUNTERS = 4096
SEQUENCE, DONE, WORK, ADDRESS, PARKED = 0, 8, 16, 17, 24
"""Words of the board on which jobs are written; those that threads wait for lie in lines of their own."""
_LINE = 8
_LOOKS = 40_000
"""How often a worker looks for a job before it sleeps: about a tenth of a millisecond."""
_LOOKS_AT_ONCE = 1000


@njit(nogil=True)
def _run_product(job_address, place, thread, threads):
    job = words(job_address, 10)
    own = job[PRODUCT_SCRATCH] + thread * job[PRODUCT_SCRATCH_STRIDE]
    x, stride = job[IN], job[IN_STRIDE]
    if job[PACKED]:
        for n in range(thread, job[IN_COUNT], threads):
            pack(x + n * stride, job[GROUPS], job[PACKED] + n * job[GROUPS] * GROUP_ROW_BYTES)
        meet(place, threads)
        x, stride = job[PACKED], job[GROUPS] * GROUP_ROW_BYTES
    counter = place + 8 * COUNTERS
    multiply(job[MATRIX], x, stride, job[IN_COUNT], STORE, job[TO], job[TO_STRIDE], counter, threads, own)


@njit(nogil=True)
def _wait_for_job(board, thread, seen):
    """Whether a job behind number ``seen`` has come; if not, this thread has to sleep until it is woken."""
    looks = 0
    while peek(board + 8 * SEQUENCE) == seen:
        looks += 1
        if looks % _LOOKS_AT_ONCE == 0:
            yield_processor()
        if looks > _LOOKS:
            parked = board + 8 * (PARKED + _LINE * thread)
            exchange(parked, 1)
            # A job may have come meanwhile, and its giver may or may not have seen who sleeps.
            if peek(board + 8 * SEQUENCE) == seen or exchange(parked, 0) == 0:
                return False
    return True


@njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def _take_part(board, place, thread, threads, seen):
    """Do the job on the board; thread 0 once, returning when all are done, others until none comes for a while.

    Returns the number of the last job done. One function for all roles: it holds all the code there is, and every copy
    would have to be compiled.
    """
    while True:
        if thread != 0 and not _wait_for_job(board, thread, seen):
            return seen
        seen += 1
        if peek(board + 8 * WORK) == STACK:
            run_stack(peek(board + 8 * ADDRESS), place, thread, threads)
        else:
            _run_product(peek(board + 8 * ADDRESS), place, thread, threads)
        if thread != 0:
            fetch_add(board + 8 * DONE, 1)
            continue
        looks = 0
        while peek(board + 8 * DONE) < threads - 1:
            looks += 1
            if looks > _LOOKS_AT_ONCE:
                yield_processor()
        return seen


@njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def _publish(board, place, threads, work, job):
    """Write a job on the board; returns a bit for each thread that sleeps and must be woken."""
    counters = words(place + 8 * COUNTERS, MOST_COUNTERS)
    counters[:] = 0
    exchange(board + 8 * WORK, work)
    exchange(board + 8 * ADDRESS, job)
    exchange(board + 8 * DONE, 0)
    fetch_add(board + 8 * SEQUENCE, 1)
    asleep = 0
    for thread in range(1, threads):
        if exchange(board + 8 * (PARKED + _LINE * thread), 0) == 1:
            asleep |= 1 << thread
    return asleep


class Team:
    """``size`` threads, the calling one among them."""

    def __init__(self, size: int) -> None:
        self.size = min(size, 62)
        self._lock = threading.Lock()
        self._board = _aligned(PARKED + _LINE * (self.size + 1))
        self._place = _aligned(COUNTERS + MOST_COUNTERS)
        self._wakes = [threading.Lock() for _ in range(self.size)]
        for thread in range(1, self.size):
            self._wakes[thread].acquire()
            threading.Thread(target=self._work, args=(thread,), name=f"sparkchat-cpu-{thread}", daemon=True).start()

    def run(self, work: int, job: np.ndarray) -> None:
        """Do the job [words] int64 together; returns when it is done."""
        board, place = self._board.ctypes.data, self._place.ctypes.data
        with self._lock:
            asleep = _publish(board, place, self.size, work, job.ctypes.data)
            for thread in range(1, self.size):
                if asleep >> thread & 1:
                    self._wakes[thread].release()
            _take_part(board, place, 0, self.size, 0)

    def _work(self, thread: int) -> None:
        seen = 0
        while True:
            seen = _take_part(self._board.ctypes.data, self._place.ctypes.data, thread, self.size, seen)
            self._wakes[thread].acquire()


@functools.cache
def _team(size: int, process: int) -> Team:
    return Team(size)


def team(size: int) -> Team:
    """The threads of this process; another process that was forked from it has its own."""
    return _team(size, os.getpid())


def _aligned(count: int) -> np.ndarray:
    """[count] int64 zeros at the beginning of a cache line."""
    spare = np.zeros(count + 8, np.int64)
    first = (-spare.ctypes.data // 8) % 8
    return spare[first : first + count]
