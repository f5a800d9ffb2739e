"""What refinement by finished steps (--refine) brings: recorded blocks planned again while costs and confidences drift.

    python benchmarks/refinement.py BLOCKS.npz --kind warm [--profile smollm2-135m] [--out FILE.json]

BLOCKS.npz is what ``acceptance.py --blocks`` leaves, --kind the kind of sampling it was made with. Two questions.

Confidences: with the profile's corrections, which were fitted to chats, how far is the survival at each position from
what was accepted, before and after refinement? Blocks come prompt by prompt, set by set, and each is judged before it
teaches; every block is taken as verified whole.

Costs: the table says one row price and steps take another, times a noise of 10 % and, once in a hundred steps, ten
times as long. Plans are made by the stale table, by the refined one and by the true one; a step teaches only the row
count that it had. Tokens per true cost, as a ratio to plans by the true table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablations import all_rounds, rate
from acceptance import Rounds

from sparkchat.catalog import load_profile
from sparkchat.engine.calibration import corrected_survival, measure, survival
from sparkchat.engine.cost_table import CostLookup, table_of
from sparkchat.engine.planner import plan
from sparkchat.engine.refinement import JudgedBlock, RefinedConfidences, RefinedCosts
from sparkchat.params import BatchCosts, Correction
from sparkchat.paths import user_paths

DRIFTS = ((0.03, 0.25), (0.06, 0.12), (0.12, 0.06), (0.25, 0.03))
"""(row price of the table, row price of the steps)"""
NOISE, SPIKES, SPIKE = 0.1, 0.01, 10.0
BASE_MS = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("blocks", type=Path)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--profile", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = all_rounds(options.blocks)
    profile = load_profile(options.profile, user_paths())
    fitted = None if profile is None else profile.get(f"speculation.calibration.{options.kind}")
    found = {"confidences": confidences(rounds, fitted), "costs": [costs(rounds, *drift) for drift in DRIFTS]}
    for name, errors in found["confidences"].items():
        print(f"{name}: " + " ".join(f"{100 * error:.1f}" for error in errors))
    for row in found["costs"]:
        print(row)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def confidences(rounds: Rounds, fitted: Correction | None) -> dict[str, list[float]]:
    """Calibration error by position, over all blocks."""
    logits = torch.from_numpy(rounds.logits).double()
    accepted, judged = torch.from_numpy(rounds.accepted), torch.from_numpy(rounds.judged)
    width = logits.shape[1]
    nothing = Correction((1.0,) * width, (0.0,) * width)
    arms = {"raw": survival(logits), "raw, refined": refined(rounds, nothing)}
    if fitted is not None:
        fitted = fitted.stretched(width)
        arms["profile"] = corrected_survival(logits, [fitted] * len(logits))
        arms["profile, refined"] = refined(rounds, fitted)
    return {name: [m.ece or 0.0 for m in measure(alive, accepted, judged)] for name, alive in arms.items()}


def refined(rounds: Rounds, before: Correction) -> torch.Tensor:
    """[N, g] survivals, each by what the blocks before it taught."""
    learned, found = RefinedConfidences(), []
    for logits, accepted, judged in zip(rounds.logits.tolist(), rounds.accepted, rounds.judged, strict=True):
        now = learned.corrected("this", before)
        found.append(corrected_survival(torch.tensor([logits]), [now])[0])
        learned.observe(JudgedBlock("this", before, logits, int(judged), int(accepted)))
    return torch.stack(found)


def costs(rounds: Rounds, told: float, true: float) -> dict[str, Any]:
    alive = survival(torch.from_numpy(rounds.logits).double()).tolist()
    tables = {"true": table(rounds, true), "stale": table(rounds, told)}
    speeds = {name: rate(replayed(rounds, alive, lookup, true, None)) for name, lookup in tables.items()}
    speeds["refined"] = rate(replayed(rounds, alive, tables["stale"], true, RefinedCosts(tables["stale"])))
    ratios = {f"{name} to true": speeds[name] / speeds["true"] for name in ("stale", "refined")}
    return {"table": told, "steps": true, **{name: round(value, 4) for name, value in ratios.items()}}


def table(rounds: Rounds, price: float) -> CostLookup:
    rows = tuple(range(1, rounds.logits.shape[1] + 2))
    times = tuple(BASE_MS * (1.0 + price * (n - 1)) for n in rows)
    return CostLookup(table_of([BatchCosts(1, rows, times)], pads_up=False))


def replayed(
    rounds: Rounds, alive: list[list[float]], lookup: CostLookup, true: float, learned: RefinedCosts | None
) -> np.ndarray:
    """[N, 2] tokens and true cost of every block, planned by ``lookup`` or by what it becomes."""
    draw, rows = np.random.default_rng(1), []
    for number, (accepted, judged) in enumerate(zip(rounds.accepted, rounds.judged, strict=True)):
        costs_now = (lookup if learned is None else learned.now).at(1)
        length = plan([alive[number]], [int(judged)], costs_now).verify_lens[0]
        whole = length >= judged
        tokens = rounds.length[number] if whole else min(accepted, length) + 1
        took = BASE_MS * (1.0 + true * length)
        if learned is not None:
            spike = SPIKE if draw.random() < SPIKES else 1.0
            learned.observe(1, length + 1, 0, took * float(np.exp(draw.normal(0.0, NOISE))) * spike)
        rows.append((tokens, took))
    return np.array(rows)


if __name__ == "__main__":
    main()
