"""What is made of the GPU benchmark's figures: bars, peers' logs, launches. Its runs need a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_report import judged, table
from gpu_state import summary
from peers import peers_of


def row(name: str, **values: Any) -> dict[str, Any]:
    base = {"batch": 1, "mode": "static", "ms_per_step": 5.0, "gpu_ms_per_step": 5.0, "tokens_per_second": 600.0}
    return {"row": name, **base, "tokens_per_step": 3.72, "idle_share": 0.002, **values}


REPORT: dict[str, Any] = {
    "plain_floor_ms": 3.3,
    "round_floor_ms": 4.2,
    "alone": [
        row("off, no drafter", mode="off", gpu_ms_per_step=4.2),
        row("DSpark 3.72", length=3.72, tokens_per_step=3.10),
        row("DSpark 5.52", length=5.52, gpu_ms_per_step=6.0, tokens_per_step=5.52),
    ],
    "memory": [{"row": "memory", "steps": 10_000, "allocated": 0, "reserved": 512}],
    "together": [
        row("static, chat", batch=32, length=3.5, tokens_per_step=3.5, tokens_per_second=9000.0),
        row("compact, chat", batch=32, mode="compact", length=3.5, tokens_per_step=3.2, tokens_per_second=12_000.0),
    ],
}


def test_bars() -> None:
    found = {what: (value, met) for what, value, _, met in judged(REPORT)}
    assert found["off, no drafter / floor, batch 1"] == ("1.27", True)
    assert found["DSpark 5.52 / floor, batch 1"] == ("1.43", False)
    assert found["memory growth over 10000 steps, bytes"] == ("512", False)
    assert found["compact / our fixed 7, chat, batch 32"] == ("1.33", None)
    assert not any("vLLM" in what for what in found)
    assert judged({}) == []
    assert "| DSpark 3.72 | 1 | 5.000" in table(REPORT)


def test_peers_stand_beside_rows_of_their_length(tmp_path: Path) -> None:
    plain = {"mode": "plain", "tag": "standard", "batch": 1, "tok_s": 190.0, "ms_per_token": 5.2}
    round_ = {"mode": "dspark", "batch": 1, "tok_s": 500.0, "ms_per_token": 2.0, "ms_per_round": 6.8}
    lines = [
        {**round_, "tag": "standard"},
        {**round_, "tag": "synthetic 3.72 (Sampler)", "tokens_per_round": 3.40},
        {**round_, "tag": "synthetic 3.5 (Sampler)", "batch": 32, "tok_s": 9000.0, "tokens_per_round": 3.5},
    ]
    (tmp_path / "plain.log").write_text(f"noise\n@{json.dumps(plain)}\n@{json.dumps({'done': 'plain'})}\n")
    (tmp_path / "dspark.log").write_text("".join(f"@{json.dumps(line)}\n" for line in lines) + '@{"mode": "dsp')
    found = peers_of(tmp_path)
    assert [(r["row"], r["batch"]) for r in found] == [
        ("vLLM plain", 1),
        ("vLLM DSpark 3.72", 1),
        ("vLLM DSpark 3.5", 32),
    ]
    # Both sides by the length that was aimed at: 600 x 3.72 / 3.10 against 500 x 3.72 / 3.40.
    bars = {what: (value, met) for what, value, _, met in judged({**REPORT, "peers": found})}
    assert bars["static at 3.72 a round / vLLM's fixed 7, batch 1, tokens/s"] == ("1.32", True)
    assert bars["compact at 3.5 a round / vLLM's fixed 7, batch 32, tokens/s"] == ("1.33", True)
    assert bars["static at 3.5 a round / vLLM's fixed 7, batch 32, tokens/s"] == ("1.00", None)
    assert peers_of(tmp_path / "nowhere") == []


def test_launches_are_added_up_by_kernel_with_the_gaps_before_them() -> None:
    launches = [("a", 0.0, 2.0), ("b", 3.0, 7.0), ("a", 7.5, 9.5), ("b", 9.0, 13.0)]
    found = summary(launches, steps=2)
    assert found["busy_us_a_step"] == pytest.approx(6.0) and found["gap_us_a_step"] == pytest.approx(0.75)
    assert [(k["name"], k["us_each"], k["launches_a_step"]) for k in found["kernels"]] == [
        ("b", 4.0, 1.0),
        ("a", 2.0, 1.0),
    ]
    assert found["one_step"] == [["a", 2.0, 0.5], ["b", 4.0, 0.0]]
