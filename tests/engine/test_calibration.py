"""Survival, its metrics and the sequential fit, against loops that follow the definitions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from sparkchat.engine.calibration import (
    GRID,
    auc,
    brier,
    ece,
    fit_temperatures,
    load_temperatures,
    measure,
    save_temperatures,
    survival,
)
from sparkchat.errors import DamagedFile, UsageError

INF = math.inf


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def test_survival_is_the_running_product_at_each_positions_temperature():
    got = survival(torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]]), [1.0, 2.0, 0.5])
    want = [[sigmoid(1), sigmoid(1) * sigmoid(-1), sigmoid(1) * sigmoid(-1) * sigmoid(1)]]
    assert got.dtype == torch.float64
    assert got[0].tolist() == pytest.approx(want[0], rel=1e-12)
    plain = survival(torch.tensor([[1.0, -2.0, 0.5]]))
    assert plain[0].tolist() == pytest.approx(
        [sigmoid(1), sigmoid(1) * sigmoid(-2), sigmoid(1) * sigmoid(-2) * sigmoid(0.5)]
    )


def test_infinite_confidence_is_certainty():
    got = survival(torch.tensor([[INF, -INF, INF], [3e38, -3e38, 0.0]]), [0.1, 10.0, 1.0])
    assert got.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_confidence_that_is_not_a_number_is_damage():
    with pytest.raises(DamagedFile):
        survival(torch.tensor([[0.0, math.nan]]))


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, INF]])
def test_temperatures_that_do_not_fit_are_refused(temperatures):
    with pytest.raises(UsageError):
        survival(torch.zeros(1, 2), temperatures)


def test_survival_never_grows_along_the_block():
    torch.manual_seed(0)
    alive = survival(torch.randn(50, 9) * 30, [0.1 + i for i in range(9)])
    assert (alive[:, 1:] <= alive[:, :-1]).all()
    assert ((alive >= 0) & (alive <= 1)).all()


def naive_ece(predicted: Sequence[float], labels: Sequence[bool]) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, label in zip(predicted, labels, strict=True):
        inside = min(max(p, 1e-8), 1 - 1e-8)
        bins.setdefault(math.floor(20 * inside), []).append((inside, label))
    return sum(abs(sum(p for p, _ in cell) - sum(label for _, label in cell)) for cell in bins.values()) / len(
        predicted
    )


def naive_auc(predicted: Sequence[float], labels: Sequence[bool]) -> float | None:
    pairs = [
        1.0 if p > q else 0.5 if p == q else 0.0
        for p, y in zip(predicted, labels, strict=True) if y
        for q, z in zip(predicted, labels, strict=True) if not z
    ]  # fmt: skip
    return sum(pairs) / len(pairs) if pairs else None


def test_metrics_agree_with_their_definitions():
    rng = random.Random(7)
    for _ in range(60):
        n = rng.randint(1, 40)
        predicted = [rng.choice([0.0, 1.0, 0.05, 0.5, 0.95, rng.random()]) for _ in range(n)]
        labels = [rng.random() < 0.6 for _ in range(n)]
        p, y = torch.tensor(predicted, dtype=torch.float64), torch.tensor(labels)
        assert ece(p, y) == pytest.approx(naive_ece(predicted, labels), abs=1e-12)
        assert auc(p, y) == pytest.approx(naive_auc(predicted, labels))
        assert brier(p, y) == pytest.approx(sum((a - b) ** 2 for a, b in zip(predicted, labels, strict=True)) / n)


def test_metrics_without_data_are_not_measured():
    (only,) = measure(torch.ones(3, 1), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert (only.num_samples, only.ece, only.auc, only.brier) == (0, None, None, None)
    assert auc(torch.tensor([0.3, 0.4]), torch.tensor([True, True])) is None


def test_the_grid_holds_one_and_is_wide():
    assert 1.0 in GRID
    assert len(GRID) >= 41
    assert min(GRID) == pytest.approx(0.1)
    assert max(GRID) == pytest.approx(10.0)
    assert list(GRID) == sorted(GRID)


def blocks(scales: Sequence[float], n: int, seed: int, spread: float = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose true conditional acceptance is sigmoid(z / scale), and accepted lengths."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, len(scales), generator=generator) * spread + 1
    ok = torch.rand(n, len(scales), generator=generator) < torch.sigmoid(logits / torch.tensor(scales))
    return logits, ok.long().cumprod(dim=1).sum(dim=1)


def naive_fit(logits: list[list[float]], accepted: list[int], drafted: list[int]) -> list[float]:
    chosen: list[float] = []
    alive = [1.0] * len(logits)
    for k in range(len(logits[0])):
        used = [i for i in range(len(logits)) if drafted[i] > k]
        labels = [accepted[i] > k for i in used]
        scores, briers = dict.fromkeys(GRID, 0.0), dict.fromkeys(GRID, 0.0)
        for t in GRID if used else ():
            predicted = [alive[i] * sigmoid(logits[i][k] / t) for i in used]
            scores[t] = naive_ece(predicted, labels)
            briers[t] = sum((p - y) ** 2 for p, y in zip(predicted, labels, strict=True)) / len(used)
        noise = 0.1 * math.sqrt(20 / len(used)) if used else 0.0
        good = [t for t in GRID if scores[t] <= min(min(scores.values()) + noise, scores[1.0])]
        best = min(briers[t] for t in good)
        ties = [t for t in good if briers[t] <= best + 1e-15]
        chosen.append(min(ties, key=lambda t: abs(math.log(t))))
        alive = [a * sigmoid(row[k] / chosen[-1]) for a, row in zip(alive, logits, strict=True)]
    return chosen


def test_the_fit_follows_the_procedure():
    logits, accepted = blocks([2.0, 0.5, 1.0], 60, 1)
    drafted = torch.tensor([3, 3, 2, 3, 1] * 12)
    accepted = torch.minimum(accepted, drafted)
    fit = fit_temperatures(logits, accepted, drafted)
    assert list(fit.temperatures) == naive_fit(logits.double().tolist(), accepted.tolist(), drafted.tolist())


def test_the_fit_finds_the_temperatures_that_made_the_data():
    logits, accepted = blocks([2.0, 1.0, 3.0], 20000, 2)
    fit = fit_temperatures(logits, accepted)
    assert fit.temperatures == pytest.approx([2.0, 1.0, 3.0], rel=0.25)
    assert fit.after[0].ece <= fit.before[0].ece
    assert all(metrics.ece < 0.02 for metrics in fit.after)
    assert max(metrics.ece for metrics in fit.before) > 0.05
    assert [metrics.num_samples for metrics in fit.after] == [20000] * 3
    # One temperature keeps the order of one position.
    assert fit.after[0].auc == pytest.approx(fit.before[0].auc)


def test_few_blocks_are_not_fitted_to_noise():
    """Against taking the least calibration error alone."""
    misses = {"ours": 0.0, "least error": 0.0}
    for seed in range(12):
        logits, accepted = blocks([2.0], 100, seed, spread=1.5)
        labels = accepted > 0
        plain = min(GRID, key=lambda t: ece(torch.sigmoid(logits[:, 0].double() / t), labels))
        (ours,) = fit_temperatures(logits, accepted).temperatures
        misses["ours"] += abs(math.log(ours / 2.0))
        misses["least error"] += abs(math.log(plain / 2.0))
    assert misses["ours"] < 0.8 * misses["least error"]


def test_calibrated_data_keeps_one_and_undrafted_positions_keep_one():
    logits = torch.zeros(1000, 2)
    accepted = torch.tensor([1, 0] * 500)
    fit = fit_temperatures(logits, accepted, torch.ones(1000, dtype=torch.int64))
    assert fit.temperatures == (1.0, 1.0)  # sigmoid(0) is 0.5 at any temperature
    assert fit.after[1].num_samples == 0


def test_an_accepted_length_beyond_what_was_drafted_is_refused():
    with pytest.raises(ValueError, match="accepted_len"):
        fit_temperatures(torch.zeros(2, 2), torch.tensor([2, 2]), torch.tensor([2, 1]))


def test_saved_temperatures_come_back_and_damage_is_reported(tmp_path):
    assert load_temperatures(tmp_path, "k") == (None, None)
    path = save_temperatures(tmp_path, "k", [1.5, 0.25])
    assert load_temperatures(tmp_path, "k") == ((1.5, 0.25), None)
    for broken in (
        '{"schema": "sparkchat.temperatures/1"}',
        "x",
        path.read_text().replace("1.5", "-1.5"),
        path.read_text().replace("1.5", "true"),
    ):
        path.write_text(broken)
        temperatures, notice = load_temperatures(tmp_path, "k")
        assert temperatures is None
        assert path.name in notice
