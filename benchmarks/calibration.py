"""Calibration error of a drafter's confidences by position, every answer judged by a fit to others.

    python benchmarks/calibration.py FILE.npz [FILE.npz ...]

Files are what ``acceptance.py --blocks`` leaves (``--chats N`` for held-out chats), and ``confidence-*.npz`` of
``sparkchat train``; all of them must be of one kind of sampling. The answers are cut into five parts, and the
confidences of each part are corrected by what was fitted to the other four, so that every block counts and none was
fitted to. The files of ``train`` do not say which answer a block is of: there every fifth block is a part.

Told in per cent by position, 20 bins: raw, with temperatures (the paper's), with temperatures and shifts, with a 95 %
bootstrap interval over answers turned about the value, and what perfect confidences would show on so many blocks. The
last two lines are the fit to all blocks, as a profile takes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from ablations import all_rounds

from sparkchat.bench.blocks import read_blocks
from sparkchat.engine.calibration import fit_temperatures, measure, survival
from sparkchat.engine.correction_fit import fit_correction
from sparkchat.engine.fitting import FOLDS, Fit, Judged, chance_errors
from sparkchat.params import Correction

RESAMPLES = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    blocks = joined([blocks_of(file) for file in parser.parse_args().files])
    print(f"{len(blocks.logits)} blocks of {len(set(blocks.chat.tolist()))} answers")

    def temperatures(part: torch.Tensor) -> Correction:
        of = blocks.of(part)
        found = fit_temperatures(of.logits, of.accepted, of.judged).temperatures
        return Correction(found, (0.0,) * len(found))

    def shifts(part: torch.Tensor) -> Correction:
        of = blocks.of(part)
        return fit_correction(of.logits, of.accepted, of.judged)

    best = blocks.held_out(shifts)
    tell("raw", errors(blocks, survival(blocks.logits)))
    tell("temperatures", errors(blocks, blocks.held_out(temperatures)))
    tell("temperatures and shifts", errors(blocks, best))
    for name, bound in zip(("  from", "  to"), interval(blocks, best), strict=True):
        tell(name, bound)
    tell("chance", [error or 0.0 for error in chance_errors(best, blocks.judged)])
    everything: Fit = shifts
    found = everything(torch.ones(len(blocks.logits), dtype=torch.bool))
    for name in ("temperatures", "shifts"):
        print(f"{name} = [{', '.join(f'{value:.3f}' for value in getattr(found, name))}]")


def blocks_of(file: Path) -> Judged:
    with np.load(file, allow_pickle=False) as arrays:
        is_of_training = "counted" in arrays.files
    if is_of_training:
        read = read_blocks([file])
        numbers = [torch.tensor(values) for values in (read.accepted, read.judged, read.chat)]
        return Judged(torch.tensor(read.logits, dtype=torch.float64), *numbers)
    rounds = all_rounds(file)
    numbers = [torch.from_numpy(values) for values in (rounds.accepted, rounds.judged, rounds.prompt)]
    return Judged(torch.from_numpy(rounds.logits).double(), *numbers)


def joined(parts: Sequence[Judged]) -> Judged:
    """Answers of different files are different ones, and a fifth of each is in every part."""
    chats, first = [], 0
    for part in parts:
        chats.append(part.chat + first)
        first += -(-(int(part.chat.max()) + 1) // FOLDS) * FOLDS
    columns = [torch.cat([getattr(part, name) for part in parts]) for name in ("logits", "accepted", "judged")]
    return Judged(*columns, torch.cat(chats))


def errors(blocks: Judged, alive: torch.Tensor) -> list[float]:
    return [metric.ece or 0.0 for metric in measure(alive, blocks.accepted, blocks.judged)]


def interval(blocks: Judged, alive: torch.Tensor) -> tuple[list[float], list[float]]:
    """Resampling adds the noise of so few blocks once more, so the bootstrap's quantiles are turned about the value."""
    draw, chats = np.random.default_rng(5), blocks.chat.numpy()
    order = np.argsort(chats, kind="stable")
    ends = np.flatnonzero(np.diff(chats[order])) + 1
    answers = np.split(order, ends)
    again = []
    for _ in range(RESAMPLES):
        rows = torch.from_numpy(np.concatenate([answers[i] for i in draw.integers(len(answers), size=len(answers))]))
        again.append([m.ece or 0.0 for m in measure(alive[rows], blocks.accepted[rows], blocks.judged[rows])])
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    value = np.array(errors(blocks, alive))
    return np.maximum(0.0, 2 * value - high).tolist(), np.maximum(0.0, 2 * value - low).tolist()


def tell(name: str, values: Sequence[float]) -> None:
    print(f"{name:24}" + " ".join(f"{100 * value:5.2f}" for value in values))


if __name__ == "__main__":
    main()
