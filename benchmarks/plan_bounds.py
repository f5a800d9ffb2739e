"""What any plan of verify lengths can gain over verifying everything, for a cost table and a simulated profile.

    python3 benchmarks/plan_bounds.py benchmarks/results/2026-11-30-v4-two-gpus-fourth.json
    python3 benchmarks/plan_bounds.py --ms 4.80 5.38 5.78 6.07 6.50 6.76 --draft-ms 0.58 --profile field
    python3 benchmarks/plan_bounds.py benchmarks/results/2026-11-30-gpu-decode-eighth.json --requests 32 \\
        --draft-ms 2.2 --profile chat

One request, or with ``--requests`` several that share a step: the likeliest drafts of all of them are verified then.
Drafts' chances are drawn by the law of sparkchat/simulation.py and known exactly. Rows:

- best plan: the most tokens per second that lengths chosen step by step can bring, each with all chances of its step
  known. That is more than a lossless plan may look at, so a bound for every plan. Tokens per time is maximised by
  Dinkelbach's iteration: every step takes the length with the largest tokens - rate * time, and the rate is what comes
  of that, until it stays;
- best fixed length (of several requests, best number of rows), and of one request Algorithm 1 as the engine runs it
  (sparkchat/engine/planner.py);
- the slope from which on the best plan brings ``--bar`` times what verifying everything brings, if every row behind the
  first costs the same and a step of one row costs what the table says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from sparkchat.engine.cost_table import CostLookup  # noqa: E402
from sparkchat.engine.planner import plan  # noqa: E402
from sparkchat.params import BatchCosts, CostTable  # noqa: E402
from sparkchat.simulation import SimulatedAcceptance, parse_simulation  # noqa: E402

FIELD = "0.82,0.67,0.55,0.45,0.37"
"""As in v4_decode.py."""
STEEPEST = 64.0
"""Of slopes that are looked at, in steps of one row a row."""


def survivals(profile: SimulatedAcceptance, block: int, steps: int, seed: int = 0) -> np.ndarray:
    """[steps, block] chances that drafts 1..k of a step all pass."""
    profile.check_block(block)
    u = np.random.default_rng(seed).random((steps, block))
    return np.cumprod((u * (2.0 - u)) ** np.array(profile.exponents[:block]), axis=1)


def tokens_by_length(alive: np.ndarray) -> np.ndarray:
    """alive [steps, block] -> [steps, block + 1] expected tokens of a step that verifies 0, 1, ... drafts."""
    return 1.0 + np.pad(np.cumsum(alive, axis=1), ((0, 0), (1, 0)))


def best_plan(tokens: np.ndarray, costs: np.ndarray) -> tuple[float, float]:
    """(tokens per millisecond, mean drafts verified) of the best length of every step.

    tokens [steps, lengths], costs [lengths] in milliseconds.
    """
    rate, each = 0.0, np.arange(len(tokens))
    while True:
        lengths = np.argmax(tokens - rate * costs, axis=1)
        found = float(tokens[each, lengths].sum() / costs[lengths].sum())
        if found <= rate * (1.0 + 1e-12):
            return found, float(lengths.mean())
        rate = found


def algorithm_1(alive: np.ndarray, costs: np.ndarray) -> tuple[float, float]:
    """(tokens per millisecond, mean drafts verified) of the engine's plans for a measured table."""
    rows = tuple(range(1, len(costs) + 1))
    batch = BatchCosts(1, rows, tuple(map(float, costs)), None)
    lookup, tokens = CostLookup(CostTable(rows, batch.step_ms, "measured", None, (batch,), False)).at(1), 0.0
    block, lengths = alive.shape[1], []
    for step in alive.tolist():
        lengths.append(plan([step], [block], lookup).verify_lens[0])
        tokens += 1.0 + sum(step[: lengths[-1]])
    return tokens / float(costs[lengths].sum()), float(np.mean(lengths))


def slope_for(bar: float, tokens: np.ndarray, first: float) -> float | None:
    """Milliseconds of a row, beside ``first`` of a step of one row, from which on the best plan brings ``bar`` times
    what verifying everything does; None where no slope up to STEEPEST * ``first`` is steep enough."""
    rows = np.arange(tokens.shape[1])

    def ratio(slope: float) -> float:
        costs = first + slope * rows
        return best_plan(tokens, costs)[0] / (float(tokens[:, -1].mean()) / costs[-1])

    low, high = 0.0, STEEPEST * first
    if ratio(high) < bar:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < bar else (low, middle)
    return high


def bounds(costs: Sequence[float], profile: SimulatedAcceptance, bar: float, steps: int) -> dict[str, Any]:
    """``costs``: milliseconds of a whole step of 1, 2, ... rows; a block has one draft less than rows."""
    times, alive = np.array(costs), survivals(profile, len(costs) - 1, steps)
    tokens = tokens_by_length(alive)
    fixed = tokens.mean(axis=0) / times
    best, lengths = best_plan(tokens, times)
    planned, planned_lengths = algorithm_1(alive, times)
    slope = slope_for(bar, tokens, float(times[0]))
    return {
        "profile": profile.label,
        "costs_ms": [round(float(ms), 3) for ms in times],
        "row_ms": float(times[-1] - times[0]) / max(1, len(times) - 1),
        "everything": {"tokens_per_second": 1e3 * fixed[-1], "drafts": len(times) - 1},
        "best fixed length": {"tokens_per_second": 1e3 * fixed.max(), "drafts": int(fixed.argmax())},
        "Algorithm 1": {"tokens_per_second": 1e3 * planned, "drafts": planned_lengths},
        "best plan": {"tokens_per_second": 1e3 * best, "drafts": lengths},
        "bar": bar,
        "row_ms_for_bar": slope,
    }


