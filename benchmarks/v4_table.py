"""Reads a report of benchmarks/v4_decode.py: rows as a table, and every bar with what was measured.

python3 benchmarks/v4_table.py FILE.json        # of a run that was cut as well
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from v4_gaps import gap_lines
from v4_variants import variant_lines

KERNELS = Path(__file__).resolve().parents[1] / "sparkchat" / "kernels"
FOLDERS = {
    "latent_attention": "attention", "compressor": "attention", "indexer": "attention", "tiles": "products",
    "hyper": "streams", "experts": "experts", "gate": "experts", "gemm": "products", "fp8": "products",
    "ranks": "all-reduce", "markov": "draws", "accept": "draws", "sampling": "draws", "seats": "draws",
    "planner": "draws",
}  # fmt: skip
"""Where the kernels of a folder are counted; those of others by the folder's own name."""
PARTS = (
    ("all-reduce", r"nccl|all_reduce|one_shot|barrier|symm|all_gather"),
    ("attention", r"softmax|sdpa|flash|fmha"),
    ("products", r"gemm|gemv|cutlass|nvjet|sm90|splitk"),
    ("torch", r"at::|memcpy|memset|elementwise|vectorized|cub|aten::|reduce_kernel|catarray"),
)
"""Of all other kernels, by the first pattern that the name matches."""
BARS_TWO = {"round_ms": 6.5, "tokens": {4.0: 600.0, 5.4: 830.0}, "off": 2.0, "compact": 1.10, "context": 1.25}
"""For two H200s."""
PUBLISHED_FOUR = {1: 1000 / 1.70, 16: 4 * 2538.0, 64: 4 * 2994.0}
"""Tokens a second of SGLang on four H200s: by batch, all GPUs together; at batch 1 with an acceptance length of 5.4."""


@dataclass(frozen=True)
class Spent:
    """What a kernel took of a step."""

    us: float
    launches: float


def times_by_kernel(averages: Iterable[Any], steps: int, on_gpu: bool) -> dict[str, Spent]:
    """What every kernel took of one of ``steps`` steps, from a profile's averages."""
    times: dict[str, Spent] = {}
    for one in averages:
        spent = getattr(one, "self_device_time_total", 0.0) if on_gpu else one.self_cpu_time_total
        if spent:
            before = times.get(one.key, Spent(0.0, 0.0))
            times[one.key] = Spent(before.us + spent / steps, before.launches + one.count / steps)
    return times


@cache
def own_kernels() -> dict[str, str]:
    """Kernels of the package by name, with where they are counted."""
    found: dict[str, str] = {}
    for file in sorted(KERNELS.glob("*/*.py")):
        folder = FOLDERS.get(file.parent.name, file.parent.name)
        found |= dict.fromkeys(
            re.findall(r"@triton\.jit(?:\([^)]*\))?\s*\ndef (\w+)", file.read_text(encoding="utf-8")), folder
        )
    return found


def part_of(kernel: str) -> str:
    if kernel in own_kernels():
        return own_kernels()[kernel]
    name = kernel.lower()
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "other")


