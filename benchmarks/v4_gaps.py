"""A profile's kernels as they followed one another: what lay between them, and what they took.

A gap is the start of a kernel less the end of the one before it on the same stream; of kernels that start early it is
negative, and counted apart as overlap. So on one stream kernels + gaps - overlap is the time from the first start to
the last end, which is set against what the same steps took by the engine's own marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SHOWN = 12
UPLOAD = "Memcpy HtoD"
"""The first thing of every step."""
NAME_LENGTH = 120
OVERHEADS = ("Activity Buffer Request", "Buffer Flush", "Lazy Function Loading", "Command Buffer Full")
"""What a profiler tells of itself; nothing that ran on a GPU."""


@dataclass(frozen=True)
class Launch:
    """One kernel or copy, in microseconds of one clock."""

    name: str
    stream: Any
    start_us: float
    end_us: float


@dataclass
class Between:
    """What lay on one side of all launches of a name."""

    gap_us: float = 0.0
    overlap_us: float = 0.0
    count: int = 0
    overlapped: int = 0

    def add(self, gap: float) -> None:
        self.count += 1
        if gap < 0.0:
            self.overlap_us -= gap
            self.overlapped += 1
        else:
            self.gap_us += gap

    def row(self, name: str, steps: int) -> list[Any]:
        """[name, gaps a step, mean of a launch with overlap counted against it, launches a step, overlap a step,
        launches a step that overlap]"""
        mean = (self.gap_us - self.overlap_us) / max(1, self.count)
        numbers = self.gap_us / steps, mean, self.count / steps, self.overlap_us / steps, self.overlapped / steps
        return [name, *(round(number, 3) for number in numbers)]


def launches_of(events: Iterable[Any], on_gpu: bool) -> list[Launch]:
    """From a profile's events (``torch.profiler.profile.events()``): what ran on GPUs, or operations that no other one
    called where there is none."""
    found: list[Launch] = []
    for event in events:
        if getattr(event, "is_user_annotation", False) or event.name in OVERHEADS:
            continue
        if on_gpu:
            if event.device_type.name != "CUDA":
                continue
            stream = event.device_index, event.device_resource_id
        else:
            if event.cpu_parent is not None:
                continue
            stream = event.thread
        found.append(Launch(event.name[:NAME_LENGTH], stream, event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda launch: launch.start_us)


def gaps_of(launches: Sequence[Launch], steps: int) -> dict[str, Any]:
    """What lay between launches, in microseconds of one of ``steps`` steps; names in the order of their gaps.

    ``between_us``: in front of a step's first copy, where the host may have been waited for; not among ``gap_us``.
    ``idle_us``: nothing ran on any stream, that apart as well. ``span_us``: from first to last, all in.
    """
    if not launches:
        return {}
    front: dict[str, Between] = {}
    behind: dict[str, Between] = {}
    whole, between = Between(), 0.0
    streams: dict[Any, list[Launch]] = {}
    for launch in launches:
        streams.setdefault(launch.stream, []).append(launch)
    for on_one in streams.values():
        for one, two in pairwise(on_one):
            gap = two.start_us - one.end_us
            if two.name.startswith(UPLOAD):
                between += max(0.0, gap)
                continue
            whole.add(gap)
            front.setdefault(two.name, Between()).add(gap)
            behind.setdefault(one.name, Between()).add(gap)
    span = max(launch.end_us for launch in launches) - launches[0].start_us
    kernels = sum(launch.end_us - launch.start_us for launch in launches)

    def longest(sides: dict[str, Between]) -> list[list[Any]]:
        ordered = sorted(sides.items(), key=lambda item: -item[1].gap_us - item[1].overlap_us)
        return [side.row(name, steps) for name, side in ordered[:SHOWN]]

    return {
        "span_us": span / steps,
        "kernels_us": kernels / steps,
        "gap_us": whole.gap_us / steps,
        "overlap_us": whole.overlap_us / steps,
        "between_us": between / steps,
        "idle_us": (_idle(launches) - between) / steps,
        "launches": len(launches) / steps,
        "streams": len(streams),
        "front": longest(front),
        "behind": longest(behind),
    }


def _idle(launches: Sequence[Launch]) -> float:
    """For how long nothing ran between the first start and the last end."""
    idle, end = 0.0, launches[0].end_us
    for launch in launches:
        idle += max(0.0, launch.start_us - end)
        end = max(end, launch.end_us)
    return idle


def mhz_of(row: dict[str, Any]) -> str:
    """The clock that a row's steps left the multiprocessors at, as the driver said (benchmarks/gpu_state.py)."""
    card = row.get("card") or {}
    return str(card.get("sm_mhz", card.get("clocks.sm", "")))


def gap_lines(profiles: Sequence[tuple[str, dict[str, Any]]], *, has_names: bool = True) -> list[str]:
    """Tables of what profiles tell of gaps: each has a label, ``gaps``, and ``step_ms`` and ``mean_ms`` of its steps by
    the engine's marks, with ``timed_ms`` of steps without a profiler where those are known. ``has_names``: with two
    tables a profile, of the kernels in front of which and behind which the longest gaps lie."""
    told = [(label, profile) for label, profile in profiles if profile.get("gaps")]
    if not told:
        return []
    lines = [
        "",
        "| profile, us a step | kernels | gaps | overlap | kernels + gaps - overlap | profiled step, mean | median "
        "| timed step | idle | between steps | launches | streams | MHz |",
        f"|{'---|' * 13}",
    ]
    for label, profile in told:
        gaps = profile["gaps"]
        timed = profile.get("timed_ms")
        all_in = gaps["kernels_us"] + gaps["gap_us"] - gaps["overlap_us"]
        times = [gaps["kernels_us"], gaps["gap_us"], gaps["overlap_us"], all_in]
        times += [1e3 * profile["mean_ms"], 1e3 * profile["step_ms"]]
        last = [gaps["idle_us"], gaps["between_us"], gaps["launches"], gaps["streams"]]
        megahertz = mhz_of(profile)
        numbers = [*(f"{n:.0f}" for n in times), "" if timed is None else f"{1e3 * timed:.0f}"]
        lines.append(f"| {label} | {' | '.join([*numbers, *(f'{n:.0f}' for n in last), megahertz])} |")
    for label, profile in told if has_names else ():
        for side, what in (("front", "in front of"), ("behind", "behind")):
            rows = profile["gaps"][side]
            lines += ["", f"| {label}: {what} | gaps, us a step | mean | launches | overlap, us a step | overlapping |"]
            lines += [f"|{'---|' * 6}"]
            lines += [
                f"| {name[:60].replace('|', '/')} | {gap:.1f} | {mean:.2f} | {count:.0f} | {overlap:.1f} | {many:.0f} |"
                for name, gap, mean, count, overlap, many in rows
            ]
    return lines
