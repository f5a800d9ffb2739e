"""Where plain steps of many requests go on a GPU: its own time, its idle time, the host, and what the table foretells.

    python3 benchmarks/crowd_steps.py --requests 64,128,256 --commit HASH --out FILE.json

Qwen3-8B's shapes with random weights. Contexts grow while it runs; one row for every 32 steps. ``gpu_ms`` is what
stages took on the GPU, ``idle_ms`` what lay between two steps on it (the host was late), ``wall_ms`` a step on the
host's clock, asked for the card's clock behind every 32. ``even_ms`` is what the table was measured by: graphs replayed
with as much context, the same of every request.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpu_state import clocks  # noqa: E402
from gpu_timing import machine  # noqa: E402

from sparkchat.collector import hand_back, take_over  # noqa: E402
from sparkchat.engine.captured import decoder as decoder_module  # noqa: E402
from sparkchat.engine.captured.laws import Draws  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams  # noqa: E402

SHAPES = ROOT / "sparkchat" / "shapes" / "qwen3-8b"
STEPS = 32


def fill(engine: Engine, requests: int, even: bool) -> None:
    """Requests whose prompts have 20 to 180 tokens, or 100 each, all behind them."""
    numbers = random.Random(1)
    for n in range(requests):
        length = 100 if even else numbers.randrange(20, 181)
        ids = tuple(numbers.randrange(1000, 151000) for _ in range(length))
        sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
        engine.submit(GenerateRequest(id=f"r{n}", prompt_ids=ids, mode="off", steps=False, sampling=sampling))
    while len(engine._scheduler.decoding) < requests:
        engine.step()
    for _ in range(6):
        engine.step()


def rows_of(engine: Engine, requests: int, blocks: int) -> list[dict[str, Any]]:
    """Measure ``blocks`` times 32 steps, then as many tokens of context without requests."""
    seen: list[Any] = []
    told = decoder_module._times_of

    def keep(flying: Any) -> Any:
        times = told(flying)
        seen.append(times.laps)
        return times

    rows = []
    with mock.patch.object(decoder_module, "_times_of", keep):
        for _ in range(blocks):
            seen.clear()
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            wall = time.perf_counter() - began
            mhz = clocks().get("sm_mhz")  # a step is in flight still
            context = sum(state.kv_len for state in engine._scheduler.decoding) - requests * STEPS // 2
            assert engine.pair.cost is not None
            rows.append(
                {
                    "requests": requests,
                    "context_each": context // requests,
                    "gpu_ms": statistics.median(laps["verify_ms"] for laps in seen),
                    "idle_ms": statistics.median(laps.get("gpu_idle_ms", 0.0) for laps in seen),
                    "wall_ms": wall * 1e3 / STEPS,
                    "sm_mhz": mhz,
                    "foretold_ms": engine.pair.cost.at(requests, context, drafting=0).plain_ms,
                }
            )
    for n in range(requests):
        engine.cancel(f"r{n}")
    engine.step()
    for row in rows:
        of = requests, False, requests, Draws.GREEDY, 7, row["context_each"]
        row["even_ms"] = engine._captured.time_stages(*of)  # type: ignore[union-attr]
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="64,128,256")
    parser.add_argument("--blocks", type=int, default=6, help="of 32 steps")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = [int(n) for n in options.requests.split(",")]
    # Without a drafter nothing is planned, and no table measured.
    spec = LoadSpec(
        "qwen3-8b", str(SHAPES), str(SHAPES / "drafter"), device="cuda", context=1024, dummy_weights=True,
        concurrency=max(wanted), mode="compact", simulate_acceptance="chat",
    )  # fmt: skip
    engine = Engine(spec)
    report: dict[str, Any] = {**machine(options.commit), "rows": []}
    take_over()  # as the engine's own process does
    for requests in wanted:
        for even in (False, True):
            fill(engine, requests, even)
            for row in rows_of(engine, requests, options.blocks):
                report["rows"].append({**row, "prompts": "of 100" if even else "of 20 to 180"})
    hand_back()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("| requests | prompts | context each | GPU ms | idle | wall | foretold | even replays | SM MHz |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in report["rows"]:
        names = ("gpu_ms", "idle_ms", "wall_ms", "foretold_ms", "even_ms", "sm_mhz")
        cells = " | ".join(f"{row[name]:.3f}" if row[name] is not None else "-" for name in names)
        print(f"| {row['requests']} | {row['prompts']} | {row['context_each']} | {cells} |")


if __name__ == "__main__":
    main()
