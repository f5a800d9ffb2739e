"""What a profile tells of gaps, and variants of launch plans: named, taken, timed side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import v4_gaps  # noqa: E402
import v4_table  # noqa: E402
import v4_variants  # noqa: E402

from sparkchat.kernels import launched  # noqa: E402
from sparkchat.kernels.experts import plan as experts  # noqa: E402
from sparkchat.kernels.hyper import kernel as hyper  # noqa: E402
from sparkchat.kernels.launched import Launched, LaunchLog  # noqa: E402
from sparkchat.kernels.plans import LaunchPlans  # noqa: E402

Launch = v4_gaps.Launch
TWO_STEPS = [
    Launch("Memcpy HtoD", 7, 0.0, 1.0), Launch("_a", 7, 2.0, 5.0), Launch("_b", 7, 4.5, 9.0),
    Launch("Memcpy HtoD", 7, 19.0, 20.0), Launch("_a", 7, 24.0, 26.0), Launch("_b", 7, 26.5, 30.0),
]  # fmt: skip


def test_gaps_and_kernels_add_up_to_the_whole() -> None:
    gaps = v4_gaps.gaps_of(TWO_STEPS, 2)
    assert gaps["kernels_us"] == 0.5 * (1 + 3 + 4.5 + 1 + 2 + 3.5)
    assert (gaps["gap_us"], gaps["overlap_us"], gaps["between_us"]) == (0.5 * (1 + 4 + 0.5), 0.25, 5.0)
    assert gaps["kernels_us"] + gaps["gap_us"] - gaps["overlap_us"] + gaps["between_us"] == gaps["span_us"] == 15.0
    assert gaps["idle_us"] == gaps["gap_us"] and gaps["launches"] == 3
    # Gaps a step, the mean with overlap against it, launches, overlap, launches that overlap.
    assert gaps["front"] == [["_a", 2.5, 2.5, 1.0, 0.0, 0.0], ["_b", 0.25, 0.0, 1.0, 0.25, 0.5]]
    assert gaps["behind"][0][:2] == ["Memcpy HtoD", 2.5]


def test_streams_have_gaps_of_their_own() -> None:
    beside = Launch("_c", 8, 9.0, 19.0)
    gaps = v4_gaps.gaps_of(sorted([*TWO_STEPS, beside], key=lambda one: one.start_us), 2)
    assert gaps["streams"] == 2 and gaps["gap_us"] == 2.75
    assert gaps["idle_us"] == 0.5 * (1 + 4 + 0.5) - 5.0  # Nothing of what lies between the steps was idle.


def event(name: str, start: float, device: str = "CUDA", **more: Any) -> SimpleNamespace:
    told = {"is_user_annotation": False, "device_index": 0, "device_resource_id": 7, "thread": 1, "cpu_parent": None}
    kind, times = SimpleNamespace(name=device), SimpleNamespace(start=start, end=start + 1)
    return SimpleNamespace(name=name, device_type=kind, time_range=times, **(told | more))


def test_only_what_ran_on_the_gpu_is_a_launch() -> None:
    events = [event("_b", 3.0), event("cudaGraphLaunch", 0.0, "CPU"), event("step", 0.0, is_user_annotation=True),
              event("_a", 1.0), event("Buffer Flush", 0.0)]  # fmt: skip
    assert [launch.name for launch in v4_gaps.launches_of(events, on_gpu=True)] == ["_a", "_b"]
    nested = [event("outer", 0.0, "CPU"), event("inner", 0.0, "CPU", cpu_parent=object())]
    assert [launch.name for launch in v4_gaps.launches_of(nested, on_gpu=False)] == ["outer"]


def test_variants_are_named_as_plans_are_cut() -> None:
    plans = v4_variants.parsed("usual; whole=8,streams=4,overlap=none; whole=5x2x4,carveout=100@_mix_experts;")
    assert list(plans.values()) == [
        LaunchPlans(),
        LaunchPlans(whole="8", streams=4, overlap="none"),
        LaunchPlans(whole="5 of 2 pairs, 4 stages", carveout=100, carved="_mix_experts"),
    ]
    assert len(v4_variants.parsed(v4_variants.DEFAULT)) == 8
    for wrong in ("whole=5x2", "streams=3", "overlap=some", "carveout=101", "pairs=2", "streams=2,streams=2"):
        with pytest.raises(ValueError, match=r"\w"):
            v4_variants.parsed(wrong)


def test_launches_take_what_a_variant_names_until_another_does() -> None:
    usual = experts.WHOLE, hyper.PLAN
    try:
        LaunchPlans(whole="8", streams=4).take()
        assert experts.whole_plan(6) is experts.WHOLE_TRIED["8"] and hyper.PLAN.warps == 4
        assert hyper.PLAN.programs == usual[1].programs
        LaunchPlans(streams=8).take()
        assert experts.WHOLE is usual[0] and hyper.PLAN.warps == 8
    finally:
        LaunchPlans().take()
    assert usual == (experts.WHOLE, hyper.PLAN)


def test_kernels_ask_for_shared_memory_until_the_log_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {11: -1, 12: -1}

    def call(name: str, *arguments: Any) -> None:
        if name == "cuFuncSetAttribute":
            asked[arguments[0].value] = arguments[2]

    monkeypatch.setattr(launched, "_call", call)
    monkeypatch.setattr(launched, "carveout_of", asked.__getitem__)
    monkeypatch.setattr(launched, "fit_of", lambda compiled: 5)

    def compiled(name: str, function: int) -> SimpleNamespace:
        metadata = SimpleNamespace(num_warps=4, shared=41024)
        return SimpleNamespace(name=name, function=function, n_regs=96, n_spills=0, metadata=metadata)

    log, one, two = LaunchLog(100, "_mix_experts"), compiled("_mix_experts", 11), compiled("_route", 12)
    for kernel in (one, two, one, None):
        log.add(kernel)
    assert asked == {11: 100, 12: -1}
    assert log.kernels() == [
        Launched("_mix_experts", 4, 96, 0, 41024, 5, 100), Launched("_route", 4, 96, 0, 41024, 5, -1)
    ]  # fmt: skip
    log.close()
    assert asked == {11: -1, 12: -1}


def test_variants_stand_side_by_side() -> None:
    def rows(name: str, off: float, static: float, shared: int) -> list[dict[str, Any]]:
        timed = [
            {"mode": mode, "gpu_ms": ms + turn, "draft_ms": 0.5, "verify_ms": ms, "card": {"sm_mhz": 1980 - turn}}
            for turn in (0, 1) for mode, ms in (("off", off), ("static", static))
        ]  # fmt: skip
        gaps = v4_gaps.gaps_of(TWO_STEPS, 2)
        shape = {"name": "_mix_experts", "warps": 2, "registers": 96, "spilled": 0, "shared": shared}
        profile = {"profile": "static", "gaps": gaps, "step_ms": 7.0, "mean_ms": 7.1, "kernels": [["_a", 2.5]]}
        told = [*timed, profile, {"launched": [shape, {**shape, "name": "_route", "shared": 0}]}]
        return [{"part": "variants", "row": name, **one} for one in told]

    start = {"part": "variants", "row": "start"}
    lines = v4_variants.variant_lines({"rows": [start, *rows("one", 4.25, 6.75, 25), *rows("two", 4.5, 7.5, 41)]})
    assert "| one | 4.250, 5.250 | 6.750, 7.750 | 0.500 | 6.750 | 8 | 3 | 0 | 7.000 |  |  | 1980, 1979 |  |" in lines
    assert "| two | _mix_experts | 2 | 96 | 0 | 41 |" in lines and "| all | _route | 2 | 96 | 0 | 0 |" in lines
    assert "| _a | 2 / 2 | 2 / 2 |" in lines
    assert not v4_variants.variant_lines({"rows": []})
    assert v4_table.gap_lines([("off", {"gaps": {}})]) == []
