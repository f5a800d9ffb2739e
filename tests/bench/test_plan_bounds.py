"""No plan can gain what no plan can: the bounds of benchmarks/plan_bounds.py."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_bounds  # noqa: E402

V4 = ["--ms", "4.80", "5.38", "5.78", "6.07", "6.50", "6.76", "--steps", "3000"]


def test_the_best_plan_is_that_of_all_there_are() -> None:
    random = np.random.default_rng(3)
    for _ in range(5):
        tokens = 1.0 + np.pad(np.cumsum(random.random((4, 3)), axis=1), ((0, 0), (1, 0)))
        costs = np.cumsum(0.2 + random.random(4))
        all_of_them = itertools.product(range(4), repeat=4)
        rates = [sum(tokens[range(4), each]) / costs[list(each)].sum() for each in all_of_them]
        assert plan_bounds.best_plan(tokens, costs)[0] == pytest.approx(max(rates))


def test_a_bar_out_of_reach_and_the_slope_that_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_bounds.main([*V4, "--draft-ms", "0.58"])
    rates = {name: found[name]["tokens_per_second"] for name in ("everything", "Algorithm 1", "best plan")}
    assert rates["everything"] < rates["Algorithm 1"] < rates["best plan"] < 1.03 * rates["everything"]
    steep = found["row_ms_for_bar"]
    assert f"from {steep:.3f} ms a row on" in capsys.readouterr().out
    costs = [str(5.38 + steep * rows) for rows in range(6)]
    there = plan_bounds.main(["--ms", *costs, "--steps", "3000", "--json"])
    assert there["best plan"]["tokens_per_second"] == pytest.approx(1.1 * there["everything"]["tokens_per_second"])


def test_a_report_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(
        '{"rows": [{"part": "alone", "row": "cost table", "table": {"rows": [1, 2, 3], "step_ms": [1, 1, 1]}}]}'
    )
    found = plan_bounds.main([str(path), "--profile", "0.5,0.25"])
    # Where rows cost nothing, every plan verifies everything.
    assert {found[name]["drafts"] for name in ("best fixed length", "Algorithm 1", "best plan")} == {2}
    with pytest.raises(SystemExit, match="no cost table of part batches"):
        plan_bounds.main([str(path), "--part", "batches"])
