"""``sparkchat tune``: what a step costs on this machine, and how far the drafter's confidence can be believed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkchat.bench.blocks import Blocks, read_blocks
from sparkchat.bench.chats import held_out_chats
from sparkchat.bench.engine_runs import EngineRun, engine_run
from sparkchat.cli import arguments as a
from sparkchat.cli.output import as_json, data, note, table
from sparkchat.cli.prepare import prepare
from sparkchat.client import child_environment
from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, UsageError, error_from_name
from sparkchat.params import GenerateRequest
from sparkchat.sampling_kind import sampling_kind

_FIT = "from sparkchat.engine.fitting import main; main()"
_NOTE_EVERY = 16


def register(app: typer.Typer) -> None:
    app.command()(tune)


@a.with_options(a.LAWS | a.PAIR)
def tune(
    ctx: typer.Context,
    model: a.Model = None,
    cost: Annotated[bool, typer.Option("--cost", help="Measure the step-cost table only.")] = False,
    sts: Annotated[bool, typer.Option("--sts", help="Fit the confidence temperatures only.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Fit to traces of yours, or to a confidence-*.npz of train, instead of held-out chats; repeatable.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", help="Held-out chats to fit to.")] = 96,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Most tokens of each.")] = 160,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests decoded together: the most the table covers.")
    ] = 4,
    json_: a.AsJson = False,
) -> int:
    """Measure step costs and fit confidence temperatures of MODEL on this machine; both are kept and used."""
    for name, value in (("prompts", prompts), ("tokens", tokens), ("concurrency", concurrency)):
        if value < 1:
            raise UsageError(f"--{name} {value} is not possible; give a whole number of 1 or more")
    if files and cost and not sts:
        raise UsageError("--from says what to fit temperatures to, and --cost fits none; drop one of them")
    config = prepare(ctx)
    if config.spec.drafter_path is None:
        raise UsageError(
            f"{config.spec.name} has nothing to tune: {config.reason_off or 'it has no drafter'}; give --drafter PATH"
        )
    wants_sts, wants_cost = sts or not cost, cost or not sts
    if wants_cost and config.spec.cost_table is not None:
        note("the profile has a cost table for this device, which wins over what is measured now")
    if wants_sts and config.spec.temperatures is not None:
        note("your profile has confidence temperatures, which win over what is fitted now")
    blocks = read_blocks(files) if files and wants_sts else None
    if blocks is not None:
        # What train leaves does not say how it was sampled: as the options say.
        blocks.kind = [kind or sampling_kind(config.sampling) for kind in blocks.kind]
    config = replace(config, spec=replace(config.spec, mode="static", concurrency=concurrency))
    report: dict[str, Any] = {"model": config.spec.name, "drafter": Path(config.spec.drafter_path or "").name}
    if wants_cost or blocks is None:
        with engine_run(config.spec, lambda text: None) as run:
            if not run.info["heads"]["confidence"]:
                raise UsageError(f"{report['drafter']} has no confidence head, so there is nothing to tune")
            if wants_cost:
                report["cost"] = _measure(run)
            if wants_sts and blocks is None:
                blocks = _collect(run, config, prompts, tokens)
    if blocks is not None:
        report["sts"] = _fit(blocks, config, files)
    if json_:
        as_json(report)
    else:
        _show(report)
    _refuse_unkept(report)
    return 0


def _refuse_unkept(report: dict[str, Any]) -> None:
    """Raise SparkchatError where something was measured and could not be stored, which is what tuning is for."""
    names = {"cost": "step costs", "sts": "confidence temperatures"}
    lost = [words for name, words in names.items() if name in report and report[name]["file"] is None]
    if lost:
        raise SparkchatError(
            f"{' and '.join(lost)} of {report['model']} were found, and could not be kept; "
            "make the cache folder of `sparkchat paths` writable, or set XDG_CACHE_HOME"
        )


def _measure(run: EngineRun) -> dict[str, Any]:
    """Have the engine time its steps; they are those it takes later, in the process it takes them in."""
    note("measuring step costs; leave the machine alone for as long")
    found: dict[str, Any] = {}

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "info":
            found.update(event["info"]["cost_table"])
        elif event["event"] == "notice":
            note(event["message"])

    answer = run.ask({"op": "tune_cost"}, "cost_table", take)
    if "error" in answer:
        raise error_from_name(answer["error"], answer["message"])
    return {**found, "file": answer["file"]}


def _collect(run: EngineRun, config: RunConfig, prompts: int, tokens: int) -> Blocks:
    """Answer held-out chats with whole blocks verified."""
    sampling = replace(config.sampling, max_tokens=tokens, min_tokens=0, stop=(), seed=None)
    chats = held_out_chats(prompts)
    requests = [
        GenerateRequest(id=f"chat-{n}", prompt=prompt, system=system, mode="static", sampling=sampling)
        for n, (prompt, system) in enumerate(chats)
    ]
    number_of = {request.id: n for n, request in enumerate(requests)}
    blocks, ended, kind = Blocks(), 0, sampling_kind(sampling)

    def take(event: dict[str, Any]) -> None:
        nonlocal ended
        if event["event"] == "step":
            blocks.add_step(event, number_of[event["id"]], kind)
        elif event["event"] == "end":
            ended += 1
            if ended % _NOTE_EVERY == 0 or ended == prompts:
                note(f"answered {ended} of {prompts} held-out chats, {len(blocks)} blocks verified")

    results = run.answer(requests, take)
    failed = next((result["error"] for result in results if result["finish_reason"] == "error"), None)
    if failed is not None:
        raise error_from_name("SparkchatError", failed)
    return blocks


def _fit(blocks: Blocks, config: RunConfig, files: Sequence[Path] | None) -> dict[str, Any]:
    """Fit in a process of its own: this one never imports torch."""
    s = config.sampling
    about = {
        "source": [file.name for file in files] if files else "held-out chats",
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
    }
    asked = {"blocks": blocks.to_json(), "spec": config.spec.to_json(), "about": about}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FIT],
        input=json.dumps(asked, allow_nan=False).encode(),
        capture_output=True,
        env=child_environment(),
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word of it"]
        raise EngineCrash(f"the fit ended with code {done.returncode}: {last[0][:300]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise error_from_name(answer["error"], answer["message"])
    return {**about, **answer}


def _show(report: dict[str, Any]) -> None:
    if "cost" in report:
        _show_cost(report["cost"])
    if "sts" in report:
        _show_sts(report["sts"])


def _show_cost(cost: dict[str, Any]) -> None:
    data("Milliseconds of a step by requests and verified rows (all requests together)")
    rows = [
        [
            str(batch["requests"]),
            "-" if batch["plain_ms"] is None else f"{batch['plain_ms']:.2f}",
            "  ".join(f"{n}: {ms:.2f}" for n, ms in zip(batch["rows"], batch["step_ms"], strict=True)),
        ]
        for batch in cost["batches"]
    ]
    table(["REQUESTS", "NO DRAFTING", "ROWS: MS"], rows)
    by_requests = [(batch["requests"], batch["context"]) for batch in cost["batches"] if batch["context"] is not None]
    if by_requests:
        for requests, extra in by_requests:
            data(f"1000 more cached tokens, {requests} together: {_of_context(extra)}")
    elif cost["context"] is not None:
        data(f"1000 more cached tokens: {_of_context(cost['context'])}")
    if cost["file"]:
        data(f"kept in {cost['file']}")


def _of_context(extra: dict[str, float]) -> str:
    by_row = 1000 * extra["ms_per_token_row"]
    return f"{1000 * extra['ms_per_token'] + by_row:.2f} ms, and {by_row:.2f} ms for each further row of a request"


def _show_sts(sts: dict[str, Any]) -> None:
    of = "each judged by a fit to other answers" if sts["num_held_out"] else "judged by a fit to the same one answer"
    data(f"Confidence of drafts 1..k all being accepted, {sts['num_blocks']} blocks ({of})")
    rows = [
        [
            str(k),
            str(before["num_samples"]),
            f"{temperature:.3f}",
            f"{_percent(before['ece'])} -> {_percent(after['ece'])}",
            _percent(chance),
            f"{_number(before['auc'])} -> {_number(after['auc'])}",
        ]
        for k, (temperature, before, after, chance) in enumerate(
            zip(sts["temperatures"], sts["before"], sts["after"], sts["chance"], strict=True), start=1
        )
    ]
    table(["k", "BLOCKS", "TEMPERATURE", "CALIBRATION ERROR", "CHANCE", "AUC"], rows)
    data("In a profile: [speculation] temperatures = [" + ", ".join(f"{t:.4g}" for t in sts["temperatures"]) + "]")
    for kind, found in sts["by_kind"].items():
        _show_kind(kind, found)
    if sts["file"]:
        data(f"kept in {sts['file']}")


def _show_kind(kind: str, found: dict[str, Any]) -> None:
    data(f"By kind of sampling: {kind}, {found['num_blocks']} blocks; a temperature and a shift of the logit")
    columns = (found[name] for name in ("temperatures", "shifts", "before", "after", "chance"))
    rows = [
        [
            str(k),
            f"{t:.3f}",
            f"{shift:+.3f}",
            f"{_percent(before['ece'])} -> {_percent(after['ece'])}",
            _percent(chance),
        ]
        for k, (t, shift, before, after, chance) in enumerate(zip(*columns, strict=True), start=1)
    ]
    table(["k", "TEMPERATURE", "SHIFT", "CALIBRATION ERROR", "CHANCE"], rows)
    lists = [", ".join(f"{value:.4g}" for value in found[name]) for name in ("temperatures", "shifts")]
    data(f"In a profile: [speculation.calibration.{kind}] temperatures = [{lists[0]}] shifts = [{lists[1]}]")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
