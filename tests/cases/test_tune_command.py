"""``sparkchat tune`` as a user meets it: real processes, a pair whose confidence is off by a known factor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import parse_strict, sparkchat
from fixtures import bigram
from sparkchat.cli.tune import _refuse_unkept, _show_cost
from sparkchat.errors import SparkchatError

P = (0.2, 0.5, 0.3)
Q = (0.45, 0.35, 0.2)
OVERLAP = sum(map(min, P, Q))
"""What share of the drafts is accepted at temperature 1."""
CLAIMED = 3.0
"""The drafter's confidence logit, whatever it drafts."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    target = bigram.write_bigram(folder / "target", bigram.single_row(P))
    law = torch.tensor(Q).log().expand(3, 3).clone()
    drafter = bigram.BigramDrafter(kind=None, logits=law, confidence=lambda token: CLAIMED, block=3)
    return target, bigram.write_bigram_drafter(folder / "drafter", bigram.single_row(P), drafter)


def tuned(pair: tuple[Path, Path], *args: str) -> Any:
    return sparkchat("tune", pair[0], "--drafter", pair[1], "--temperature", "1", "--sts", *args)


def test_temperatures_are_fitted_kept_and_used(pair: tuple[Path, Path], own_folders: Path) -> None:
    done = tuned(pair, "--prompts", "9", "--tokens", "100", "--json")
    assert done.code == 0, done.err
    sts = parse_strict(done.out)["sts"]
    wanted = CLAIMED / math.log(OVERLAP / (1 - OVERLAP))  # sigmoid(CLAIMED / wanted) = OVERLAP
    assert sts["temperatures"] == pytest.approx([wanted] * 3, rel=0.6)
    assert len(sts["before"]) == len(sts["after"]) == 3
    assert sts["before"][0]["ece"] == pytest.approx(1 / (1 + math.exp(-CLAIMED)) - OVERLAP, abs=0.12)
    assert sts["after"][0]["ece"] < 0.11
    assert sts["after"][0]["ece"] < sts["before"][0]["ece"]
    assert sts["after"][0]["auc"] == 0.5  # one confidence for all
    kept = Path(sts["file"])
    assert kept.parent == own_folders / "cache" / "sparkchat" / "temperatures"
    assert kept.stat().st_mode & 0o777 == 0o600
    trace = own_folders / "t.spark.jsonl"
    options = ("--drafter", pair[1], "--temperature", "1", "--max-tokens", "200", "--ignore-eos", "--mode", "static")
    assert sparkchat("run", pair[0], *options, "--trace", trace, "hello").code == 0
    header = json.loads(trace.read_text().splitlines()[0])
    assert (header["temperatures"], header["temperatures_source"]) == (sts["temperatures"], "fitted")
    # The same can be fitted to that answer.
    own = tuned(pair, "--from", str(trace))
    assert own.code == 0, own.err
    assert "CALIBRATION ERROR" in own.out
    assert "[speculation] temperatures = [" in own.out
    assert json.loads(kept.read_text())["about"]["source"] == ["t.spark.jsonl"]


def test_costs_are_measured_kept_and_planned_by(pair: tuple[Path, Path], own_folders: Path) -> None:
    shared = (pair[0], "--drafter", pair[1], "--context", "400")
    done = sparkchat("tune", *shared, "--cost", "--concurrency", "2", "--json")
    assert done.code == 0, done.err
    report = parse_strict(done.out)
    assert "sts" not in report
    cost = report["cost"]
    assert [batch["requests"] for batch in cost["batches"]] == [1, 2]
    assert cost["batches"][1]["rows"] == [2, 4, 6, 8]
    assert Path(cost["file"]).parent == own_folders / "cache" / "sparkchat" / "cost_tables"
    assert cost["context"]["ms_per_token"] >= 0
    trace = own_folders / "t.spark.jsonl"
    options = ("--mode", "compact", "--max-tokens", "12", "--ignore-eos", "--trace", trace)
    assert sparkchat("run", *shared, *options, "hello").code == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert (lines[0]["cost_table"]["source"], lines[0]["cost_table"]["id"]) == ("cached", cost["id"])
    planned = [line for line in lines if line["type"] == "step" and line["budget"] is not None]
    assert planned
    assert all(line["predicted_step_ms"] > 0 for line in planned)


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("--prompts", "0"), 2, "--prompts 0"),
        (("--from", "/nowhere.spark.jsonl"), 2, "not there"),
        (("--drafter", "none"), 2, "nothing to tune"),
    ],
)
def test_what_cannot_be_tuned_is_refused(pair: tuple[Path, Path], args: tuple[str, ...], code: int, word: str) -> None:
    done = tuned(pair, *args)
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert word in done.err


def test_what_cannot_be_kept_is_an_error_and_shown_all_the_same() -> None:
    _refuse_unkept({"model": "m", "cost": {"file": "/kept"}, "sts": {"file": "/kept"}})
    with pytest.raises(SparkchatError, match=r"step costs of m were found.*could not be kept"):
        _refuse_unkept({"model": "m", "cost": {"file": None}})


def test_what_cached_tokens_add_is_shown_for_every_number_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    def batch(requests: int, ms: float | None) -> dict[str, Any]:
        extra = None if ms is None else {"tokens": requests, "ms_per_token": ms, "ms_per_token_row": 1e-5}
        return {"requests": requests, "rows": [requests], "step_ms": [5.0], "plain_ms": 4.0, "context": extra}

    whole = {"tokens": 1, "ms_per_token": 0.002, "ms_per_token_row": 0.0}
    _show_cost({"batches": [batch(1, 1.5e-4), batch(32, 4e-5)], "context": whole, "file": None})
    shown = capsys.readouterr().out
    assert "1000 more cached tokens, 1 together: 0.16 ms, and 0.01 ms" in shown
    assert ", 32 together: 0.05 ms, and 0.01 ms for each further row" in shown
    assert "2.00" not in shown
    _show_cost({"batches": [batch(1, None)], "context": whole, "file": None})
    assert "1000 more cached tokens: 2.00 ms, and 0.00 ms for each further row" in capsys.readouterr().out
