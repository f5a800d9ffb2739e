"""The threads that work on a job together: many small jobs, sleep, interruptions, other callers, forks, the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparkchat.kernels import cpu

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

from sparkchat.kernels.cpu import tiles
from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes, quantize
from sparkchat.kernels.cpu.team import team

OUTPUTS, ROWS = (16, 70, 512), (1, 2, 5, 33)


class Products:
    """Small products whose results are known."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(0)
        self._matrices, self._rows = [], [torch.randn(count, 64, generator=numbers) for count in ROWS]
        for outputs in OUTPUTS:
            weight = torch.randn(outputs, 64, generator=numbers)
            for packed in (pack_bf16(weight), pack_codes(*quantize(weight), None)):
                self._matrices.append(PackedMatrix(*packed, (outputs, 64), None))
        torch.set_num_threads(1)
        self._wanted = [[matrix(x) for x in self._rows] for matrix in self._matrices]

    def check(self, count: int, seed: int) -> None:
        """``count`` of them, chosen at random."""
        choice = random.Random(seed)
        for _ in range(count):
            m, r = choice.randrange(len(self._matrices)), choice.randrange(len(ROWS))
            assert torch.equal(self._matrices[m](self._rows[r]), self._wanted[m][r])


@pytest.fixture(scope="module")
def products() -> Products:
    return Products()


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest, products: Products) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def test_many_jobs_one_behind_the_other(products: Products, threads: int) -> None:
    products.check(500, threads)


def test_workers_that_may_or_may_not_be_asleep(products: Products, threads: int) -> None:
    pauses = random.Random(0)
    for seed in range(100):
        products.check(1, seed)
        time.sleep(pauses.uniform(0, 5e-4))


def test_callers_in_several_threads(products: Products, threads: int) -> None:
    done: list[int] = []

    def call(seed: int) -> None:
        torch.set_num_threads(threads)
        products.check(100, seed)
        done.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(done) == 3


INTERRUPTED = """
import random, signal, sys, torch
from kernels.test_cpu_team import Products
class Stop(BaseException): pass
def stop(*_): raise Stop
products, pauses, count = Products(), random.Random(1), 0
torch.set_num_threads(4)
products.check(5, 0)
signal.signal(signal.SIGALRM, stop)
for seed in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, pauses.uniform(1e-5, 3e-4))
        products.check(1, seed)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        count += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
products.check(20, 0)
print(count)
"""


def test_a_caller_interrupted_anywhere_leaves_nobody_waiting() -> None:
    """Also ends a process whose workers look for jobs."""
    folders = os.pathsep.join(filter(None, sys.path))
    surroundings = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, env=surroundings
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(products: Products, threads: int) -> None:
    products.check(5, 0)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            products.check(20, 1)
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    products.check(5, 2)


def test_a_team_is_made_once(threads: int) -> None:
    assert team(threads) is team(threads) and team(threads).size == threads


def test_machine_code_of_tiles_is_kept_and_found_again() -> None:
    """Another object of the same tile, as another process has, adds nothing to the cache."""

    def kept() -> int:
        return len(list(Path(os.environ["NUMBA_CACHE_DIR"]).glob("**/tiles.tile_1_2_1-*.nbc")))

    tiles._compile(tiles.Q8, 2)
    before = kept()
    tiles._compile(tiles.Q8, 2)
    assert kept() == before == 1
