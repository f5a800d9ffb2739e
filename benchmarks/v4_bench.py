"""What the parts of benchmarks/v4_decode.py share: a run and its report, engines, steps that are timed."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import v4_gaps
import v4_shapes
import v4_table
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from sparkchat.collector import hand_back, take_over
from sparkchat.engine import engine as engine_module
from sparkchat.engine.engine import Engine
from sparkchat.params import CostTable, GenerateRequest, LoadSpec, SamplingParams

FIELD = "0.82,0.67,0.55,0.45,0.37"
"""Survivals by position that were reported of V4-Flash's own drafter in the field."""
PROMPT = 4
"""Tokens that are really read; what lies before an answer is given by ``Bench.context``."""
ONE_REQUEST_COSTS = CostTable((1, 6), (1.0, 2.0))
"""Where no plan is asked for, so that none is measured."""


class Bench:
    """One run: its settings, and the report that grows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.is_tiny = options, options.tiny
        self.gpus, self.rank_of = options.gpus, options.rank_of
        self.steps = 2 if options.tiny else 60 if options.quick else 200
        self.context, self.long_context = (24, 60) if options.tiny else (2048, 65_536)
        self.batches = (1, 2) if options.tiny else (1, 4, 16, 64)
        self.began = time.perf_counter()
        self.dspark, self.mtp = v4_shapes.write(folder, is_tiny=options.tiny)
        self.block = json.loads((self.dspark / "config.json").read_text())["dspark_block_size"]
        bandwidth = v4_shapes.read_bandwidth() if torch.cuda.is_available() and not options.tiny else 1.0
        self.report: dict[str, Any] = {
            **v4_shapes.machine(options.commit),
            "gpus": options.gpus,
            "rank_of": options.rank_of,
            "overlap": options.overlap,
            "tiny": options.tiny,
            "context": self.context,
            "block": self.block,
            "read_tb_per_s": bandwidth,
            "floors_ms": v4_shapes.floors(self.dspark, self.block, self.rank_of or self.gpus, bandwidth),
            "rows": [],
        }

    @property
    def unplanned(self) -> dict[str, Any]:
        """Settings of an engine for all batch sizes that plans nothing, so that no table is measured."""
        return {"concurrency": self.batches[-1], "cost_table": ONE_REQUEST_COSTS}

    def add(self, part: str, row: str, **numbers: Any) -> None:
        """Keep a row, and write the report as it is now."""
        kept = {"part": part, "row": row, **numbers, "at_s": round(time.perf_counter() - self.began, 1)}
        self.report["rows"].append(kept)
        self.report["seconds"] = time.perf_counter() - self.began
        print(json.dumps(kept), file=sys.stderr, flush=True)
        if self.options.out:
            fresh = self.options.out.with_suffix(".part")
            fresh.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self.options.out)

    @contextmanager
    def opened(self, part: str, folder: Path, *, has_drafter: bool = True, **settings: Any) -> Iterator[Engine]:
        """An engine over all GPUs, and all that it held given back."""
        # What the engine before held on to is given back only now that nobody names it any more.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        began, drafter = time.perf_counter(), str(folder) if has_drafter else None
        simulated = FIELD if has_drafter and folder == self.dspark else "0.82,0.67,0.55" if has_drafter else None
        spec: dict[str, Any] = {
            "device": "cpu" if self.is_tiny else "cuda",
            "graphs": True,
            "tp": self.gpus,
            "context": self.context + 8 * (self.steps + 100) if not self.is_tiny else 400,
            "dummy_weights": True,
            "threads": 1 if self.is_tiny else None,
            "simulate_acceptance": simulated,
            # Measured by graphs on a GPU, at the start.
            "cost_table": ONE_REQUEST_COSTS if self.is_tiny and has_drafter else None,
            **settings,
        }
        engine = Engine(LoadSpec("deepseek-v4-flash", str(folder), drafter, **spec))
        group = getattr(getattr(engine.pair.target, "inner", engine.pair.target), "group", None)
        told = {"load_ms": engine.load_ms, "kernels": engine.info["kernels"], "sums": type(group).__name__}
        self.add(part, "start", seconds=time.perf_counter() - began, **told, **graphs_of(engine))
        take_over()  # as the engine's own process does
        try:
            yield engine
        finally:
            hand_back()
            if engine._captured is not None:
                engine._captured.drain(engine.mode)
                engine._captured.stages.close()
            if engine.pair.team is not None:
                engine.pair.team.close()

    def decode(self, engine: Engine, part: str, row: str, batch: int, mode: str, **options: Any) -> dict[str, Any]:
        """Measure full steps, and keep the row."""
        still = 1 if self.is_tiny else 6
        numbers = measure(engine, batch, mode, self.steps, options.pop("context", self.context), still)
        if "length" in options:
            # What was drawn is a sample; the mean is known.
            options["tokens_per_second_at_length"] = batch * options["length"] * 1e3 / numbers["wall_ms"]
        self.add(part, row, **numbers, **options)
        return numbers


def lean() -> Any:
    """Within this, engines that open capture nothing ahead: what is timed is captured when it is met."""
    return mock.patch.object(engine_module, "warm_up", lambda *_: None)


def graphs_of(engine: Engine) -> dict[str, Any]:
    decoder = engine._captured
    assert decoder is not None, engine.info["graphs"]
    return {"graphs": decoder.stages.num_graphs, "capture_s": decoder.stages.seconds}


def settle(engine: Engine) -> None:
    if engine.pair.device.type == "cuda":
        torch.cuda.synchronize()


def begin(engine: Engine, batch: int, mode: str, context: int) -> None:
    """``batch`` requests that decode behind ``context`` positions, of which only the last few were read."""
    room = engine.pair.context - PROMPT - 1
    for n in range(batch):
        ids = tuple(2 + (7 * n + i) % 60 for i in range(PROMPT))
        # Random weights have an almost even law: drawn tokens differ, and so do the experts that they are sent to. No
        # seed is chosen: a sampled request that has one is planned as if alone (docs/decisions/0001), and what a plan
        # of the whole batch trims would not be measured.
        sampling = SamplingParams(max_tokens=room, ignore_eos=True, temperature=1.0)
        engine.submit(GenerateRequest(id=f"r{n}", prompt_ids=ids, mode=mode, sampling=sampling))  # type: ignore[arg-type]
    while len(engine._scheduler.decoding) < batch:
        engine.step()
    for _ in range(2):
        engine.step()
    engine._captured.drain(engine.mode)  # type: ignore[union-attr]
    pair = engine.pair
    for state in engine._scheduler.decoding:
        state.tokens = [2] * context + state.tokens[-1:]
        pair.cache.advance(state.slot.row, context)
        if pair.draft_cache is not None:
            pair.draft_cache.advance(state.slot.draft.row, context)
            state.slot.draft.length = context


def card_of(engine: Engine) -> dict[str, Any]:
    """The state that the steps have left the card in: clocks, watts, degrees; nothing where there is no card."""
    if engine.pair.device.type != "cuda":
        return {}
    from gpu_state import clocks

    return clocks()


def busy_ms(event: dict[str, Any]) -> float:
    """What a step took of the device, by the engine's own marks."""
    return event["step_ms"] - (event["gpu_idle_ms"] or 0.0)


