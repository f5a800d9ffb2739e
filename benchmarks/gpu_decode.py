"""Decode speed on one GPU in Qwen3-8B's shapes: plain steps and DSpark rounds against what reading the weights costs.

    python3 benchmarks/gpu_decode.py --quick --parts breakdown,alone          # where a round's time goes; a minute
    python3 benchmarks/gpu_decode.py --quick --out FILE.json --commit ID      # all parts but memory and generate
    python3 benchmarks/gpu_decode.py --parts memory,generate --out FILE.json  # 10,000 steps; transformers
    python3 benchmarks/gpu_decode.py --quick --overlap small                  # small kernels start early; or "all"

Every row is written to FILE.json as soon as it is there; parts that the file has of an earlier run are kept.
benchmarks/with_peers.sh runs vLLM in the same minutes and puts both into one table.

Weights are random and acceptance is simulated (sparkchat/simulation.py), so speeds are real and texts mean nothing.
Floors are bytes over the read bandwidth that the same run measured. Needs torch, triton, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from gpu_report import table  # noqa: E402
from gpu_state import Probe, breakdown, clocks  # noqa: E402
from gpu_timing import machine  # noqa: E402

from sparkchat.collector import hand_back, take_over  # noqa: E402
from sparkchat.engine import engine as engine_module  # noqa: E402
from sparkchat.engine.captured.build import build_decoder  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.kernels.launch import Overlap  # noqa: E402
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams  # noqa: E402
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance, acceptance_of_length  # noqa: E402

SHAPES = ROOT / "sparkchat" / "shapes" / "qwen3-8b"
BLOCK = 7
PROMPT = 1024
LENGTHS = (3.72, 5.52)
CHAT = "chat"
PLAIN_GB, ROUND_GB = 15.137, 19.1
"""Bytes that a plain step and a DSpark round read at the least: all weights but the embedding table; and the drafter's
layers, its feature projection, the head a second time and the Markov head once for each draft."""
MODES = ("off", "static", "compact", "cap-accept")
KEPT = ("step_ms", "gpu_idle_ms", "draft_ms", "verify_ms", "graph")


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
    take_over()  # as the engine's own process does
    try:
        yield engine
    finally:
        hand_back()
        engine.close() if hasattr(engine, "close") else None
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def requests(batch: int, mode: str, tokens: int, temperature: float = 0.0, top_p: float = 1.0) -> list[GenerateRequest]:
    numbers = random.Random(1)
    return [
        GenerateRequest(
            id=f"r{n}",
            prompt_ids=tuple(numbers.randrange(1000, 151000) for _ in range(PROMPT)),
            mode=mode,  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, top_p=top_p),
        )
        for n in range(batch)
    ]


def measure(
    engine: Engine, batch: int, mode: str, steps: int, temperature: float = 0.0, top_p: float = 1.0
) -> dict[str, Any]:
    """Run ``steps`` full steps of ``batch`` requests behind their prompts, and say what one cost.

    Tokens per second are wall time on the host: everything that a step takes, events and detokenising included. The
    card's clocks are asked for half way and at the end, while steps are in flight; memory is probed right behind.
    """
    room = engine.pair.context - PROMPT - 1
    for request in requests(batch, mode, room, temperature, top_p):
        engine.submit(request)
    while len(engine._scheduler.decoding) < batch:
        engine.step()
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    collected = CollectorTimes()
    gc.callbacks.append(collected)
    alone, rows, tokens, began, states = [], [], 0, time.perf_counter(), []
    for number in range(steps):
        if number == steps // 2:
            states.append(clocks())
        for event in engine.step():
            if event["event"] == "step":
                # The engine's own process keeps no event: the collector would look at all of them.
                if len(rows) % batch == 0:
                    alone.append({name: event[name] for name in KEPT})
                rows.append(event["rows"])
                tokens += len(event["committed_ids"])
        if len(engine._scheduler.decoding) < batch:
            break
    states.append(clocks())
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    gc.callbacks.remove(collected)
    walls = longest_waits(alone)
    probed = probe().run()
    for n in range(batch):
        engine.cancel(f"r{n}")
    engine.step()
    num_steps = len(rows) // batch
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
        "tokens_per_step": tokens / max(1, len(rows)),
        "rows": statistics.mean(rows),
        "graphs": bool(alone[-1]["graph"]["replayed"]),
        "longest_idle_ms": walls,
        "longest_collections_ms": sorted(collected.times, reverse=True)[:5],
        "collections": dict(Counter(collected.generations)),
        "state": {**states[0], **probed},
        "state_at_end": states[-1],
    }


class CollectorTimes:
    """How long Python's collector held the host up, in milliseconds, and what it looked at: 0 for what was new."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.generations: list[int] = []
        self._began = 0.0

    def __call__(self, phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.times.append((time.perf_counter() - self._began) * 1e3)
            self.generations.append(details["generation"])


def longest_waits(records: list[dict[str, Any]]) -> list[tuple[int, float, str]]:
    """The five longest times the device stood idle before a step: the step's number, milliseconds, its graphs."""
    waits = [(n, r["gpu_idle_ms"] or 0.0, r["graph"]["key"]) for n, r in enumerate(records)]
    return sorted(waits, key=lambda wait: -wait[1])[:5]


@cache
def probe() -> Probe:
    return Probe()


def simulate(engine: Engine, profile: SimulatedAcceptance) -> None:
    engine._captured.simulate(profile)


def alone(steps: int) -> Iterator[dict[str, Any]]:
    """Batch 1: plain steps, and rounds at both acceptance lengths."""
    with opened() as engine:
        yield {"row": "off, no drafter", **measure(engine, 1, "off", steps)}
    drafter = {"drafter_path": str(SHAPES / "drafter"), "simulate_acceptance": "chat"}
    with opened(**drafter) as engine:
        yield {"row": "off, drafter loaded", **measure(engine, 1, "off", steps)}
        for length in LENGTHS:
            simulate(engine, acceptance_of_length(length, BLOCK))
            yield {"row": f"DSpark {length}", "length": length, **measure(engine, 1, "static", steps)}
        yield {"row": "DSpark 5.52, temperature 1", **measure(engine, 1, "static", steps, 1.0)}
        yield {"row": "DSpark 5.52, T 1 p .95", **measure(engine, 1, "static", steps, 1.0, top_p=0.95)}
        for name in ("chat", "code"):
            simulate(engine, SimulatedAcceptance(name, BUILT_IN[name]))
            for mode in ("static", "compact"):
                yield {"row": f"{mode}, {name}", **measure(engine, 1, mode, steps)}
        yield {"row": "cost table", "table": engine.info["cost_table"]}


def together(steps: int) -> Iterator[dict[str, Any]]:
    """Batch 8 and 32: plain, rounds at both lengths, and compact against the fixed block at the chat profile."""
    drafter = {"drafter_path": str(SHAPES / "drafter"), "simulate_acceptance": "chat"}
    with opened(concurrency=32, mode="compact", **drafter) as engine:
        for batch in (8, 32):
            yield {"row": "off", **measure(engine, batch, "off", steps)}
            for length in LENGTHS:
                simulate(engine, acceptance_of_length(length, BLOCK))
                yield {"row": f"DSpark {length}", "length": length, **measure(engine, batch, "static", steps)}
        simulate(engine, SimulatedAcceptance(CHAT, BUILT_IN[CHAT]))
        for mode in ("static", "compact", "static", "compact"):
            yield {"row": f"{mode}, chat", "length": chat_length(), **measure(engine, 32, mode, steps)}
        yield {"row": "cost table", "table": engine.info["cost_table"]}


def chat_length() -> float:
    """Tokens a round of the chat profile at a fixed block, the token after the drafts included."""
    alive, total = 1.0, 1.0
    for chance in BUILT_IN[CHAT][:BLOCK]:
        alive *= chance
        total += alive
    return round(total, 2)


def launches(steps: int) -> Iterator[dict[str, Any]]:
    """What the device does in a plain step and in a round, launch by launch."""
    drafter = {"drafter_path": str(SHAPES / "drafter"), "simulate_acceptance": CHAT}
    runs: list[tuple[dict[str, Any], int, str]] = [
        ({}, 1, "off"),
        (drafter, 1, "static"),
        ({**drafter, "concurrency": 32}, 32, "compact"),
    ]
    for settings, batch, mode in runs:
        with opened(**settings) as engine:
            for request in requests(batch, mode, 600):
                engine.submit(request)
            while len(engine._scheduler.decoding) < batch:
                engine.step()
            yield {"row": f"{mode}, batch {batch}", **breakdown(engine.step, steps), "state": clocks()}


def memory(steps: int) -> list[dict[str, Any]]:
    """Whether anything is left behind, once every graph has been made."""
    with opened(drafter_path=str(SHAPES / "drafter"), simulate_acceptance=CHAT) as engine:
        return [{"row": "memory", **memory_growth(engine, steps)}]


def generate(tokens: int) -> list[dict[str, Any]]:
    """transformers' own ``generate`` in the same shapes, greedy, random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(SHAPES)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(1000, 151_000, (1, PROMPT), device="cuda")
    times = {}
    for count in (8, 8, tokens):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        torch.cuda.synchronize()
        times[count] = time.perf_counter() - began
    each = (times[tokens] - times[8]) / (tokens - 8)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return [{"row": "transformers generate", "ms_per_token": each * 1e3, "tokens_per_second": 1 / each}]


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
            engine._captured.drain(engine.mode)
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


def smollm(path: str, steps: int) -> Iterator[dict[str, Any]]:
    """SmolLM2-135M, real weights and real acceptance: rounds against plain steps, greedy, ten prompts of text."""
    drafter = ROOT / "sparkchat" / "drafters" / "smollm2-135m"
    texts = [
        "Explain how tides work.", "Write a short story about a lighthouse.", "List five uses of a paper clip.",
        "What is a prime number?", "Describe the water cycle.", "Give me a recipe for pancakes.",
        "Why is the sky blue?", "How do bees make honey?", "What is recursion?", "Summarise the history of Rome.",
    ]  # fmt: skip
    spec = LoadSpec("smollm2-135m", path, str(drafter), device="cuda", context=2048, mode="static")
    engine = Engine(spec)
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
        yield (
            {
                "row": f"SmolLM2 {mode}",
                "tokens_per_second": len(speeds) / sum(1 / s for s in speeds),
                "acceptance_length": statistics.mean(lengths) if mode != "off" else 1.0,
            }
        )


class Report:
    """The report, on disk after every row."""

    def __init__(self, out: Path | None, fresh: dict[str, Any]) -> None:
        self._out = out
        before = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
        self.values: dict[str, Any] = {**before, **fresh}

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        if self._out is not None:
            self._out.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under 150 s on an H200")
    parser.add_argument("--out", type=Path, help="write the JSON report here, part by part")
    parser.add_argument("--parts", default="breakdown,alone,together,contexts", help="which parts to run, in order")
    parser.add_argument("--overlap", choices=[which.value for which in Overlap],
                        help="which kernels start while the one before them ends; else the default")  # fmt: skip
    parser.add_argument("--smollm", metavar="GGUF", help="also run SmolLM2-135M from this file")
    parser.add_argument("--commit", help="what is measured, where the folder is no git checkout")
    parser.add_argument("--memory-steps", type=int, default=10_000)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.overlap:
        engine_module.build_decoder = partial(build_decoder, overlaps=Overlap(options.overlap))
    began, steps = time.perf_counter(), 120 if options.quick else 400
    bandwidth = read_bandwidth()
    floors = {
        "read_tb_per_s": bandwidth,
        "plain_floor_ms": PLAIN_GB / bandwidth,
        "round_floor_ms": ROUND_GB / bandwidth,
    }
    report = Report(options.out, {**machine(options.commit), "overlap": options.overlap, **floors})
    parts: dict[str, Callable[[], Any]] = {
        "breakdown": lambda: launches(5),
        "alone": lambda: alone(steps),
        "together": lambda: together(steps // 2),
        "contexts": lambda: contexts(min(steps, 120), bandwidth),
        "memory": lambda: memory(options.memory_steps),
        "generate": lambda: generate(64),
        "smollm": lambda: smollm(options.smollm, 256),
    }
    names = [*options.parts.split(","), *(["smollm"] if options.smollm else [])]
    for name in dict.fromkeys(names):
        start = time.perf_counter()
        rows: list[dict[str, Any]] = []
        for row in parts[name]():
            rows.append(row)
            report.put(name, rows)
        print(f"# {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    report.put("seconds", time.perf_counter() - began)
    print(table(report.values))


if __name__ == "__main__":
    main()
