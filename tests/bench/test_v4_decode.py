"""The V4 benchmark runs from end to end on a tiny model, and its report says what is met."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import v4_shapes  # noqa: E402
import v4_table  # noqa: E402


def run(out: Path, *arguments: str) -> dict[str, Any]:
    script = str(ROOT / "benchmarks" / "v4_decode.py")
    command = [sys.executable, script, "--tiny", "--commit", "abc", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| measured | value | bar | met |" in done.stdout
    return json.loads(out.read_text(encoding="utf-8"))


def test_a_part_is_measured_and_judged(tmp_path: Path) -> None:
    named = "usual; whole=8,streams=4"
    report = run(tmp_path / "report.json", "--gpus", "1", "--parts", "alone,variants", "--variants", named)
    assert report["commit"] == "abc" and report["rows"][-1]["part"] == "end"
    measured = [row for row in report["rows"] if "gpu_ms" in row]
    assert all(row["tokens_per_second"] > 0 for row in measured)
    off, static = (next(r for r in measured if r["mode"] == mode) for mode in ("off", "static"))
    assert off["rows"] == 1.0 and off["draft_ms"] < static["draft_ms"]
    assert static["rows"] == 1 + report["block"]
    of_variants = [row for row in report["rows"] if row["part"] == "variants"]
    timed = [row["row"] for row in of_variants if "gpu_ms" in row]
    # Two turns, the second in the opposite order; a plain step and a round each.
    assert timed == ["usual"] * 2 + ["whole=8,streams=4"] * 4 + ["usual"] * 2
    assert not [row for row in of_variants if "error" in row]
    for row in report["rows"]:
        if row["part"] == "profile" or "profile" in row:
            gaps = row["gaps"]
            told = gaps["kernels_us"] + gaps["gap_us"] - gaps["overlap_us"] + gaps["between_us"]
            assert told == pytest.approx(gaps["span_us"]) and row["timed_ms"] > 0 and gaps["front"]


@pytest.mark.slow
def test_one_process_runs_every_part(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "--gpus", "1")
    by_part = {row["part"] for row in report["rows"]}
    assert by_part == {"alone", "profile", "batches", "mtp", "plain", "contexts", "end"}


@pytest.mark.slow
def test_two_processes_share_the_model(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "--gpus", "2", "--parts", "alone,variants,mtp1")
    assert report["rows"][-1]["row"] == "all parts ran"


def test_floors_are_those_of_the_published_shapes(tmp_path: Path) -> None:
    """Section 7 of the notes on the model: 11.2 GB for a row, 27.3 GB for six, 3.5 ms for a round on two GPUs."""
    dspark, mtp = v4_shapes.write(tmp_path, is_tiny=False)
    two = v4_shapes.floors(dspark, 5, 2, 4.3)
    assert two["step"] == pytest.approx(1.304, rel=0.02)
    assert 2 * 4.3 * two["verify"] == pytest.approx(27.3, rel=0.02)
    assert 3.3 < two["round"] < 4.0
    assert v4_shapes.floors(dspark, 5, 4, 4.3)["round"] == pytest.approx(two["round"] / 2)
    assert "dspark_block_size" not in json.loads((mtp / "config.json").read_text(encoding="utf-8"))


def report_of(**changes: float) -> dict[str, Any]:
    speeds = {"static, field": 600.0, "compact, field": 690.0, "DSpark, length 4.0": 620.0, "DSpark, length 5.4": 840.0}
    rows: list[dict[str, Any]] = [
        {"part": "alone", "row": name, "mode": "static", "batch": 1, "gpu_ms": 6.0, "tokens_per_second": speed}
        for name, speed in (speeds | changes).items()
    ]
    for row in rows:
        row["tokens_per_second_at_length"] = row["tokens_per_second"]
    rows.append({"part": "alone", "row": "off, drafter loaded", "mode": "off", "batch": 1, "gpu_ms": 2.0})
    for arm, speed in (("off", 400.0), ("static", 600.0)):
        rows.append({"part": "batches", "row": arm, "mode": arm, "batch": 1, "tokens_per_second": speed})
    rows.append({"part": "mtp", "row": "mtp 3", "mode": "static", "batch": 1, "tokens_per_second": 500.0})
    floors = {"step": 1.3, "verify": 3.0, "draft": 0.5, "round": 3.5}
    return {"gpus": 2, "tiny": False, "floors_ms": floors, "rows": rows}


def test_bars_are_judged_by_what_was_measured() -> None:
    report = report_of()
    assert all(met in (True, None) for *_, met in v4_table.judged(report))
    slow = v4_table.judged(report_of(**{"compact, field": 610.0, "DSpark, length 5.4": 700.0}))
    missed = [what for what, _, _, met in slow if met is False]
    assert missed == ["compact / static, batch 1, field", "tokens/s at length 5.4"]
    behind = copy.deepcopy(report)
    behind["rows"][-1]["tokens_per_second"] = 650.0
    assert v4_table.judged(behind)[-1][3] is False


def test_a_run_that_was_cut_is_judged_by_what_it_has() -> None:
    report = report_of()
    report["rows"] = report["rows"][:1]
    assert [what for what, *_ in v4_table.judged(report)] == ["DSpark round, batch 1, ms", "... over its floor"]


def test_kernels_are_counted_where_they_belong() -> None:
    spent = {"ncclDevKernel_AllGather": 3.0, "_find_laws": 2.0, "nvjet_tst_64x8": 5.0, "_fp8_linear": 4.0, "some": 1.0}
    times = {name: v4_table.Spent(us, 1.0) for name, us in spent.items()}
    assert v4_table.by_part(times) == {"products": 9.0, "all-reduce": 3.0, "draws": 2.0, "other": 1.0}
    folders = {file.parent.name for file in v4_table.KERNELS.glob("*/kernel.py")}
    assert set(v4_table.FOLDERS) & folders >= {"latent_attention", "experts", "hyper", "markov", "accept"}
