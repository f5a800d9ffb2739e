"""DeepSeek-V4-Flash in full shapes on any number of GPUs: steps and rounds against what reading the weights costs.

    python3 benchmarks/v4_decode.py --gpus 2 --commit HASH --out FILE.json       # all parts
    python3 benchmarks/v4_decode.py --gpus 2 --parts alone,mtp3 --quick          # some of them, fewer steps
    python3 benchmarks/v4_decode.py --rank-of 2 --parts alone                    # one rank of two, on one GPU
    python3 benchmarks/v4_decode.py --rank-of 2 --parts variants                 # other plans, side by side
    python3 benchmarks/v4_decode.py --tiny --gpus 2                              # a tiny model on the CPU

Weights are random in the published forms and made on the devices; acceptance is simulated (sparkchat/simulation.py), so
times are real and texts mean nothing. Requests are put behind their context without reading it: their keys are zeros,
which cost what any others cost. Floors are bytes over the bandwidth that the same run measured on one GPU.
The report is written again after every row, so a run that is cut leaves what it had. Needs torch, triton, transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import v4_shapes  # noqa: E402
import v4_table  # noqa: E402
import v4_variants  # noqa: E402
from v4_bench import FIELD, Bench, graphs_of, lean, profiled, settle  # noqa: E402
from v4_rank import lone_rank  # noqa: E402

from sparkchat.engine import engine as engine_module  # noqa: E402
from sparkchat.engine.captured.build import build_decoder  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.models.base import ForwardBatch  # noqa: E402
from sparkchat.params import GenerateRequest, SamplingParams  # noqa: E402
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance, acceptance_of_length, parse_simulation  # noqa: E402

LENGTHS = (4.0, 5.4)
PARTS = ("alone", "batches", "mtp3", "contexts", "mtp1", "plain")
"""In order of their weight; each opens an engine of its own. ``variants`` and ``blocks`` run where asked for."""


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
        timed = {"off": bench.decode(engine, "alone", "off, drafter loaded", 1, "off")}
        profiles = {"field": parse_simulation(FIELD)}
        if not bench.is_tiny:
            profiles |= {name: SimulatedAcceptance(name, chances) for name, chances in BUILT_IN.items()}
        for name, profile in profiles.items():
            simulate(engine, profile)
            for mode in ("static", "compact"):
                bench.decode(engine, "alone", f"{mode}, {name}", 1, mode)
        for length in LENGTHS:
            simulate(engine, acceptance_of_length(length, bench.block))
            timed["static"] = bench.decode(engine, "alone", f"DSpark, length {length}", 1, "static", length=length)
        for mode in ("off", "static"):
            bench.add("profile", mode, **profiled(bench, engine, mode), timed_ms=timed[mode]["gpu_ms"])


def batches(bench: Bench) -> None:
    """DSpark and plain steps at every batch size, at the field profile."""
    with bench.opened("batches", bench.dspark, mode="compact", concurrency=bench.batches[-1]) as engine:
        bench.add("batches", "cost table", table=engine.info["cost_table"])
        for batch in bench.batches:
            for mode in ("off", "static", "compact"):
                bench.decode(engine, "batches", mode, batch, mode)


def blocks(bench: Bench) -> None:
    """As ``batches`` without plans: quickly there, as only what is timed is captured, and no table is measured."""
    with lean(), bench.opened("blocks", bench.dspark, **bench.unplanned) as engine:
        for batch in bench.batches:
            for mode in ("off", "static"):
                bench.decode(engine, "blocks", mode, batch, mode)


def mtp(bench: Bench, block: int) -> None:
    """The preview's block, with the acceptance that DSpark has at the same position."""
    with lean(), bench.opened("mtp", bench.mtp, block_size=block, **bench.unplanned) as engine:
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
        "--overlap", choices=("none", "small", "all", "behind"), help="how kernels start, else as usual"
    )
    parser.add_argument("--variants", default=v4_variants.DEFAULT, help="plans of that part, between semicolons")
    parser.add_argument("--quick", action="store_true", help="60 steps a row instead of 200")
    parser.add_argument("--commit", help="what was measured; asked of git where it is not given")
    parser.add_argument("--out", type=Path, help="write the report here, again after every row")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: whether the script runs")
    parser.add_argument("--is-part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[[Bench], None]] = {
        "alone": alone,
        "batches": batches,
        "blocks": blocks,
        "mtp3": partial(mtp, block=3),
        "mtp1": partial(mtp, block=1),
        "plain": plain,
        "contexts": contexts,
        "variants": v4_variants.variants,
    }
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join(parts)}")
    if "variants" in chosen:
        try:
            v4_variants.parsed(options.variants)
        except ValueError as error:
            parser.error(f"--variants: {error}")
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
            told += ["--variants", options.variants]
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