def bounds_together(costs: np.ndarray, requests: int, profile: SimulatedAcceptance, steps: int) -> dict[str, Any]:
    """``costs``: milliseconds of a step of ``requests``, ``requests`` + 1, ... rows, up to all drafts of all."""
    block = (len(costs) - 1) // requests
    alive = survivals(profile, block, steps * requests).reshape(steps, -1)
    tokens = requests - 1 + tokens_by_length(-np.sort(-alive, axis=1))
    fixed = tokens.mean(axis=0) / costs
    best, rows = best_plan(tokens, costs)
    return {
        "profile": profile.label,
        "requests": requests,
        "everything": {"tokens_per_second": 1e3 * fixed[-1], "rows": requests * (block + 1)},
        "best fixed rows": {"tokens_per_second": 1e3 * fixed.max(), "rows": requests + int(fixed.argmax())},
        "best plan": {"tokens_per_second": 1e3 * best, "rows": requests + rows},
    }


def costs_together(path: Path, requests: int) -> np.ndarray:
    """The measured costs of ``requests`` requests in a report of gpu_decode.py or v4_decode.py, drafting in them."""
    report = json.loads(path.read_text(encoding="utf-8"))
    for row in [*report.get("together", ()), *report.get("rows", ())]:
        if row["row"] == "cost table" and row["table"].get("batches"):
            table = CostTable.from_json({k: v for k, v in row["table"].items() if k != "id"})
            block = table.batches[-1].rows[-1] // table.batches[-1].requests - 1
            return CostLookup(table).at(requests).times(requests, requests * block + 1)
    raise SystemExit(f"{path} has no cost table by requests")


def table_of(path: Path, part: str) -> list[float]:
    """The measured costs of one request in a report of v4_decode.py, drafting in them."""
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["row"] == "cost table" and row["part"] == part:
            if row["table"]["rows"] != list(range(1, len(row["table"]["rows"]) + 1)):
                raise SystemExit(f"{path}: its table does not know every number of rows; give --ms")
            return row["table"]["step_ms"]
    raise SystemExit(f"{path} has no cost table of part {part}; give --part, or --ms")


def text(found: dict[str, Any]) -> str:
    """A table for people."""
    everything = found["everything"]["tokens_per_second"]
    if "requests" in found:
        lines = [f"profile {found['profile']}, {found['requests']} requests", ""]
        lines += ["| rows | tokens/s | rows verified | over everything |", "|---|---|---|---|"]
        for name in ("everything", "best fixed rows", "best plan"):
            speed, rows = found[name]["tokens_per_second"], found[name]["rows"]
            lines.append(f"| {name} | {speed:.1f} | {rows:.1f} | {speed / everything:.3f} |")
        return "\n".join(lines)
    lines = [f"profile {found['profile']}, steps of {found['costs_ms']} ms, {found['row_ms']:.3f} a row", ""]
    lines += ["| lengths | tokens/s | drafts verified | over everything |", "|---|---|---|---|"]
    for name in ("everything", "best fixed length", "Algorithm 1", "best plan"):
        speed, drafts = found[name]["tokens_per_second"], found[name]["drafts"]
        lines.append(f"| {name} | {speed:.1f} | {drafts:.2f} | {speed / everything:.3f} |")
    slope, first = found["row_ms_for_bar"], found["costs_ms"][0]
    said = (
        "at no slope" if slope is None else f"from {slope:.3f} ms a row on ({slope / first:.0%} of a step of one row)"
    )
    return "\n".join([*lines, "", f"{found['bar']:.2f} times everything is within reach of some plan {said}"])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, help="of v4_decode.py, with a cost table")
    parser.add_argument("--part", default="alone", help="whose cost table of the report")
    parser.add_argument("--requests", type=int, default=1, help="that share a step, of a report")
    parser.add_argument("--ms", nargs="+", type=float, help="instead: milliseconds of a step of 1, 2, ... rows")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="what drafts, or context, add to each of them")
    parser.add_argument("--profile", default="field", help="field, chat, code, math, or survivals: 0.8,0.6")
    parser.add_argument("--bar", type=float, default=1.10)
    parser.add_argument("--steps", type=int, default=20_000, help="that are drawn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if (options.report is None) == (options.ms is None):
        parser.error("give a report or --ms")
    profile = parse_simulation(FIELD if options.profile == "field" else options.profile)
    if options.requests > 1:
        if options.report is None:
            parser.error("--requests needs a report")
        times = costs_together(options.report, options.requests) + options.draft_ms
        found = bounds_together(times, options.requests, profile, max(1, options.steps // options.requests))
        print(json.dumps(found) if options.json else text(found))
        return found
    costs = options.ms or table_of(options.report, options.part)
    if len(costs) < 2 or min(costs) + options.draft_ms <= 0.0:
        parser.error("costs are those of steps of 1, 2, ... rows, each above 0 ms")
    found = bounds([ms + options.draft_ms for ms in costs], profile, options.bar, options.steps)
    print(json.dumps(found) if options.json else text(found))
    return found


if __name__ == "__main__":
    main()
