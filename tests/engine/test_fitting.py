"""Fitted temperatures: figures from answers that were not fitted to, and where the engine finds them again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkchat.engine import fitting
from sparkchat.engine.calibration import measure
from sparkchat.engine.correction_fit import fit_correction
from sparkchat.engine.engine import Engine
from sparkchat.engine.fitting import fit
from sparkchat.errors import UsageError
from sparkchat.params import LoadSpec


def blocks(count: int, scale: float, chats: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 2, generator=generator) * 2 + 1
    ok = torch.rand(count, 2, generator=generator) < torch.sigmoid(logits / scale)
    return {
        "logits": logits.tolist(),
        "accepted": ok.long().cumprod(dim=1).sum(dim=1).tolist(),
        "judged": [2] * count,
        "chat": [n % chats for n in range(count)],
    }


def spec(pair: Any, cache: Path | None, **changes: Any) -> LoadSpec:
    given = {"device": "cpu", "context": 64, "threads": 1, "cache_dir": None if cache is None else str(cache)}
    return LoadSpec(name="x", model_path=str(pair.target), drafter_path=str(pair.drafter), **(given | changes))


def test_every_answer_is_judged_by_a_fit_to_others(tiny_pair: Any) -> None:
    asked = {"blocks": blocks(15000, 2.5, 30), "spec": spec(tiny_pair, None).to_json()}
    answer = fit(asked)
    assert (answer["num_blocks"], answer["num_held_out"], answer["file"]) == (15000, 15000, None)
    assert [m["num_samples"] for m in answer["after"]] == [15000, 15000]
    assert all(m["ece"] < 0.02 for m in answer["after"])
    assert all(m["ece"] > 0.08 for m in answer["before"])
    assert answer["temperatures"] == pytest.approx([2.5, 2.5], rel=0.25)
    # Perfect confidences are off by about sqrt(2 bins p (1 - p) / (pi N)).
    assert all(0.003 < found < 0.02 for found in answer["chance"])


def test_what_an_answer_says_does_not_reach_the_fit_it_is_judged_by() -> None:
    made = blocks(3000, 2.5, 30)
    columns = {name: torch.tensor(made[name]) for name in ("logits", "accepted", "judged", "chat")}

    def held_out(accepted: torch.Tensor) -> torch.Tensor:
        of = fitting.Judged(**{**columns, "accepted": accepted})
        return of.held_out(lambda part: fit_correction(*(x[part] for x in (of.logits, of.accepted, of.judged))))

    second = columns["chat"] % fitting.FOLDS == 1
    before, after = held_out(columns["accepted"]), held_out(columns["accepted"].masked_fill(second, 0))
    assert torch.equal(before[second], after[second])
    assert not torch.allclose(before[~second], after[~second], atol=0.01)


def test_chance_is_what_perfect_confidences_show() -> None:
    generator = torch.Generator().manual_seed(3)
    alive = torch.rand(400, 2, generator=generator, dtype=torch.float64).cumprod(dim=1)
    judged = torch.tensor([2] * 300 + [1] * 100)
    one, two = fitting.chance_errors(alive, judged)
    own = []
    for _ in range(40):
        ok = torch.rand(400, generator=generator, dtype=torch.float64) < alive[:, 0]
        own.append(measure(alive[:, :1], ok.long(), judged)[0].ece)
    assert one == pytest.approx(sum(own) / 40, rel=0.15)
    assert two is not None
    assert fitting.chance_errors(alive, torch.ones(400, dtype=torch.int64))[1] is None


def test_one_answer_is_fitted_and_measured_on_itself(tiny_pair: Any) -> None:
    answer = fit({"blocks": blocks(500, 1.0, 1), "spec": spec(tiny_pair, None).to_json()})
    assert (answer["num_blocks"], answer["num_held_out"]) == (500, 0)
    assert answer["after"][0]["num_samples"] == 500


def test_too_few_blocks_are_refused(tiny_pair: Any) -> None:
    with pytest.raises(UsageError, match="too few"):
        fit({"blocks": blocks(20, 1.0, 3), "spec": spec(tiny_pair, None).to_json()})


def test_the_engine_finds_what_was_fitted_for_its_pair(tiny_pair: Any, tmp_path: Path) -> None:
    loaded = spec(tiny_pair, tmp_path)
    answer = fit({"blocks": blocks(600, 3.0, 9), "spec": loaded.to_json(), "about": {"temperature": 1.0}})
    assert json.loads(Path(answer["file"]).read_text())["about"]["temperature"] == 1.0
    info = Engine(loaded).info
    # Two positions were fitted; the drafter has five.
    assert info["temperatures"] == [*answer["temperatures"], *answer["temperatures"][-1:] * 3]
    assert info["temperatures_source"] == "fitted"
    shipped = spec(tiny_pair, tmp_path, shipped_temperatures=(1.5,) * 5)
    assert Engine(shipped).info["temperatures_source"] == "fitted"
    own = spec(tiny_pair, tmp_path, temperatures=(0.5,) * 5)
    assert Engine(own).info["temperatures"] == [0.5] * 5
    elsewhere = spec(tiny_pair, tmp_path / "other", shipped_temperatures=(1.5, 2.0))
    assert Engine(elsewhere).info["temperatures"] == [1.5, 2.0, 2.0, 2.0, 2.0]
    assert Engine(spec(tiny_pair, tmp_path / "other")).info["temperatures"] is None
    assert Engine(spec(tiny_pair, tmp_path, dtype="bfloat16")).info["temperatures"] is None


def test_a_damaged_file_is_reported_and_not_used(tiny_pair: Any, tmp_path: Path) -> None:
    answer = fit({"blocks": blocks(600, 3.0, 9), "spec": spec(tiny_pair, tmp_path).to_json()})
    Path(answer["file"]).write_text("{")
    events: list[dict[str, Any]] = []
    engine = Engine(spec(tiny_pair, tmp_path, shipped_temperatures=(2.0,)), events.append)
    assert (engine.info["temperatures"], engine.info["temperatures_source"]) == ([2.0] * 5, "shipped")
    assert [answer["file"] in e["message"] for e in events if e["event"] == "notice"] == [True]


def test_the_process_answers_in_json_also_when_it_refuses(
    tiny_pair: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"blocks": blocks(3, 1.0, 3), "spec": spec(tiny_pair, None).to_json()}
    monkeypatch.setattr(fitting.sys, "stdin", io.StringIO(json.dumps(asked)))
    fitting.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"] == "UsageError"
