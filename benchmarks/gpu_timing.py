"""Times of runs inside CUDA graphs, the card's read bandwidth, and what machine they were measured on."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


def time_graph(run: Callable[[int], None], sets: int, launches: int, repeats: int = 7) -> float:
    """Microseconds of one run, the median over replays of a graph of ``launches`` runs."""
    for i in range(min(sets, 2)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % sets)
    times = []
    for number in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


@triton.jit
def _read(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at), axis=0))


def read_bandwidth() -> float:
    """Bytes per second of reading 4 GiB."""
    block, count = 16384, 1 << 30
    x = torch.ones(count, dtype=torch.int32, device="cuda")
    out = torch.empty(count // block, dtype=torch.int32, device="cuda")
    return 4 * count / (time_graph(lambda i: _read[(count // block,)](x, out, BLOCK=block, num_warps=8), 1, 1) / 1e6)


def machine(commit: str | None) -> dict[str, Any]:
    if commit is None:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    return {
        "gpu": torch.cuda.get_device_name(),
        "host": platform.platform(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
    }