def measure(engine: Engine, batch: int, mode: str, steps: int, context: int, still: int) -> dict[str, Any]:
    """What a step of ``batch`` requests costs; tokens per second are by wall time, less what capturing took.

    Steps count once ``still`` of them in a row have captured nothing.
    """
    begin(engine, batch, mode, context)
    stages = engine._captured.stages  # type: ignore[union-attr]
    made, quiet = stages.num_graphs, 0
    for _ in range(40):
        engine.step()
        quiet = quiet + 1 if stages.num_graphs == made else 0
        made = stages.num_graphs
        if quiet == still:
            break
    settle(engine)
    alone, rows, tokens, captured, began = [], [], 0, stages.seconds, time.perf_counter()
    for _ in range(steps):
        for event in engine.step():
            if event["event"] == "step":
                # The engine's own process keeps no event: the collector would look at all of them.
                if len(rows) % batch == 0:
                    alone.append({name: event[name] for name in ("step_ms", "gpu_idle_ms", "draft_ms", "verify_ms")})
                rows.append(event["rows"])
                tokens += len(event["committed_ids"])
        if len(engine._scheduler.decoding) < batch:
            break
    settle(engine)
    elapsed = time.perf_counter() - began - (stages.seconds - captured)
    card = card_of(engine)
    for n in range(batch):
        engine.cancel(f"r{n}")
    engine.step()
    busy = [busy_ms(r) for r in alone]
    per_step = tokens / max(1, len(rows))
    return {
        "batch": batch,
        "mode": mode,
        "context": context,
        "steps": len(alone),
        "gpu_ms": statistics.median(busy),
        "wall_ms": elapsed * 1e3 / max(1, len(alone)),
        "draft_ms": statistics.median(r["draft_ms"] or 0.0 for r in alone),
        "verify_ms": statistics.median(r["verify_ms"] or 0.0 for r in alone),
        "tokens_per_second": tokens / elapsed,
        "tokens_per_step": per_step,
        "rows": statistics.mean(rows),
        "card": card,
    }


def profiled(bench: Bench, engine: Engine, mode: str) -> dict[str, Any]:
    """Where the time of a step of one request goes, by kernels of rank 0 and by what lies between them."""
    on_gpu = engine.pair.device.type == "cuda"
    begin(engine, 1, mode, bench.context)
    for _ in range(2 if bench.is_tiny else 8):
        engine.step()
    settle(engine)
    steps, kind = (2, ProfilerActivity.CPU) if bench.is_tiny else (20, ProfilerActivity.CUDA)
    events: list[dict[str, Any]] = []
    with record(activities=[kind]) as seen:
        for _ in range(steps):
            events += engine.step()
        settle(engine)
        card = card_of(engine)
    engine.cancel("r0")
    engine.step()
    # The first that is told of was launched before the profiler began.
    times = [busy_ms(event) for event in events if event["event"] == "step"][1:] or [0.0]
    spent = v4_table.times_by_kernel(seen.key_averages(), steps, on_gpu)
    return {
        "parts_us": v4_table.by_part(spent),
        "kernels": v4_table.longest(spent),
        "step_ms": statistics.median(times),
        "mean_ms": statistics.mean(times),
        "card": card,
        "gaps": v4_gaps.gaps_of(v4_gaps.launches_of(seen.events(), on_gpu), steps),
    }
