"""DeepSeek-V4-Flash in full shapes on any number of GPUs: steps and rounds against what reading the weights costs.

    python3 benchmarks/v4_decode.py --gpus 2 --commit HASH --out FILE.json       # all parts
    python3 benchmarks/v4_decode.py --gpus 2 --parts alone,mtp3 --quick          # some of them, fewer steps
    python3 benchmarks/v4_decode.py --rank-of 2 --parts alone                    # one rank of two, on one GPU
    python3 benchmarks/v4_decode.py --tiny --gpus 2                              # a tiny model on the CPU

Weights are random in the published forms and made on the devices; acceptance is simulated (sparkchat/simulation.py), so
times are real and texts mean nothing. Requests are put behind their context without reading it: their keys are zeros,
which cost what any others cost. Floors are bytes over the bandwidth that the same run measured on one GPU.
The report is written again after every row, so a run that is cut leaves what it had. Needs torch, triton, transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import v4_shapes  # noqa: E402
import v4_table  # noqa: E402
from v4_rank import lone_rank  # noqa: E402

from sparkchat.collector import hand_back, take_over  # noqa: E402
from sparkchat.engine import engine as engine_module  # noqa: E402
from sparkchat.engine.captured.build import build_decoder  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.models.base import ForwardBatch  # noqa: E402
from sparkchat.params import CostTable, GenerateRequest, LoadSpec, SamplingParams  # noqa: E402
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance, acceptance_of_length, parse_simulation  # noqa: E402

FIELD = "0.82,0.67,0.55,0.45,0.37"
"""Survivals by position that were reported of V4-Flash's own drafter in the field."""
LENGTHS = (4.0, 5.4)
PROMPT = 4
"""Tokens that are really read; what lies before an answer is given by ``Bench.context``."""
PARTS = ("alone", "batches", "mtp3", "contexts", "mtp1", "plain")
"""In order of their weight; each opens an engine of its own."""


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
            "cost_table": CostTable((1, 6), (1.0, 2.0)) if self.is_tiny and has_drafter else None,
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
    for n in range(batch):
        engine.cancel(f"r{n}")
    engine.step()
    busy = [r["step_ms"] - (r["gpu_idle_ms"] or 0.0) for r in alone]
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
    }


class Watched:
    """A router that keeps how many experts its rows were sent to."""

    def __init__(self, gate: Any, seen: list[int]) -> None:
        self._gate, self._seen = gate, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> Any:
        weights, chosen = self._gate(x, token_ids)
        self._seen.append(chosen.unique().numel())
        return weights, chosen

    def route(self, x: torch.Tensor, token_ids: torch.Tensor) -> Any:
        routing = self._gate.route(x, token_ids)
        self._seen.append(routing.chosen.unique().numel())
        return routing


@torch.inference_mode()
def experts_hit(engine: Engine, rows: int) -> float:
    """Mean number of a layer's experts that the rows of a block are sent to, by the path without graphs."""
    pair, seen = engine.pair, []
    mixtures = [layer._experts for layer in getattr(pair.target, "inner", pair.target).stack.layers]
    gates = [mixture.gate for mixture in mixtures]
    row = pair.cache.allocate()
    ids = torch.arange(rows, device=pair.device) * 7919 % pair.target.config.vocab_size
    for mixture, gate in zip(mixtures, gates, strict=True):
        mixture.gate = Watched(gate, seen)
    try:
        batch = ForwardBatch(ids, torch.arange(rows, device=pair.device), (row,), (0, rows))
        pair.target.forward(batch, pair.cache)
    finally:
        for mixture, gate in zip(mixtures, gates, strict=True):
            mixture.gate = gate
        pair.cache.free(row)
    return statistics.mean(seen)


def simulate(engine: Engine, profile: SimulatedAcceptance) -> None:
    engine._captured.simulate(profile)  # type: ignore[union-attr]


