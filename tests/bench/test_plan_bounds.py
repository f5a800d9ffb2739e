"""No plan can gain what no plan can: the bounds of benchmarks/plan_bounds.py."""

from __future__ import annotations

import itertools
import json
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


def test_requests_that_share_a_step_verify_the_likeliest_drafts_of_all(tmp_path: Path) -> None:
    """Two requests of one draft each: two, three or four rows. The third row is cheap, the fourth costs too much."""
    path = tmp_path / "report.json"
    batches = [{"requests": 2, "rows": [2, 3, 4], "step_ms": [10.0, 11.0, 40.0]}]
    table = {"id": "x", "source": "measured", "rows": [1, 2], "step_ms": [9.0, 10.0], "batches": batches}
    path.write_text(json.dumps({"together": [{"row": "off"}, {"row": "cost table", "table": table}]}))
    found = plan_bounds.main([str(path), "--requests", "2", "--profile", "0.5", "--steps", "20000"])
    assert [found[name]["rows"] for name in ("everything", "best fixed rows")] == [4, 3]
    assert found["everything"]["tokens_per_second"] == pytest.approx(1e3 * (2 + 2 * 0.5) / 40, rel=0.02)
    # The likelier of two chances that are 0.5 in the mean is more than 0.5 and less than 1.
    assert 2.5 < found["best fixed rows"]["tokens_per_second"] * 11 / 1e3 < 3.0
    with pytest.raises(SystemExit):
        plan_bounds.main(["--ms", "1", "2", "--requests", "2"])