def by_part(times: dict[str, Spent]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel, spent in times.items():
        found[part_of(kernel)] = found.get(part_of(kernel), 0.0) + spent.us
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def longest(times: dict[str, Spent], count: int = 40) -> list[list[Any]]:
    """[name, microseconds a step, part, launches a step] of the kernels that take longest."""
    ordered = sorted(times.items(), key=lambda item: -item[1].us)[:count]
    return [[kernel[:120], round(spent.us, 2), part_of(kernel), spent.launches] for kernel, spent in ordered]


def rows_of(report: dict[str, Any], part: str, name: str | None = None, batch: int | None = None) -> list[dict]:
    return [
        row
        for row in report["rows"]
        if row["part"] == part and name in (None, row["row"]) and batch in (None, row.get("batch"))
    ]


def judged(report: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """What was measured, its bar, and whether it is met; what was not measured is not among them."""
    found: list[tuple[str, str, str, bool | None]] = []
    is_two = report["gpus"] == 2 and not report["tiny"]

    def add(what: str, value: float, bar: float | None, at_least: bool, form: str = "{:.2f}") -> None:
        met = None if bar is None else value >= bar if at_least else value <= bar
        sign = "" if bar is None else f"{'>=' if at_least else '<='} {form.format(bar)}"
        found.append((what, form.format(value), sign, met))

    def bar(value: float) -> float | None:
        return value if is_two else None

    floors = report["floors_ms"]
    for row in rows_of(report, "alone", "static, field"):
        add("DSpark round, batch 1, ms", row["gpu_ms"], bar(BARS_TWO["round_ms"]), False)
        add("... over its floor", row["gpu_ms"] / floors["round"], None, False)
        for trimmed in rows_of(report, "alone", "compact, field"):
            ratio = trimmed["tokens_per_second"] / row["tokens_per_second"]
            add("compact / static, batch 1, field", ratio, bar(BARS_TWO["compact"]), True)
    for length, least in BARS_TWO["tokens"].items():
        for row in rows_of(report, "alone", f"DSpark, length {length}"):
            speed = row["tokens_per_second_at_length"]
            add(f"tokens/s at length {length}", speed, bar(least), True, "{:.0f}")
            if length == 5.4 and report["gpus"] == 4:
                add("ms a token at length 5.4, 4 GPUs (SGLang: 1.70)", 1e3 / speed, 1.0, False)
    for row in rows_of(report, "alone", "off, drafter loaded"):
        add("off step / its floor", row["gpu_ms"] / floors["step"], bar(BARS_TWO["off"]), False)
    lengths = rows_of(report, "contexts")
    static = [row for row in lengths if row["row"].startswith("static")]
    if len(static) == 2:
        what = f"round at {static[1]['context']} / at {static[0]['context']}"
        add(what, static[1]["gpu_ms"] / static[0]["gpu_ms"], bar(BARS_TWO["context"]), False)
    return found + _arms(report)


def _arms(report: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """DSpark beside the other ways to decode, batch by batch."""
    found: list[tuple[str, str, str, bool | None]] = []
    for batch in sorted({row["batch"] for row in rows_of(report, "batches") if "batch" in row}):
        speeds: dict[str, float] = {}
        for row in (*rows_of(report, "batches", batch=batch), *rows_of(report, "mtp", batch=batch)):
            if "tokens_per_second" in row:
                arm = "mtp" if row["part"] == "mtp" else row["mode"]
                speeds[arm] = max(speeds.get(arm, 0.0), row["tokens_per_second"])
        told = ", ".join(f"{arm} {speed:.0f}" for arm, speed in speeds.items())
        ours = max(speeds.get("static", 0.0), speeds.get("compact", 0.0))
        others = max((speed for arm, speed in speeds.items() if arm in ("off", "mtp")), default=0.0)
        found.append((f"tokens/s, batch {batch}", told, "DSpark first", ours >= others))
        if report["gpus"] == 4 and batch in PUBLISHED_FOUR and ours:
            what = f"SGLang's tokens/s, batch {batch}"
            found.append((what, f"{ours / PUBLISHED_FOUR[batch]:.2f} of it", "published", None))
    return found


def table(report: dict[str, Any]) -> str:
    floors = report["floors_ms"]
    lone = f"rank 0 of {report['rank_of']} alone, without the ranks' meetings; " if report.get("rank_of") else ""
    lines = [
        f"{lone}{report['gpus']} x {report['device']}, torch {report['torch']}, commit {report['commit']}; reading "
        f"{report['read_tb_per_s']:.2f} TB/s; floors, ms: " + ", ".join(f"{k} {v:.2f}" for k, v in floors.items()),
        "",
        "| part | row | batch | GPU ms | draft | verify | wall ms | rows | tokens/step | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        if "gpu_ms" in row and row["part"] != "variants":
            times = " | ".join(f"{row[name]:.3f}" for name in ("gpu_ms", "draft_ms", "verify_ms", "wall_ms"))
            lines.append(
                f"| {row['part']} | {row['row']} | {row['batch']} | {times} | {row['rows']:.1f} "
                f"| {row['tokens_per_step']:.2f} | {row['tokens_per_second']:.0f} |"
            )
    lines += ["", "| start | seconds | graphs | capture, s |", "|---|---|---|---|"]
    lines += [
        f"| {row['part']}: {row['row']} | {row['seconds']:.1f} | {row['graphs']} | {row['capture_s']:.1f} |"
        for row in report["rows"]
        if "capture_s" in row and "seconds" in row
    ]
    profiled = rows_of(report, "profile")
    parts = {row["row"]: row["parts_us"] for row in profiled if "parts_us" in row}
    lines += ["", f"| us a step, by part | {' | '.join(parts)} |", f"|{'---|' * (1 + len(parts))}"] if parts else []
    names: Sequence[str] = list(dict.fromkeys(name for one in parts.values() for name in one))
    lines += [f"| {name} | {' | '.join(f'{one.get(name, 0.0):.0f}' for one in parts.values())} |" for name in names]
    lines += gap_lines([(row["row"], row) for row in profiled])
    lines += variant_lines(report)
    lines += ["", "| measured | value | bar | met |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {value} | {bar} | {'' if met is None else 'yes' if met else 'NO'} |"
        for what, value, bar, met in judged(report)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