def first_answer(bench: Bench, engine: Engine, began: float) -> None:
    """From nothing to the second token of a first answer."""
    engine.submit(GenerateRequest(id="r0", prompt_ids=(2, 3, 4), mode="static", sampling=SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    settle(engine)
    bench.add("alone", "first answer", seconds=time.perf_counter() - began, **graphs_of(engine))


def alone(bench: Bench) -> None:
    """Batch 1: the start, plain steps and rounds, at acceptance lengths and profiles, compact beside static."""
    began = time.perf_counter()
    with bench.opened("alone", bench.dspark, mode="compact") as engine:
        first_answer(bench, engine, began)
        bench.add("alone", "cost table", table=engine.info["cost_table"])
        hit, even = experts_hit(engine, bench.block + 1), v4_shapes.experts_expected(bench.dspark, bench.block + 1)
        bench.add("alone", "experts of a layer that a block is sent to", measured=hit, by_even_routing=even)
        bench.decode(engine, "alone", "off, drafter loaded", 1, "off")
        profiles = {"field": parse_simulation(FIELD)}
        if not bench.is_tiny:
            profiles |= {name: SimulatedAcceptance(name, chances) for name, chances in BUILT_IN.items()}
        for name, profile in profiles.items():
            simulate(engine, profile)
            for mode in ("static", "compact"):
                bench.decode(engine, "alone", f"{mode}, {name}", 1, mode)
        for length in LENGTHS:
            simulate(engine, acceptance_of_length(length, bench.block))
            bench.decode(engine, "alone", f"DSpark, length {length}", 1, "static", length=length)
        for mode in ("off", "static"):
            break_down(bench, engine, mode)


def break_down(bench: Bench, engine: Engine, mode: str) -> None:
    """Where the time of a step goes, by kernels of rank 0."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_gpu = engine.pair.device.type == "cuda"
    begin(engine, 1, mode, bench.context)
    for _ in range(2 if bench.is_tiny else 8):
        engine.step()
    settle(engine)
    steps, kind = (2, ProfilerActivity.CPU) if bench.is_tiny else (20, ProfilerActivity.CUDA)
    with record(activities=[kind]) as seen:
        for _ in range(steps):
            engine.step()
        settle(engine)
    engine.cancel("r0")
    engine.step()
    times = v4_table.times_by_kernel(seen.key_averages(), steps, on_gpu)
    bench.add("profile", mode, parts_us=v4_table.by_part(times), kernels=v4_table.longest(times))


def batches(bench: Bench) -> None:
    """DSpark and plain steps at every batch size, at the field profile."""
    with bench.opened("batches", bench.dspark, mode="compact", concurrency=bench.batches[-1]) as engine:
        bench.add("batches", "cost table", table=engine.info["cost_table"])
        for batch in bench.batches:
            for mode in ("off", "static", "compact"):
                bench.decode(engine, "batches", mode, batch, mode)


def mtp(bench: Bench, block: int) -> None:
    """The preview's block, with the acceptance that DSpark has at the same position."""
    with bench.opened("mtp", bench.mtp, block_size=block, concurrency=bench.batches[-1]) as engine:
        for batch in bench.batches:
            bench.decode(engine, "mtp", f"mtp {block}", batch, "static", block=block)


def plain(bench: Bench) -> None:
    """Without a drafter loaded, which hands nothing over."""
    with bench.opened("plain", bench.dspark, has_drafter=False) as engine:
        bench.decode(engine, "plain", "off, no drafter", 1, "off")


def contexts(bench: Bench) -> None:
    """A round behind a short and behind a long context, in one engine."""
    room = bench.long_context + 8 * (bench.steps + 100)
    with bench.opened("contexts", bench.dspark, context=room) as engine:
        for length in (bench.context, bench.long_context):
            for mode in ("off", "static"):
                bench.decode(engine, "contexts", f"{mode}, context {length}", 1, mode, context=length)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the model (processes, with --tiny)")
    parser.add_argument("--rank-of", type=int, help="rank 0 of so many, alone on one GPU: without the ranks' meetings")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts to run, in this order")
    parser.add_argument(
        "--overlap", choices=("none", "small", "all", "late", "behind", "each"), help="how kernels start, else as usual"
    )
    parser.add_argument("--quick", action="store_true", help="60 steps a row instead of 200")
    parser.add_argument("--commit", help="what was measured; asked of git where it is not given")
    parser.add_argument("--out", type=Path, help="write the report here, again after every row")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: whether the script runs")
    parser.add_argument("--is-part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[[Bench], None]] = {
        "alone": alone,
        "batches": batches,
        "mtp3": partial(mtp, block=3),
        "mtp1": partial(mtp, block=1),
        "plain": plain,
        "contexts": contexts,
    }
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if options.overlap:
        from sparkchat.kernels.launch import Overlap

        engine_module.build_decoder = partial(build_decoder, overlaps=Overlap(options.overlap))
    if options.rank_of and options.gpus > 1:
        parser.error("--rank-of takes one GPU; leave --gpus out")
    if options.gpus > 1 and len(chosen) > 1:
        report = run_apart(chosen, options)
    else:
        lone = lone_rank(options.rank_of) if options.rank_of else nullcontext()
        with tempfile.TemporaryDirectory() as folder, lone:
            bench = Bench(options, Path(folder))
            for name in chosen:
                parts[name](bench)
            bench.add("end", "all parts ran")
        report = bench.report
    if not options.is_part:
        print(v4_table.table(report))
    return report


def run_apart(parts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Every part in a process of its own, and their reports in one.

    A process that has had ranks on GPUs cannot have a second set of them: torch keeps what symmetric memory was told of
    the first group, by its name, and the second then waits for ranks that have ended.
    """
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in parts:
            out = Path(folder) / f"{name}.json"
            told = ["--gpus", str(options.gpus), "--parts", name, "--out", str(out), "--is-part"]
            told += ["--overlap", options.overlap] if options.overlap else []
            told += ["--commit", options.commit] if options.commit else []
            told += ["--quick"] * options.quick + ["--tiny"] * options.tiny
            began, process = time.perf_counter(), subprocess.Popen([sys.executable, __file__, *told])
            is_running, before = True, dict(report)
            while is_running:
                is_running = process.poll() is None
                if out.exists():
                    report = joined(before, json.loads(out.read_text()))
                    if options.out:
                        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                time.sleep(0.5 if is_running else 0.0)
            print(f"{name}: {process.returncode}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return report


def joined(report: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The report with a further part's rows."""
    if not report:
        return part
    return {**report, "rows": report["rows"] + part["rows"], "seconds": report["seconds"] + part["seconds"]}


if __name__ == "__main__":
    main()
