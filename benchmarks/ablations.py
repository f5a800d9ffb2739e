"""What confidences are worth to a plan: recorded blocks planned again, with and without them.

    python benchmarks/ablations.py BLOCKS.npz [--together 1 4 16] [--row-price 0.03 0.06 0.12 0.25] [--out FILE.json]

BLOCKS.npz is what ``acceptance.py --blocks`` leaves: blocks that were verified whole, so that what any shorter length
would have kept is known. Prompts are streams, ``--together`` of them at a time, planned by the engine's own planner. A
step of all requests without a draft verified costs 1, and each further row of every request adds the row price: 0.06
makes a whole block of 7 cost 1.42. Tokens per cost are told as ratios to the best fixed length.

Fits (temperatures, shifts, the mean chance of a position) are of the even prompts where odd ones are planned, and the
other way round. The best fixed length is chosen afterwards, on the very blocks that are counted: it is an upper bound.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from acceptance import Rounds, interval

from sparkchat.engine.calibration import corrected_survival, fit_temperatures, survival
from sparkchat.engine.correction_fit import fit_correction
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.lagged_plan import StaleSurvival as Stale
from sparkchat.engine.lagged_plan import admit, choose_budget, past_blocks
from sparkchat.engine.planner import plan
from sparkchat.params import CostTable

RESAMPLES = 200
Lens = np.ndarray
Survivals = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("blocks", type=Path)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--row-price", type=float, nargs="+", default=[0.03, 0.06, 0.12, 0.25])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = all_rounds(options.blocks)
    alive = survivals(rounds)
    found = [compared(rounds, alive, together, price) for together in options.together for price in options.row_price]
    for row in found:
        shown = " | ".join(f"{name} {low:.3f} {mid:.3f} {high:.3f}" for name, (low, mid, high) in row["ratios"].items())
        print(f"{row['together']} together, row price {row['row_price']}: best fixed {row['best_fixed']} | {shown}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def all_rounds(path: Path) -> Rounds:
    """Every set of the file; prompts of different sets are different prompts."""
    with np.load(path, allow_pickle=False) as arrays:
        names = list(dict.fromkeys(key.split(".")[0] for key in arrays.files))
        parts = [{part: arrays[f"{name}.{part}"] for part in Rounds.__dataclass_fields__} for name in names]
    for number, part in enumerate(parts):
        part["prompt"] = part["prompt"] + 10000 * number
    return Rounds(*(np.concatenate([part[name] for part in parts]) for name in Rounds.__dataclass_fields__))


def survivals(rounds: Rounds) -> Survivals:
    """[N, g] by what is made of the confidences; every row by a fit to prompts of the other parity."""
    logits = torch.from_numpy(rounds.logits).double()
    accepted, judged = torch.from_numpy(rounds.accepted), torch.from_numpy(rounds.judged)
    is_even = torch.from_numpy(rounds.prompt % 2 == 0)
    found = {name: torch.zeros_like(logits) for name in ("raw", "temperatures", "shifts", "flat")}
    for planned in (is_even, ~is_even):
        part = logits[~planned], accepted[~planned], judged[~planned]
        found["raw"][planned] = survival(logits[planned])
        found["temperatures"][planned] = survival(logits[planned], fit_temperatures(*part).temperatures)
        found["shifts"][planned] = corrected_survival(logits[planned], [fit_correction(*part)] * int(planned.sum()))
        flat = [(part[1] > k)[part[2] > k].double().mean() for k in range(logits.shape[1])]
        found["flat"][planned] = torch.stack(flat)
    return {name: values.numpy() for name, values in found.items()}


def compared(rounds: Rounds, alive: Survivals, together: int, price: float) -> dict[str, Any]:
    """Ratios of tokens per cost to the best fixed length: (low, middle, high) over resampled steps."""
    width = rounds.logits.shape[1]
    steps = streams(rounds, together)
    cost = costs(together, width, price)
    fixed = {length: totals(rounds, steps, np.minimum(length, rounds.judged), price) for length in range(width + 1)}
    best = max(fixed, key=lambda length: rate(fixed[length]))
    arms = {"whole block": fixed[width]}
    for name, values in alive.items():
        lens = planned(rounds, steps, lambda rows, v=values: early_stop(v, rounds, rows, cost))
        arms[f"compact, {name}"] = totals(rounds, steps, lens, price)
    lens = planned(rounds, steps, LaggedPlanner(alive["shifts"], rounds, cost, together))
    arms["compact two steps late, shifts"] = totals(rounds, steps, lens, price)
    draw = np.random.default_rng(5)
    ratios = {name: ratio(values, fixed[best], draw) for name, values in arms.items()}
    return {"together": together, "row_price": price, "best_fixed": best, "steps": len(steps), "ratios": ratios}


def streams(rounds: Rounds, together: int) -> list[list[int]]:
    """Steps as lists of rows: each prompt's blocks in their order, ``together`` prompts at a time."""
    waiting = [list(np.flatnonzero(rounds.prompt == number)) for number in np.unique(rounds.prompt)]
    np.random.default_rng(3).shuffle(waiting)  # type: ignore[arg-type]
    seats, steps = [waiting.pop() for _ in range(min(together, len(waiting)))], []
    while len(seats) == together:
        steps.append([int(seat.pop(0)) for seat in seats])
        seats = [seat or (waiting.pop() if waiting else []) for seat in seats]
        seats = [seat for seat in seats if seat]
    return steps


