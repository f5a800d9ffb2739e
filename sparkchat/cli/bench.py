"""``sparkchat bench``: every way to decode beside plain decoding, on this machine and with this pair."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkchat import environment, strict_json
from sparkchat.bench.ahead import capture_ahead
from sparkchat.bench.arms import Arm, chosen_arms, possible_arms
from sparkchat.bench.bars import bars_of, told
from sparkchat.bench.chats import Chat, held_out_chats, meaningless_chats
from sparkchat.bench.engine_runs import EngineRun, engine_run
from sparkchat.bench.equality import Equality, compare
from sparkchat.bench.measuring import Tally, answer, measure, requests_of
from sparkchat.bench.plot import throughput_svg
from sparkchat.bench.png import png_of
from sparkchat.bench.report import HEADER, SCHEMA, plot_lines, rows_of, step_times, table_rows
from sparkchat.bench.sheet import Sheet
from sparkchat.catalog import inner_drafter_kind
from sparkchat.cli import arguments as a
from sparkchat.cli.bench_progress import BenchProgress, bench_progress
from sparkchat.cli.output import as_json, data, note, table
from sparkchat.cli.prepare import prepare
from sparkchat.config import RunConfig
from sparkchat.errors import NotEnoughDisk, SparkchatError, UsageError
from sparkchat.params import SamplingParams
from sparkchat.private_file import write_private

ON_CPU, ON_GPU = (1, 4), (1, 8, 16, 32, 64, 128, 256)
_ROOM = 512
"""Tokens of context for the prompt, where requests share the memory."""
_PATIENCE_SECONDS = 8.0
"""How long an output that nobody reads may hold a program that was asked to end."""
_NOTHING = ", so there is nothing to tell"
_LEAST_ROUNDS = 2

_OPTIONS = (
    a.LAWS
    | a.PAIR
    | {name: a.ANSWERING[name] for name in ("draft_temperature", "refine", "dummy_weights", "simulate_acceptance")}
    | {"verbose": a.ANSWERING["verbose"]}
)


def register(app: typer.Typer) -> None:
    app.command()(bench)


@a.with_options(_OPTIONS)
def bench(
    ctx: typer.Context,
    model: a.Model = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--concurrency", metavar="1,8,...", help="Requests decoded together, one after another.", show_default=False
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            "--arms",
            metavar="NAMES",
            help="Of off, mtp, static, compact, compact-no-table, cap-accept, static-1, ..., fixed (every length).",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts", metavar="N", help="Held-out chats that every arm answers; more where more run together."
        ),
    ] = 8,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of each answer.")] = 128,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="F", help="Decoding that each arm is timed for at least; rounds are added."),
    ] = 1.5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write bench.json, bench.svg and bench.png there.", show_default=False
        ),
    ] = None,
    json_: a.AsJson = False,
) -> int:
    """Time plain decoding, MTP where the checkpoint has it, and every verify mode, over a list of concurrencies."""
    if prompts < 1 or tokens < 2:
        raise UsageError("--prompts must be 1 or more, and --tokens 2 or more")
    if not 0.0 <= seconds <= 3600.0:
        raise UsageError(f"--seconds {seconds} is not possible; give 0 to 3600")
    config = prepare(ctx)
    if out is not None:
        _make(out)
    counts = _counts(requests, config)
    names = None if arms is None else [name.strip() for name in arms.split(",")]
    context = config.spec.context
    if counts[-1] > 1 and not a.is_typed(ctx, "context"):
        context = min(context or _ROOM + tokens, _ROOM + tokens)
    # The mode is each request's own; static measures nothing before it is asked to.
    mode = config.spec.mode if config.spec.drafter_path is None else "static"
    config = replace(config, spec=replace(config.spec, mode=mode, context=context, concurrency=counts[-1]))
    from sparkchat.ui.answering import Signals

    with Signals(_PATIENCE_SECONDS) as signals, bench_progress(config.verbose) as progress:
        work = _Bench(config, counts, names, prompts, tokens, seconds, out, json_, progress)
        try:
            work.measure()
        finally:
            # Whatever ended it, what was measured is kept. A signal waits for that, but not for ever, nor for another.
            signals.is_noting = True
            if signals.count:
                signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
            work.keep_and_tell()
        signals.raise_noted()
    work.refuse_differing()
    return 0


def _counts(text: str | None, config: RunConfig) -> list[int]:
    if text is None:
        on_gpu = config.spec.device != "cpu" and environment.torch_has_cuda() and environment.gpus()
        return list(ON_GPU if on_gpu else ON_CPU)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and 1 <= int(part) <= 4096 for part in parts):
        raise UsageError(f"--concurrency {text!r} is not possible; give numbers of requests with commas, e.g. 1,8,16")
    return sorted({int(part) for part in parts})


@dataclass
class _Bench:
    """One run: what was asked, and what has come of it."""

    config: RunConfig
    counts: list[int]
    names: list[str] | None
    prompts: int
    tokens: int
    least_seconds: float
    out: Path | None
    as_json: bool
    progress: BenchProgress
    info: dict[str, Any] = field(default_factory=dict)
    sheet: Sheet | None = None
    """None until the arms are known."""
    cost_table: dict[str, Any] | None = None
    """That plans were made by."""
    equality: dict[str, Equality] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """How long every stage took, up to now."""
    _lost: SparkchatError | None = None
    """Why ``bench.json`` could not be written."""

    def measure(self) -> None:
        """Load, compare, and time every arm at every concurrency. Raises what ends the engine."""
        config, began = self.config, time.perf_counter()

        def lap(stage: str) -> None:
            self.seconds[stage] = time.perf_counter() - began - sum(self.seconds.values())

        with engine_run(config.spec, self.progress.take) as run:
            self.info = run.info
            lap("load")
            possible = possible_arms(_kind(config), run.info["heads"]["confidence"], run.info["block_size"])
            arms = chosen_arms(self.names, possible)
            rounds = {n: max(_LEAST_ROUNDS, math.ceil(self.prompts / n)) for n in self.counts}
            self.sheet = sheet = Sheet([arm.name for arm in arms], rounds, self.least_seconds)
            most = max(self.prompts, _LEAST_ROUNDS * self.counts[-1])
            has_text = run.info["chat_template"] != "none"  # random weights come without a tokenizer
            chats = held_out_chats(most) if has_text else meaningless_chats(most, run.info["vocab_size"])
            sampling = replace(config.sampling, max_tokens=self.tokens, min_tokens=0, stop=(), ignore_eos=True)
            for number, arm in enumerate(arms, start=1):
                # The first answers load, compile and measure what later ones find ready.
                self.progress.prepare("first answers of every arm", number, len(arms))
                answer(run, arm, requests_of(arm, chats[:1], replace(sampling, max_tokens=8)), self.progress.take)
            lap("first_answers")
            if config.spec.simulate_acceptance is None and len(arms) > 1:
                self._compare(run, arms, chats)
                lap("comparison")
            run.send({"op": "measure_together", "on": True})
            for together in self.counts:
                self._capture_ahead(run, arms, together, sampling)
                self.cost_table = run.cost_table
                wanted = partial(sheet.num_wanted, together)
                measure(run, arms, chats, together, sampling, wanted, partial(self._take, together))
                if together != self.counts[-1]:
                    self._keep()

    def _compare(self, run: EngineRun, arms: list[Arm], chats: Sequence[Chat]) -> None:
        def begin(arm: Arm) -> None:
            self.progress.prepare("comparing greedy answers", arms.index(arm) + 1, len(arms))

        self.equality = compare(run, arms, chats, self.counts[-1], self.tokens, begin)

    def _capture_ahead(self, run: EngineRun, arms: list[Arm], together: int, sampling: SamplingParams) -> None:
        spec, began = self.config.spec, time.perf_counter()
        block = spec.block_size or run.info["block_size"] or 0
        begin = partial(self.progress.begin, f"capturing steps of {together} together")
        if capture_ahead(run, arms, together, sampling, block, begin, spec.draft_temperature) is not None:
            self.seconds["captures_ahead"] = self.seconds.get("captures_ahead", 0.0) + time.perf_counter() - began

    def _take(self, together: int, arm: Arm, tally: Tally, seconds: float) -> None:
        assert self.sheet is not None
        self.sheet.add(together, arm.name, tally, seconds)
        self.progress.measured(self.sheet, together, arm, tally)

    @property
    def _differing(self) -> dict[str, Equality]:
        return {name: found for name, found in self.equality.items() if not found.is_equal}

    def _keep(self) -> None:
        """What there is, on disk. A disk that is full now may not be so later: the measuring goes on."""
        if self.out is None:
            return
        before, self._lost = self._lost, _write_report(self._report(), self.out)
        if self._lost is not None and before is None:
            self.progress.say(f"{self._lost.message}; measuring goes on, and it is tried again")

    def keep_and_tell(self) -> None:
        """Files first, then stdout. Raises SparkchatError where all was measured and the files cannot be written; where
        it was not, something else is on its way."""
        self.progress.close()
        if self.sheet is None:
            return
        missing, has_rows = self.sheet.missing_in_words(), bool(self.sheet.tallies())
        if missing:
            self.progress.say(f"ended early; not measured: {missing}" + _NOTHING * (not has_rows))
        if not has_rows:
            return
        report = self._report()
        if self.out is not None:
            self._lost = _write_report(report, self.out) or _draw(report, self.out, self.progress.say)
        if not missing:
            _tell(report, list(self._differing), self.as_json)
            if self._lost is not None:
                if (refusal := self._refusal()) is not None:
                    self.progress.say(refusal.message)
                raise self._lost
            return
        for problem in (self._refusal(), self._lost):
            if problem is not None:
                self.progress.say(problem.message)
        with suppress(OSError):  # a reader that went away as well
            _tell(report, list(self._differing), self.as_json)

    def _refusal(self) -> SparkchatError | None:
        differing = self._differing
        if not differing:
            return None
        first = next(iter(differing))
        return SparkchatError(
            f"no speed-up is told of {', '.join(differing)}: greedy answers differ from plain decoding "
            f"({first}: {differing[first].difference})"
        )

    def refuse_differing(self) -> None:
        """Raises SparkchatError where an arm says something else than plain decoding."""
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _report(self) -> dict[str, Any]:
        assert self.sheet is not None
        config, info, s = self.config, self.info, self.config.sampling
        missing = self.sheet.missing()
        return {
            "schema": SCHEMA,
            "complete": not missing,
            "missing": missing,
            "model": info["model"],
            "drafter": info["drafter"],
            "block_size": info["block_size"],
            "device": info["device"],
            "processor": environment.processor(),
            "cores": environment.num_cores(),
            "load_average": list(os.getloadavg()),
            "seconds": {**self.seconds, "rounds": self.sheet.seconds},
            "versions": info["versions"],
            "temperatures": info["temperatures"],
            "graphs": info["graphs"],
            "dummy_weights": config.spec.dummy_weights,
            "simulated": config.spec.simulate_acceptance,
            "draft_temperature": config.spec.draft_temperature,
            "refine": config.spec.refine,
            "sampling": {
                "temperature": s.temperature,
                "top_p": s.top_p,
                "top_k": s.top_k,
                "min_p": s.min_p,
                "repetition_penalty": s.repetition_penalty,
                "max_tokens": self.tokens,
            },
            "arms": self.sheet.arms,
            "tokens_by": "drawn" if config.spec.simulate_acceptance is None else "expected",
            "cost_table": self.cost_table,
            "equality": {name: found.to_json() for name, found in self.equality.items()},
            "results": rows_of(self.sheet.tallies(), self.equality, info["kv_bytes_per_token"]),
            "step_times": step_times(self.sheet.tallies()),
            "bars": bars_of(self.sheet.comparable(), list(self._differing)),
        }


def _kind(config: RunConfig) -> str | None:
    """dspark or mtp, or None without a drafter."""
    path = config.spec.drafter_path
    if path is None:
        return None
    return inner_drafter_kind(Path(path)) or "dspark"


def _tell(report: dict[str, Any], differing: Sequence[str], json_: bool) -> None:
    if json_:
        as_json(report)
        return
    what = [report["model"], report["drafter"] or "no drafter", report["device"]]
    if report["dummy_weights"]:
        what.append("random weights")
    if report["simulated"]:
        what.append(f"acceptance simulated: {report['simulated']}, tokens as expected from its chances")
    data(", ".join(what))
    table(HEADER, table_rows(report["results"], differing))
    for line in told(report["bars"]):
        data(line)
    ties = sum(found["near_ties"] for found in report["equality"].values())
    if ties:
        note(f"{ties} greedy answers part from plain decoding where two tokens are equally likely to rounding")
    if report["simulated"]:
        note("drafts pass by chance, so that there is no answer to compare: the speed-ups are of the steps alone")


def _make(folder: Path) -> None:
    """Now rather than after minutes of timing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder} is no folder, and none can be made ({error.strerror}); give another"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--out {folder} cannot be written to; give another folder")


def _write_report(report: dict[str, Any], folder: Path) -> SparkchatError | None:
    """Write ``bench.json``; why that cannot be, or None."""
    try:
        write_private(folder / "bench.json", strict_json.dumps(report, indent=2) + "\n")
    except OSError as error:
        return _unwritten(folder / "bench.json", error)
    return None


def _draw(report: dict[str, Any], folder: Path, say: Callable[[str], None]) -> SparkchatError | None:
    """Write the plots; why that cannot be, or None. ``say`` is told why there is no PNG."""
    title = f"{report['model']} on {report['device']}" + ("" if report["complete"] else " (not complete)")
    svg = throughput_svg(plot_lines(report["results"]), title)
    png, reason = png_of(svg)
    for path, content in ((folder / "bench.svg", svg), (folder / "bench.png", png)):
        try:
            if content:
                write_private(path, content)
        except OSError as error:
            return _unwritten(path, error)
    if reason is not None:
        say(reason)
    return None


def _unwritten(path: Path, error: OSError) -> SparkchatError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughDisk(f"{path} cannot be written: no space is left; free some, or give another --out")
    return SparkchatError(f"{path} cannot be written ({error.strerror}); give another --out")
