"""What state a GPU was in beside a figure, and what it launched: clocks, temperature, two probes, one profiled step."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

QUERIED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "temperature.memory", "clocks_throttle_reasons.active")  # fmt: skip  # noqa: E501
PROBE_BYTES = 1 << 30


def clocks() -> dict[str, Any]:
    """Clocks in MHz, watts, degrees and the reasons for a lower clock (a mask), as the driver has them now.

    By NVML where its Python package is, as that takes no more than a fraction of a millisecond; else by nvidia-smi.
    """
    try:
        import pynvml
    except ImportError:
        return _by_command()
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        "memory_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
        "watts": pynvml.nvmlDeviceGetPowerUsage(card) / 1e3,
        "celsius": pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
        "lowered_by": hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)),
    }


def _by_command() -> dict[str, Any]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    values = [value.strip() for value in said[0].split(",")] if said else []
    return dict(zip(QUERIED, values, strict=False))


@triton.jit
def _read_all(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at), axis=0))


@triton.jit
def _count_down(out_ptr, turns):
    value = 1.0
    for _ in range(turns):
        value = value * 0.999999 + 1e-7
    tl.store(out_ptr, value)


class Probe:
    """Two kernels whose times say which of memory and multiprocessors has another speed than before."""

    def __init__(self) -> None:
        self._x = torch.ones(PROBE_BYTES // 4, dtype=torch.int32, device="cuda")
        self._out = torch.empty(PROBE_BYTES // 4 // 16384, dtype=torch.int32, device="cuda")
        self._one = torch.empty(1, device="cuda")
        self.run()

    def run(self) -> dict[str, float]:
        """Terabytes a second of reading 1 GiB, and microseconds of 20,000 dependent multiplications; best of three."""
        programs = len(self._out)
        reads = min(_timed(lambda: _read_all[(programs,)](self._x, self._out, BLOCK=16384, num_warps=8)) for _ in "123")
        waits = min(_timed(lambda: _count_down[(1,)](self._one, 20_000, num_warps=1)) for _ in "123")
        return {"read_tb_per_s": PROBE_BYTES / reads / 1e9, "chain_us": waits * 1e3}


def _timed(run: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def breakdown(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """What the device did in ``steps`` steps: microseconds a step by kernel, and one step launch after launch.

    ``step`` is run a few times more, so that the profiled ones have nothing to set up. Gaps are what lies between the
    end of one launch and the start of the next; with the profiler on they are longer than without.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_device = (e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    launches = sorted(on_device, key=lambda e: e.time_range.start)
    return summary([(e.name, e.time_range.start, e.time_range.end) for e in launches], steps)


def summary(launches: list[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """launches (name, start, end) in microseconds and in order -> what ``breakdown`` returns."""
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    order = []
    before = None
    for name, start, end in launches:
        gap = 0.0 if before is None else max(0.0, start - before)
        by_name[name].append(end - start)
        gaps[name].append(gap)
        order.append([name, round(end - start, 2), round(gap, 2)])
        before = end if before is None else max(before, end)
    table = [
        {
            "name": name,
            "launches_a_step": len(times) / steps,
            "us_a_step": sum(times) / steps,
            "us_each": sum(times) / len(times),
            "gap_us_a_step": sum(gaps[name]) / steps,
        }
        for name, times in by_name.items()
    ]
    return {
        "steps": steps,
        "busy_us_a_step": sum(row["us_a_step"] for row in table),
        "gap_us_a_step": sum(row["gap_us_a_step"] for row in table),
        "kernels": sorted(table, key=lambda row: -row["us_a_step"]),
        "one_step": order[-(len(order) // steps) :] if steps else [],
    }
