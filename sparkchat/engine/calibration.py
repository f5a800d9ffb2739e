"""Confidence logits to calibrated survival, and the fit of the temperatures (paper section 4, STS).

The survival a_k = prod_{i<=k} sigmoid(z_i / T_i) predicts that drafts 1..k are all accepted. Temperatures are constants
of a step, so they shift verify lengths and never the output law.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.cache_file import read_json, write_json
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.finite import is_number
from sparkchat.params import Correction

NUM_BINS = 20
GRID: tuple[float, ...] = tuple(10.0 ** (i / 24) for i in range(-24, 25))
"""49 log-spaced temperatures from 0.1 to 10, 1.0 exactly among them."""
SCHEMA = "sparkchat.temperatures/1"
_CLAMP = 1e-8
_NOISE = 0.1
"""Of sqrt(bins / blocks), a quarter of what the ECE of perfect confidences comes to by chance."""


@dataclass(frozen=True)
class PositionMetrics:
    """How well a_k predicts that drafts 1..k are accepted, over the blocks that drafted k."""

    num_samples: int
    ece: float | None
    """Expected calibration error; None without samples."""
    auc: float | None
    """None unless both outcomes occurred."""
    brier: float | None
    """Mean squared error; None without samples."""


@dataclass(frozen=True)
class CalibrationFit:
    """Temperatures per position and what they changed on the blocks they were fitted to."""

    temperatures: tuple[float, ...]
    before: tuple[PositionMetrics, ...]
    """With all temperatures 1."""
    after: tuple[PositionMetrics, ...]


def survival(confidence_logits: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """``[R, g]`` logits (infinite ones allowed) to ``[R, g]`` float64 survivals, non-increasing along g.

    ``temperatures`` holds at least g positive numbers; None means 1 everywhere. Raises DamagedFile on NaN.
    """
    logits = _numbers(confidence_logits)
    if temperatures is not None:
        logits = logits / _scales(temperatures, logits.shape[1]).to(logits.device)
    return torch.sigmoid(logits).cumprod(dim=1)


def corrected_survival(confidence_logits: Tensor, corrections: Sequence[Correction | None]) -> Tensor:
    """As ``survival``, each row by its own correction, at least g long; None leaves a row as it is."""
    logits = _numbers(confidence_logits)
    if any(found is not None for found in corrections):
        ones, width = (1.0,) * logits.shape[1], logits.shape[1]
        scales = [ones if c is None else c.temperatures[:width] for c in corrections]
        shifts = [(0.0,) * width if c is None else c.shifts[:width] for c in corrections]
        logits = logits / logits.new_tensor(scales) + logits.new_tensor(shifts)
    return torch.sigmoid(logits).cumprod(dim=1)


def survival_of(logits: Sequence[float], correction: Correction | None) -> list[float]:
    """As ``corrected_survival`` of one row on the host; a confidence that is no number admits nothing."""
    alive, found = 1.0, []
    for k, logit in enumerate(logits):
        value = logit if correction is None else logit / correction.temperatures[k] + correction.shifts[k]
        alive *= _sigmoid(value)
        found.append(alive)
    return found


def _sigmoid(value: float) -> float:
    if value >= 0.0:
        return 1.0 / (1.0 + math.exp(-value))
    # Of what is no number nothing is left either.
    grown = math.exp(value) if value < 0.0 else 0.0
    return grown / (1.0 + grown)


def _numbers(confidence_logits: Tensor) -> Tensor:
    logits = confidence_logits.double()
    if bool(torch.isnan(logits).any()):
        raise DamagedFile("the drafter's confidence is not a number: its weights are damaged; fetch the drafter again")
    return logits


def _scales(temperatures: Sequence[float], width: int) -> Tensor:
    if len(temperatures) < width or any(not (math.isfinite(t) and t > 0) for t in temperatures):
        raise UsageError(
            f"confidence temperatures {list(temperatures)} do not fit a block of {width}; give {width} positive numbers"
        )
    return torch.tensor(list(temperatures[:width]), dtype=torch.float64)


def fit_temperatures(
    logits: Tensor, accepted_len: Tensor, drafted_len: Tensor | None = None, grid: Sequence[float] = GRID
) -> CalibrationFit:
    """Sequential temperature scaling on N verified blocks.

    ``logits [N, g]`` raw confidence logits, ``accepted_len [N]`` leading drafts accepted when the whole block was
    verified, ``drafted_len [N]`` drafts that counted (less than g where the answer ended in the block; None: all g).
    For k = 1..g in turn, T_k is the grid value with the least ECE of the cumulative a_k, T_1..T_{k-1} staying as
    chosen; 1.0 unless another is strictly better, and a position never drafted keeps 1.0. Among values whose ECE so few
    blocks cannot tell from the least, the least Brier score decides: the ECE of a small sample is mostly noise.
    """
    width = logits.shape[1]
    drafted = torch.full_like(accepted_len, width) if drafted_len is None else drafted_len
    if logits.shape[0] != len(accepted_len) or bool((accepted_len > drafted).any()):
        raise ValueError("accepted_len needs one entry per block, none above drafted_len")
    alive = torch.ones(len(logits), dtype=torch.float64)
    chosen: list[float] = []
    for k in range(width):
        counts = drafted > k
        labels = accepted_len[counts] > k
        chosen.append(_best(alive[counts], logits[counts, k], labels, grid) if bool(counts.any()) else 1.0)
        alive = alive * torch.sigmoid(logits[:, k].double() / chosen[-1])
    return CalibrationFit(
        tuple(chosen),
        measure(survival(logits), accepted_len, drafted),
        measure(survival(logits, chosen), accepted_len, drafted),
    )


def _best(alive: Tensor, logits: Tensor, labels: Tensor, grid: Sequence[float]) -> float:
    """The grid value for one position; alive, logits, labels ``[N]``, N >= 1."""
    by_nearness = [1.0, *sorted(grid, key=lambda t: abs(math.log(t)))]
    predicted = [alive * torch.sigmoid(logits.double() / t) for t in by_nearness]
    errors = [ece(p, labels) for p in predicted]
    noise = _NOISE * math.sqrt(NUM_BINS / len(labels))
    # Never worse than leaving the confidences alone.
    enough = min(min(errors) + noise, errors[0])
    scores = [brier(p, labels) if error <= enough else math.inf for p, error in zip(predicted, errors, strict=True)]
    return by_nearness[scores.index(min(scores))]


def measure(alive: Tensor, accepted_len: Tensor, drafted_len: Tensor) -> tuple[PositionMetrics, ...]:
    """Metrics of ``alive [N, g]`` survivals by position, over the blocks that drafted that far."""
    metrics = []
    for k in range(alive.shape[1]):
        counts = drafted_len > k
        predicted, labels = alive[counts, k], accepted_len[counts] > k
        num_samples = len(labels)
        metrics.append(
            PositionMetrics(
                num_samples,
                ece(predicted, labels) if num_samples else None,
                auc(predicted, labels),
                brier(predicted, labels) if num_samples else None,
            )
        )
    return tuple(metrics)


def ece(predicted: Tensor, labels: Tensor, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error of ``[N]`` probabilities against ``[N]`` booleans, equal-width bins, N >= 1."""
    predicted = predicted.double().clamp(_CLAMP, 1.0 - _CLAMP)
    bins = (predicted * num_bins).long()
    gaps = torch.bincount(bins, predicted - labels.double(), minlength=num_bins)
    return float(gaps.abs().sum()) / len(predicted)