def costs(together: int, width: int, price: float) -> CostLookup:
    rows = range(together, together * (width + 1) + 1)
    return CostLookup(CostTable(tuple(rows), tuple(1.0 + price * (n / together - 1.0) for n in rows)))


def planned(rounds: Rounds, steps: Sequence[Sequence[int]], choose: Callable[[Sequence[int]], Sequence[int]]) -> Lens:
    lens = np.zeros(len(rounds.accepted), dtype=int)
    for rows in steps:
        lens[rows] = choose(rows)
    return lens


def early_stop(values: np.ndarray, rounds: Rounds, rows: Sequence[int], cost: CostLookup) -> Sequence[int]:
    return plan(values[rows].tolist(), rounds.judged[rows].tolist(), cost).verify_lens


class LaggedPlanner:
    """As captured steps plan: the budget by blocks at least two steps old, who gets it by those of now."""

    def __init__(self, values: np.ndarray, rounds: Rounds, cost: CostLookup, together: int) -> None:
        self._values, self._rounds, self._cost, self._together = values, rounds, cost, together
        self._stale: dict[int, tuple[Stale, int]] = {}

    def __call__(self, rows: Sequence[int]) -> Sequence[int]:
        width = self._values.shape[1]
        seats = [self._stale.setdefault(int(self._rounds.prompt[row]), (Stale(), 0)) for row in rows]
        ages = range(past_blocks(self._together))
        newest, *older = [[stale.before(n, width, back) for stale, n in seats] for back in ages]
        budget = choose_budget(newest, self._cost.at(self._together), older=older).drafts
        alive = self._values[rows].tolist()
        for row, (stale, n), values in zip(rows, seats, alive, strict=True):
            stale.keep(n, values)
            self._stale[int(self._rounds.prompt[row])] = (stale, n + 1)
        return admit(alive, self._rounds.judged[rows].tolist(), budget)


def totals(rounds: Rounds, steps: Sequence[Sequence[int]], lens: Lens, price: float) -> np.ndarray:
    """[steps, 2] tokens kept and cost."""
    is_whole = lens >= rounds.judged
    kept = np.where(is_whole, rounds.length, np.minimum(rounds.accepted, lens) + 1)
    return np.array([[kept[rows].sum(), 1.0 + price * lens[rows].mean()] for rows in steps])


def rate(values: np.ndarray) -> float:
    return float(values[:, 0].sum() / values[:, 1].sum())


def ratio(values: np.ndarray, base: np.ndarray, draw: np.random.Generator) -> tuple[float, float, float]:
    again = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, len(values), len(values))
        again.append(rate(values[chosen]) / rate(base[chosen]))
    low, high = interval(again)
    return low, rate(values) / rate(base), high


if __name__ == "__main__":
    main()
