"""Other plans of the launches side by side, in one process and one engine, for benchmarks/v4_decode.py.

    python3 benchmarks/v4_decode.py --rank-of 2 --parts variants
    python3 benchmarks/v4_decode.py --rank-of 2 --parts variants --variants "whole=8;whole=5x2x4,streams=4;overlap=none"

For every variant all captured graphs go, and what plain steps and rounds of one request need is captured anew. All
variants are timed in turn, then once more in the opposite order, so that a card that gets warmer favours nobody; only
then does a profiler start. With several GPUs every rank takes the same variant.

These files also run beside an older package, which has no plans to choose from: with ``--variants usual``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from v4_gaps import SHOWN, gap_lines, mhz_of

if TYPE_CHECKING:
    from v4_bench import Bench

    from sparkchat.engine.engine import Engine

DEFAULT = (
    "whole=8,streams=4; whole=5x2x4,streams=4; whole=8,streams=2; whole=5x2x4,streams=2; whole=4x2x5,streams=2;"
    "whole=5x2x4,streams=2,carveout=100; whole=5x2x4,streams=2,carveout=100@_mix_experts;"
    "whole=8,streams=2,carveout=100"
)
"""The plans of 7ddd763 and of 19bfa1f and what lies between; experts with more than 48 KB of shared memory; and all of
our kernels, or the experts alone, with all of it asked for."""
MODES = ("off", "static")
STEPS, TURNS = 60, 2


def parsed(text: str) -> dict[str, Any]:
    """Plans by what they are called; ``usual`` is an empty one. Raises ValueError for what is none."""
    names = [part.strip() for part in text.strip().strip(";").split(";")]
    if find_spec("sparkchat.kernels.plans") is None:
        if names != ["usual"]:
            raise ValueError("this package has no plans to choose from; give --variants usual")
        return {"usual": None}
    from sparkchat.kernels.plans import LaunchPlans

    return {name or "usual": LaunchPlans.parse("" if name == "usual" else name) for name in names}


def variants(bench: Bench) -> None:
    """Time all variants, then profile them; see the module."""
    from v4_bench import ONE_REQUEST_COSTS, lean

    plans = parsed(bench.options.variants)
    # No plan asks what steps cost.
    with lean(), bench.opened("variants", bench.dspark, cost_table=ONE_REQUEST_COSTS) as engine:
        for turn in range(TURNS):
            for name in list(plans)[:: 1 if turn % 2 == 0 else -1]:
                attempt(bench, engine, name, plans[name], turn)
        for name, plan in plans.items():
            attempt(bench, engine, name, plan, None)


def attempt(bench: Bench, engine: Engine, name: str, plans: Any, turn: int | None) -> None:
    """One variant, timed, or profiled where ``turn`` is None; what fails alone is told and passed over."""
    try:
        renew(engine, plans)
        if turn is None:
            profile(bench, engine, name, plans)
        else:
            time_both(bench, engine, name, turn)
    except Exception as error:
        # The minutes of a card are few: the other variants are still measured.
        if engine.pair.team is not None:
            raise  # The other ranks are elsewhere now.
        engine.cancel("r0")
        engine.step()
        bench.add("variants", name, turn=turn, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def renew(engine: Engine, plans: Any) -> None:
    """Take other plans on all ranks, and throw away what was captured by those before."""
    decoder = engine._captured
    assert decoder is not None
    decoder.drain(engine.mode)
    if plans is not None:
        decoder.stages.renew(plans)
    decoder.interrupt()


def time_both(bench: Bench, engine: Engine, name: str, turn: int) -> None:
    from v4_bench import measure

    for mode in MODES:
        still = 1 if bench.is_tiny else 6
        numbers = measure(engine, 1, mode, min(bench.steps, STEPS), bench.context, still)
        bench.add("variants", name, turn=turn, **numbers)


def profile(bench: Bench, engine: Engine, name: str, plans: Any) -> None:
    import torch
    from v4_bench import profiled

    for mode in MODES:
        timed = [row["gpu_ms"] for row in rows_of(bench.report, name) if row.get("mode") == mode and "gpu_ms" in row]
        told = profiled(bench, engine, mode)
        bench.add("variants", name, profile=mode, **told, timed_ms=statistics.mean(timed) if timed else None)
    reserved = torch.cuda.memory_reserved() / 1e9 if engine.pair.device.type == "cuda" else 0.0
    launched: list[Any] = []
    if plans is not None:
        from sparkchat.kernels.plans import kernels_launched

        launched = [asdict(one) for one in kernels_launched()]
    bench.add("variants", name, launched=launched, reserved_gb=reserved)


def rows_of(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["part"] == "variants" and row["row"] == name]


def variant_lines(report: dict[str, Any]) -> list[str]:
    """One table of all variants, one of what their kernels were compiled to, and those of the gaps."""
    names = list(dict.fromkeys(row["row"] for row in report["rows"] if row["part"] == "variants"))
    names = [name for name in names if name != "start"]
    if not names:
        return []
    lines = [
        "",
        "| variant | off ms, by turn | round ms, by turn | draft | verify | round: kernels us | gaps | overlap "
        "| profiled ms | off: kernels us | gaps | MHz of rounds, by turn | failed |",
        f"|{'---|' * 13}",
    ]
    for name in names:
        rows = rows_of(report, name)
        off, static = ([row for row in rows if "gpu_ms" in row and row["mode"] == mode] for mode in MODES)
        cells = [_each(off, "gpu_ms"), _each(static, "gpu_ms"), _mean(static, "draft_ms"), _mean(static, "verify_ms")]
        profiles = {row["profile"]: row for row in rows if row.get("profile") and row.get("gaps")}
        cells += _profile_cells(profiles.get("static"), ("kernels_us", "gap_us", "overlap_us"))
        cells.append(f"{profiles['static']['step_ms']:.3f}" if "static" in profiles else "")
        cells += _profile_cells(profiles.get("off"), ("kernels_us", "gap_us"))
        cells.append(", ".join(mhz_of(row) for row in static))
        cells.append("; ".join(row["error"] for row in rows if "error" in row).replace("|", "/"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += _launched_lines(report, names)
    told = [(f"{name}, {row['profile']}", row) for name in names for row in rows_of(report, name) if row.get("profile")]
    lines += gap_lines(told, has_names=False)
    for mode in MODES:
        lines += _beside([(name, row) for name in names for row in rows_of(report, name) if row.get("profile") == mode])
    return lines


def _beside(profiles: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """The kernels with the longest gaps in front, by variant: their gaps and what they take themselves."""
    if not profiles:
        return []
    front = {name: {one[0]: one[1] - one[4] for one in row["gaps"].get("front", ())} for name, row in profiles}
    spent = {name: {one[0]: one[1] for one in row["kernels"]} for name, row in profiles}
    longest: dict[str, float] = {}
    for gaps in front.values():
        longest |= {kernel: max(abs(gap), longest.get(kernel, 0.0)) for kernel, gap in gaps.items()}
    mode = profiles[0][1]["profile"]
    lines = ["", f"| {mode}, us a step: gaps less overlap in front of it / itself | {' | '.join(front)} |"]
    lines.append(f"|{'---|' * (1 + len(front))}")
    for kernel in sorted(longest, key=lambda one: -longest[one])[:SHOWN]:
        cells = [f"{_told(front[name], kernel)} / {_told(spent[name], kernel)}" for name in front]
        lines.append(f"| {kernel[:40].replace('|', '/')} | {' | '.join(cells)} |")
    return lines


def _told(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.0f}" if name in values else "-"


def _launched_lines(report: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What kernels were compiled to, first those that not all variants have alike."""
    by_name = {name: row["launched"] for name in names for row in rows_of(report, name) if row.get("launched")}
    if not by_name:
        return []
    alike = set.intersection(*({tuple(one.values()) for one in kernels} for kernels in by_name.values()))
    lines = ["", "| variant | kernel | warps | registers | spilled | shared, bytes | fit | carveout, % |"]
    lines.append(f"|{'---|' * 8}")
    for name, kernels in by_name.items():
        for one in kernels:
            if tuple(one.values()) not in alike:
                lines.append(f"| {name} | {' | '.join(str(value) for value in one.values())} |")
    for values in sorted(alike):
        lines.append(f"| all | {' | '.join(str(value) for value in values)} |")
    return lines


def _each(rows: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{row[name]:.3f}" for row in rows)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    return f"{statistics.mean(row[name] for row in rows):.3f}" if rows else ""


def _profile_cells(profile: dict[str, Any] | None, names: Sequence[str]) -> list[str]:
    return ["" if profile is None else f"{profile['gaps'][name]:.0f}" for name in names]
