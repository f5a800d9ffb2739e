"""The fit of temperatures and shifts, the kinds of sampling, and where fitted ones are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkchat.engine.calibration import corrected_survival, load_calibration, measure, save_temperatures, survival
from sparkchat.engine.correction_fit import better_correction, fit_correction
from sparkchat.engine.fitting import fit
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.params import Correction, LoadSpec, SamplingParams
from sparkchat.sampling_kind import KINDS, nearest_kind, sampling_kind


def blocks(count: int, truth: Correction, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator, width = torch.Generator().manual_seed(seed), len(truth.shifts)
    logits = torch.randn(count, width, generator=generator) * 1.5 + 0.5
    chance = torch.sigmoid(logits / torch.tensor(truth.temperatures) + torch.tensor(truth.shifts))
    passed = torch.rand(count, width, generator=generator) < chance
    return logits, passed.long().cumprod(dim=1).sum(dim=1), torch.full((count,), width)


def test_the_fit_finds_what_made_the_data() -> None:
    truth = Correction((1.5, 0.8, 1.0), (0.4, -0.6, 0.3))
    found = fit_correction(*blocks(40000, truth))
    assert found.temperatures == pytest.approx(truth.temperatures, rel=0.1)
    assert found.shifts == pytest.approx(truth.shifts, abs=0.06)


def test_a_shift_mends_what_a_temperature_cannot() -> None:
    logits, accepted, drafted = blocks(20000, Correction((1.0, 1.0), (0.5, 0.5)), seed=1)
    fitted, kept = slice(0, 10000), slice(10000, None)
    found = fit_correction(logits[fitted], accepted[fitted], drafted[fitted])
    alive = corrected_survival(logits[kept], [found] * 10000)
    after = measure(alive, accepted[kept], drafted[kept])
    before = measure(survival(logits[kept]), accepted[kept], drafted[kept])
    assert all(b.ece > 0.07 and a.ece < 0.02 for a, b in zip(after, before, strict=True))


def test_few_blocks_move_little_and_certain_ones_do_no_harm() -> None:
    few = fit_correction(torch.tensor([[1.0, 1.0]]), torch.tensor([0]), torch.tensor([2]))
    assert abs(few.shifts[0]) < 0.3
    assert few.shifts[1] == few.shifts[0]  # never reached: as the one before
    certain = fit_correction(torch.full((500, 1), 3e38), torch.ones(500, dtype=torch.int64), torch.ones(500))
    assert 0.1 <= certain.temperatures[0] <= 10.0
    nothing = fit_correction(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert nothing == Correction((1.0, 1.0), (0.0, 0.0))


def test_shifts_that_do_not_help_others_are_left_out() -> None:
    logits, accepted, drafted = blocks(60, Correction((1.0,) * 5, (0.0,) * 5), seed=4)
    plain, folds = Correction((1.0,) * 5, (0.0,) * 5), torch.arange(60) % 2 == 0
    assert better_correction(logits, accepted, drafted, plain, folds) == plain
    parts = blocks(4000, Correction((1.0,) * 5, (0.6,) * 5), seed=5)
    assert better_correction(*parts, plain, torch.arange(4000) % 2 == 0).shifts[0] > 0.4


def test_each_row_has_its_own_correction() -> None:
    logits = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    own = Correction((2.0, 1.0, 1.0), (0.5, 0.0, 9.0))  # longer than the block
    found = corrected_survival(logits, [None, own])
    assert found[0].tolist() == survival(logits)[0].tolist()
    chances = torch.sigmoid(torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert found[1].tolist() == pytest.approx([float(chances[0]), float(chances[0] * chances[1])])
    with pytest.raises(DamagedFile):
        corrected_survival(torch.tensor([[float("nan")]]), [None])


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        ({}, "greedy"),
        ({"top_p": 0.5, "top_k": 3}, "greedy"),
        ({"repetition_penalty": 1.1}, "greedy-penalised"),
        ({"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}, "cool-filtered-penalised"),
        ({"temperature": 0.7}, "warm"),
        ({"temperature": 0.6, "min_p": 0.1}, "warm-filtered"),
        ({"temperature": 1.0}, "hot"),
        ({"temperature": 1.0, "logit_bias": ((3, 1.0),)}, "hot-penalised"),
        ({"temperature": 0.59, "presence_penalty": 0.5}, "cool-penalised"),
    ],
)
def test_kinds_of_sampling(sampling: dict[str, Any], kind: str) -> None:
    assert sampling_kind(SamplingParams(**sampling)) == kind
    assert kind in KINDS


@pytest.mark.parametrize(
    ("kind", "known", "nearest"),
    [
        ("warm-filtered", ("greedy", "warm", "hot"), "warm"),
        ("warm-filtered", ("hot", "warm", "hot-filtered"), "warm"),
        ("warm", ("hot", "cool-filtered", "cool"), "hot"),
        ("warm-filtered", ("hot", "cool-filtered"), "cool-filtered"),
        ("warm-filtered-penalised", ("warm", "cool-filtered-penalised"), "cool-filtered-penalised"),
        ("hot-penalised", ("hot", "cool-filtered-penalised"), None),
        ("hot", ("greedy", "cool", "hot-penalised"), None),
        ("hot", (), None),
    ],
)
def test_the_nearest_kind_has_like_penalties_and_a_like_temperature(
    kind: str, known: tuple[str, ...], nearest: str | None
) -> None:
    assert nearest_kind(kind, known) == nearest


@pytest.mark.parametrize(
    "wrong", [((1.0,), ()), ((), ()), ((0.0,), (0.0,)), ((1.0,), (float("inf"),)), ((True,), (0.0,))]
)
def test_a_correction_that_is_none_is_refused(wrong: tuple) -> None:
    with pytest.raises(UsageError):
        Correction(*wrong)


def test_fits_of_several_kinds_are_kept_beside_each_other(tmp_path: Path) -> None:
    warm, hot = Correction((1.5,), (0.1,)), Correction((2.0,), (-0.1,))
    save_temperatures(tmp_path, "k", [1.0], by_kind={"warm": warm})
    path = save_temperatures(tmp_path, "k", [1.2], by_kind={"hot": hot})
    assert load_calibration(tmp_path, "k") == {"warm": warm, "hot": hot}
    stored = json.loads(path.read_text())
    stored["by_kind"] |= {"cool": {"temperatures": [1.0]}, "hot-filtered": 3}
    path.write_text(json.dumps(stored))
    assert load_calibration(tmp_path, "k") == {"warm": warm, "hot": hot}
    path.write_text("{")
    assert load_calibration(tmp_path, "k") == {}


def test_the_fit_by_kind_reaches_the_engine(tiny_pair: Any, tmp_path: Path) -> None:
    from sparkchat.engine.engine import Engine

    given = {"device": "cpu", "context": 64, "threads": 1, "cache_dir": str(tmp_path)}
    spec = LoadSpec(name="x", model_path=str(tiny_pair.target), drafter_path=str(tiny_pair.drafter), **given)
    logits, accepted, judged = blocks(3000, Correction((1.0, 1.0), (0.7, 0.7)), seed=2)
    asked = {
        "blocks": {
            "logits": logits.tolist(),
            "accepted": accepted.tolist(),
            "judged": judged.tolist(),
            "chat": [n % 30 for n in range(3000)],
            "kind": ["warm" if n % 30 < 25 else None if n % 30 < 29 else "hot" for n in range(3000)],
        },
        "spec": spec.to_json(),
    }
    answer = fit(asked)
    assert set(answer["by_kind"]) == {"warm"}  # too few of the other
    found = answer["by_kind"]["warm"]
    assert found["num_blocks"] == 2500
    assert found["shifts"][0] == pytest.approx(0.7, abs=0.2)
    assert found["after"][0]["ece"] < found["before"][0]["ece"]
    info = Engine(spec).info
    assert list(info["calibration"]) == ["warm"]
    assert info["calibration"]["warm"]["shifts"] == pytest.approx((*found["shifts"], *[found["shifts"][-1]] * 3))
