"""Decode speed on one GPU in Qwen3-8B's shapes: plain steps and DSpark rounds against what reading the weights costs.

    python3 benchmarks/gpu_decode.py --quick            # under 150 s on an H200
    python3 benchmarks/gpu_decode.py --out FILE.json    # 10,000 steps in the memory row
    python3 benchmarks/gpu_decode.py --quick --overlap  # kernels start while the one before them ends

Weights are random and acceptance is simulated (sparkchat/simulation.py), so speeds are real and texts mean nothing.
Floors are bytes over the read bandwidth that the same run measured. Needs torch, triton, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from sparkchat.engine import engine as engine_module  # noqa: E402
from sparkchat.engine.captured.build import build_decoder  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams  # noqa: E402
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance, acceptance_of_length  # noqa: E402

SHAPES = ROOT / "sparkchat" / "shapes" / "qwen3-8b"
BLOCK = 7
PROMPT = 1024
LENGTHS = (3.72, 5.52)
PLAIN_GB, ROUND_GB = 15.137, 19.1
"""Bytes that a plain step and a DSpark round read at the least: all weights but the embedding table; and the drafter's
layers, its feature projection, the head a second time and the Markov head once for each draft."""
MODES = ("off", "static", "compact", "cap-accept")


@triton.jit
def _sum_kernel(x_ptr, out_ptr, per_program, BLOCK_SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros((BLOCK_SIZE,), tl.int32)
    for at in range(0, per_program, BLOCK_SIZE):
        total += tl.load(x_ptr + start + at + tl.arange(0, BLOCK_SIZE))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def read_bandwidth() -> float:
    """TB/s of reading 8 GiB once; the best of several passes and two launch shapes."""
    count, best = 1 << 31, 0.0
    x = torch.ones(count, dtype=torch.int32, device="cuda")
    out = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    for programs in (1 << 13, 1 << 15):
        for turn in range(6):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            _sum_kernel[(programs,)](x, out, count // programs, BLOCK_SIZE=4096, num_warps=8)
            stop.record()
            torch.cuda.synchronize()
            if turn:
                best = max(best, 4 * count / start.elapsed_time(stop) / 1e9)
    return best


@contextmanager
def opened(**settings: Any) -> Iterator[Engine]:
    """An engine of random weights in the shapes, and its memory given back."""
    spec = {"device": "cuda", "context": 2304, "dummy_weights": True, "concurrency": 1, **settings}
    engine = Engine(LoadSpec("qwen3-8b", str(SHAPES), **spec))
    try:
        yield engine
    finally:
        engine.close() if hasattr(engine, "close") else None
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def requests(batch: int, mode: str, tokens: int, temperature: float = 0.0) -> list[GenerateRequest]:
    numbers = random.Random(1)
    return [
        GenerateRequest(
            id=f"r{n}",
            prompt_ids=tuple(numbers.randrange(1000, 151000) for _ in range(PROMPT)),
            mode=mode,  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature),
        )
        for n in range(batch)
    ]


def measure(engine: Engine, batch: int, mode: str, steps: int, temperature: float = 0.0) -> dict[str, Any]:
    """Run ``steps`` full steps of ``batch`` requests behind their prompts, and say what one cost.

    Tokens per second are wall time on the host: everything that a step takes, events and detokenising included.
    """
    room = engine.pair.context - PROMPT - 1
    for request in requests(batch, mode, room, temperature):
        engine.submit(request)
    while len(engine._scheduler.decoding) < batch:
        engine.step()
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    records, tokens, began = [], 0, time.perf_counter()
    for _ in range(steps):
        for event in engine.step():
            if event["event"] == "step":
                records.append(event)
                tokens += len(event["committed_ids"])
        if len(engine._scheduler.decoding) < batch:
            break
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    for n in range(batch):
        engine.cancel(f"r{n}")
    engine.step()
    num_steps = len(records) // batch
    alone = records[::batch]
    busy = [r["step_ms"] - (r["gpu_idle_ms"] or 0.0) for r in alone]
    idle = [r["gpu_idle_ms"] for r in alone if r["gpu_idle_ms"] is not None]
    return {
        "batch": batch,
        "mode": mode,
        "steps": num_steps,
        "ms_per_step": elapsed * 1e3 / max(1, num_steps),
        "gpu_ms_per_step": statistics.median(busy),
        "draft_ms": statistics.median(r["draft_ms"] or 0.0 for r in alone),
        "verify_ms": statistics.median(r["verify_ms"] or 0.0 for r in alone),
        "idle_share": sum(idle) / max(1e-9, sum(busy) + sum(idle)),
        "tokens_per_second": tokens / elapsed,
        "tokens_per_step": tokens / max(1, len(records)),
        "rows": statistics.mean(r["rows"] for r in records),
        "graphs": bool(alone[-1]["graph"]["replayed"]),
    }


def simulate(engine: Engine, profile: SimulatedAcceptance) -> None:
    engine._captured.simulate(profile)


def alone(steps: int) -> list[dict[str, Any]]:
    """Batch 1: plain steps, and rounds at both acceptance lengths."""
    rows = []
    with opened() as engine:
        rows.append({"row": "off, no drafter", **measure(engine, 1, "off", steps)})
    drafter = {"drafter_path": str(SHAPES / "drafter"), "simulate_acceptance": "chat"}
    with opened(**drafter) as engine:
        rows.append({"row": "off, drafter loaded", **measure(engine, 1, "off", steps)})
        for length in LENGTHS:
            simulate(engine, acceptance_of_length(length, BLOCK))
            rows.append({"row": f"DSpark {length}", **measure(engine, 1, "static", steps)})
        rows.append({"row": "DSpark 5.52, temperature 1", **measure(engine, 1, "static", steps, 1.0)})
        for name in ("chat", "code"):
            simulate(engine, SimulatedAcceptance(name, BUILT_IN[name]))
            for mode in ("static", "compact"):
                rows.append({"row": f"{mode}, {name}", **measure(engine, 1, mode, steps)})
        rows.append({"row": "memory", **memory_growth(engine, 2_000 if steps < 300 else 10_000)})
        rows.append({"row": "cost table", "table": engine.info["cost_table"]})
    return rows


def together(steps: int) -> list[dict[str, Any]]:
    """Batch 8 and 32: plain, rounds at both lengths, and compact against the fixed block at the chat profile."""
    rows = []
    drafter = {"drafter_path": str(SHAPES / "drafter"), "simulate_acceptance": "chat"}
    with opened(concurrency=32, mode="compact", **drafter) as engine:
        for batch in (8, 32):
            rows.append({"row": "off", **measure(engine, batch, "off", steps)})
            for length in LENGTHS:
                simulate(engine, acceptance_of_length(length, BLOCK))
                rows.append({"row": f"DSpark {length}", **measure(engine, batch, "static", steps)})
        simulate(engine, SimulatedAcceptance("chat", BUILT_IN["chat"]))
        for mode in ("static", "compact"):
            rows.append({"row": f"{mode}, chat", **measure(engine, 32, mode, steps)})
        rows.append({"row": "cost table", "table": engine.info["cost_table"]})
    return rows


def contexts(steps: int, bandwidth: float) -> list[dict[str, Any]]:
    """Plain steps behind 1k and 32k positions; their keys are zeros, which cost what any others cost."""
    rows = []
    with opened(context=33_300) as engine:
        kv_bytes = engine.pair.kv_bytes_per_token
        for length in (1024, 32_768):
            engine.submit(replace(requests(1, "off", 400)[0], prompt_ids=tuple(range(1000, 1016))))
            while not engine._scheduler.decoding:
                engine.step()
            (state,) = engine._scheduler.decoding
            # The answer goes on as if its prompt had been that long.
            engine._captured.drain()
            state.tokens = [1000] * length + state.tokens[-1:]
            engine.pair.cache.advance(state.slot.row, length)
            times = [e["verify_ms"] for _ in range(steps) for e in engine.step() if e["event"] == "step"]
            rows.append({"row": f"context {length}", "gpu_ms_per_step": statistics.median(times)})
            engine.cancel("r0")
            engine.step()
    added = (rows[1]["gpu_ms_per_step"] - rows[0]["gpu_ms_per_step"]) / 1e3
    rows[1]["added_kv_share_of_bandwidth"] = kv_bytes * (32_768 - 1024) / added / 1e12 / bandwidth
    return rows


def memory_growth(engine: Engine, steps: int) -> dict[str, Any]:
    """Bytes that ``steps`` steps with fifty changes of mode leave behind, once every graph has been made."""

    def work(count: int) -> None:
        done = 0
        while done < count:
            (request,) = requests(1, "off", 1200)
            engine.submit(replace(request, mode=None))
            while engine.has_work and done < count:
                if done % max(1, count // 50) == 0:
                    engine.set_mode(MODES[done // max(1, count // 50) % 4])  # type: ignore[arg-type]
                engine.step()
                done += 1
            engine.cancel("r0")
            engine.step()

    work(400)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    work(steps)
    gc.collect()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"steps": steps, "mode_switches": 50, "allocated": after[0] - before[0], "reserved": after[1] - before[1]}


def smollm(path: str, steps: int) -> list[dict[str, Any]]:
    """SmolLM2-135M, real weights and real acceptance: rounds against plain steps, greedy, ten prompts of text."""
    drafter = ROOT / "sparkchat" / "drafters" / "smollm2-135m"
    texts = [
        "Explain how tides work.", "Write a short story about a lighthouse.", "List five uses of a paper clip.",
        "What is a prime number?", "Describe the water cycle.", "Give me a recipe for pancakes.",
        "Why is the sky blue?", "How do bees make honey?", "What is recursion?", "Summarise the history of Rome.",
    ]  # fmt: skip
    spec = LoadSpec("smollm2-135m", path, str(drafter), device="cuda", context=2048, mode="static")
    engine, rows = Engine(spec), []
    for mode in ("off", "static", "compact"):
        sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
        asked = [
            GenerateRequest(id=f"s{n}", prompt=text, mode=mode, sampling=sampling)  # type: ignore[arg-type]
            for n, text in enumerate(texts)
        ]
        engine.generate([replace(asked[0], id="warm")])
        results = [engine.generate([request])[0] for request in asked]
        speeds = [r["timing"]["tokens_per_second"] for r in results]
        lengths = [r["speculation"]["mean_acceptance_length"] for r in results]
        rows.append(
            {
                "row": f"SmolLM2 {mode}",
                "tokens_per_second": len(speeds) / sum(1 / s for s in speeds),
                "acceptance_length": statistics.mean(lengths) if mode != "off" else 1.0,
            }
        )
    return rows


def judged(report: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """What was measured, its bar, and whether it is met."""
    alone_rows = {r["row"]: r for r in report["alone"]}
    found: list[tuple[str, str, str, bool | None]] = []

    def add(what: str, value: float, bar: float, at_least: bool, form: str = "{:.2f}") -> None:
        sign = ">=" if at_least else "<="
        met = value >= bar if at_least else value <= bar
        found.append((what, form.format(value), f"{sign} {form.format(bar)}", met))

    off, dspark = alone_rows["off, no drafter"], alone_rows["DSpark 5.52"]
    add("off step / floor, batch 1", off["gpu_ms_per_step"] / report["plain_floor_ms"], 1.30, False)
    add("DSpark round / floor, batch 1", dspark["gpu_ms_per_step"] / report["round_floor_ms"], 1.40, False)
    add("GPU idle between steps, off, %", 100 * off["idle_share"], 3.0, False)
    add("GPU idle between steps, DSpark, %", 100 * dspark["idle_share"], 3.0, False)
    growth = alone_rows["memory"]
    add("memory growth, bytes", float(growth["allocated"] + growth["reserved"]), 0.0, False, "{:.0f}")
    for row in report.get("together", []):
        if row["row"] == "compact, chat" and row["batch"] == 32:
            fixed = next(r for r in report["together"] if r["row"] == "static, chat")
            ratio = row["tokens_per_second"] / fixed["tokens_per_second"]
            found.append(("compact / our fixed 7, chat, batch 32", f"{ratio:.2f}", "", None))
    for row in report.get("contexts", []):
        if "added_kv_share_of_bandwidth" in row:
            add("32k: added KV bytes, share of bandwidth", row["added_kv_share_of_bandwidth"], 0.60, True)
    return found


def table(report: dict[str, Any]) -> str:
    lines = [
        "| row | batch | ms/step (GPU) | ms/step (wall) | tokens/s | tokens/step | idle % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (*report["alone"], *report.get("together", [])):
        if "ms_per_step" in row:
            lines.append(
                f"| {row['row']} | {row['batch']} | {row['gpu_ms_per_step']:.3f} | {row['ms_per_step']:.3f} "
                f"| {row['tokens_per_second']:.0f} | {row['tokens_per_step']:.2f} | {100 * row['idle_share']:.1f} |"
            )
    lines += ["", "| measured | value | bar | met |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {value} | {bar} | {'' if met is None else 'yes' if met else 'NO'} |"
        for what, value, bar, met in judged(report)
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under 150 s on an H200")
    parser.add_argument("--out", type=Path, help="write the JSON report here as well")
    parser.add_argument("--parts", default="alone,together,contexts", help="which parts to run")
    parser.add_argument("--overlap", action="store_true", help="kernels start while the one before them ends")
    parser.add_argument("--smollm", metavar="GGUF", help="also run SmolLM2-135M from this file")
    options = parser.parse_args()
    if options.overlap:
        engine_module.build_decoder = partial(build_decoder, overlaps=True)
    began, steps = time.perf_counter(), 120 if options.quick else 400
    bandwidth = read_bandwidth()
    report: dict[str, Any] = {
        **machine(),
        "overlap": options.overlap,
        "read_tb_per_s": bandwidth,
        "plain_floor_ms": PLAIN_GB / bandwidth,
        "round_floor_ms": ROUND_GB / bandwidth,
    }
    parts: dict[str, Callable[[], Any]] = {
        "alone": lambda: alone(steps),
        "together": lambda: together(steps // 2),
        "contexts": lambda: contexts(min(steps, 120), bandwidth),
    }
    for name in options.parts.split(","):
        start = time.perf_counter()
        report[name] = parts[name]()
        print(f"# {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        for row in report[name]:
            print(json.dumps(row), file=sys.stderr, flush=True)
    if options.smollm:
        report["smollm"] = smollm(options.smollm, 256)
    report["seconds"] = time.perf_counter() - began
    print(table(report) if "alone" in report else "")
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