def auc(predicted: Tensor, labels: Tensor) -> float | None:
    """Probability that an accepted block is ranked above a rejected one, ties counting half; None if one kind lacks."""
    labels = labels.bool()
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return None
    ordered = predicted[~labels].double().sort().values
    scores = predicted[labels].double().contiguous()
    below = torch.searchsorted(ordered, scores, right=False).double()
    not_above = torch.searchsorted(ordered, scores, right=True).double()
    return float((below + not_above).sum()) / 2.0 / positives / negatives


def brier(predicted: Tensor, labels: Tensor) -> float:
    """Mean squared difference of ``[N]`` probabilities and ``[N]`` booleans, N >= 1."""
    return float((predicted.double() - labels.double()).square().mean())


def save_temperatures(
    folder: Path,
    key: str,
    temperatures: Sequence[float],
    about: Mapping[str, Any] | None = None,
    by_kind: Mapping[str, Correction] | None = None,
) -> Path:
    """Store fitted temperatures under ``cache_file.measurement_key``; returns the file. Raises SparkchatError.

    ``about`` says what they were fitted to; nothing reads it but people. ``by_kind`` adds to the corrections that an
    earlier fit left for other kinds of sampling.
    """
    path = _path(folder, key)
    kinds = {kind: asdict(one) for kind, one in {**load_calibration(folder, key), **(by_kind or {})}.items()}
    content = {"schema": SCHEMA, "temperatures": list(temperatures), "by_kind": kinds, "about": dict(about or {})}
    write_json(path, content)
    return path


def load_calibration(folder: Path, key: str) -> dict[str, Correction]:
    """Fitted corrections by kind of sampling; none where there is no usable file (``load_temperatures`` says why)."""
    content, _ = read_json(_path(folder, key), SCHEMA)
    stored = None if content is None else content.get("by_kind")
    found = {}
    for kind, data in stored.items() if isinstance(stored, dict) else ():
        try:
            found[kind] = Correction.from_json(data)
        except (KeyError, TypeError, ValueError, UsageError):
            continue
    return found


def load_temperatures(folder: Path, key: str) -> tuple[tuple[float, ...] | None, str | None]:
    """(temperatures, notice); (None, None) when there are none, (None, why) when the file is unusable."""
    path = _path(folder, key)
    content, notice = read_json(path, SCHEMA)
    if content is None:
        return None, notice
    values = content.get("temperatures")
    if not isinstance(values, list) or not values or not all(_is_positive(value) for value in values):
        return None, f"{path} is damaged, so it is not used; it is replaced by the next fit"
    return tuple(float(value) for value in values), None


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _path(folder: Path, key: str) -> Path:
    return folder / f"temperatures-{key}.json"
