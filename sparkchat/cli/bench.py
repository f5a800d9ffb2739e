"""``sparkchat bench``: every way to decode beside plain decoding, on this machine and with this pair."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkchat import environment, strict_json
from sparkchat.bench.arms import Arm, chosen_arms, possible_arms
from sparkchat.bench.bars import bars_of, told
from sparkchat.bench.chats import held_out_chats, meaningless_chats
from sparkchat.bench.engine_runs import EngineRun, engine_run
from sparkchat.bench.equality import Equality, compare
from sparkchat.bench.measuring import Tally, answer, measure, requests_of
from sparkchat.bench.plot import throughput_svg
from sparkchat.bench.png import write_png
from sparkchat.bench.report import HEADER, SCHEMA, plot_lines, rows_of, table_rows
from sparkchat.catalog import inner_drafter_kind
from sparkchat.cli import arguments as a
from sparkchat.cli.output import as_json, data, note, table
from sparkchat.cli.prepare import prepare
from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError, UsageError

ON_CPU, ON_GPU = (1, 4), (1, 8, 16, 32, 64, 128, 256)
_ROOM = 512
"""Tokens of context for the prompt, where requests share the memory."""

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
    report, differing = _measured(config, counts, names, prompts, tokens)
    _tell(report, differing, json_)
    if out is not None:
        _write(report, out)
    if differing:
        first = next(iter(differing))
        raise SparkchatError(
            f"no speed-up is told of {', '.join(differing)}: greedy answers differ from plain decoding "
            f"({first}: {differing[first].difference})"
        )
    return 0


def _counts(text: str | None, config: RunConfig) -> list[int]:
    if text is None:
        on_gpu = config.spec.device != "cpu" and environment.torch_has_cuda() and environment.gpus()
        return list(ON_GPU if on_gpu else ON_CPU)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and 1 <= int(part) <= 4096 for part in parts):
        raise UsageError(f"--concurrency {text!r} is not possible; give numbers of requests with commas, e.g. 1,8,16")
    return sorted({int(part) for part in parts})


def _measured(
    config: RunConfig, counts: list[int], names: list[str] | None, prompts: int, tokens: int
) -> tuple[dict[str, Any], dict[str, Equality]]:
    say = note if config.verbose else lambda text: None
    with engine_run(config.spec, say) as run:
        arms = chosen_arms(names, possible_arms(_kind(config), run.info["heads"]["confidence"], run.info["block_size"]))
        most = max(prompts, counts[-1])
        has_text = run.info["chat_template"] != "none"  # random weights come without a tokenizer
        chats = held_out_chats(most) if has_text else meaningless_chats(most, run.info["vocab_size"])
        sampling = replace(config.sampling, max_tokens=tokens, min_tokens=0, stop=(), ignore_eos=True)
        is_comparable = config.spec.simulate_acceptance is None
        for arm in arms:  # the first answers load, compile and measure what later ones find ready
            answer(run, arm, requests_of(arm, chats[:1], replace(sampling, max_tokens=8)), lambda event: None)
        equality = compare(run, arms, chats, counts[-1], tokens) if is_comparable and len(arms) > 1 else {}
        tallies: dict[int, dict[str, Tally]] = {}
        for together in counts:
            number = math.ceil(max(prompts, together) / together) * together
            group = [chats[n % len(chats)] for n in range(number)]
            tallies[together] = measure(run, arms, group, together, sampling, say)
        differing = {name: found for name, found in equality.items() if not found.is_equal}
        return _report(config, run, arms, tallies, equality, tokens), differing


def _kind(config: RunConfig) -> str | None:
    """dspark or mtp, or None without a drafter."""
    path = config.spec.drafter_path
    if path is None:
        return None
    return inner_drafter_kind(Path(path)) or "dspark"


def _report(
    config: RunConfig,
    run: EngineRun,
    arms: list[Arm],
    tallies: dict[int, dict[str, Tally]],
    equality: dict[str, Equality],
    tokens: int,
) -> dict[str, Any]:
    info, s = run.info, config.sampling
    return {
        "schema": SCHEMA,
        "model": info["model"],
        "drafter": info["drafter"],
        "block_size": info["block_size"],
        "device": info["device"],
        "processor": environment.processor(),
        "cores": environment.num_cores(),
        "load_average": list(os.getloadavg()),
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
            "max_tokens": tokens,
        },
        "arms": [arm.name for arm in arms],
        "equality": {name: found.to_json() for name, found in equality.items()},
        "results": rows_of(tallies, equality, info["kv_bytes_per_token"]),
        "bars": bars_of(tallies, [name for name, found in equality.items() if not found.is_equal]),
    }


def _tell(report: dict[str, Any], differing: dict[str, Equality], json_: bool) -> None:
    if json_:
        as_json(report)
        return
    what = [report["model"], report["drafter"] or "no drafter", report["device"]]
    if report["dummy_weights"]:
        what.append("random weights")
    if report["simulated"]:
        what.append(f"acceptance simulated: {report['simulated']}")
    data(", ".join(what))
    table(HEADER, table_rows(report["results"], list(differing)))
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


def _write(report: dict[str, Any], folder: Path) -> None:
    svg = throughput_svg(plot_lines(report["results"]), f"{report['model']} on {report['device']}")
    try:
        (folder / "bench.json").write_text(strict_json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (folder / "bench.svg").write_text(svg, encoding="utf-8")
    except OSError as error:
        raise SparkchatError(f"--out {folder} cannot be written ({error.strerror}); give another folder") from None
    reason = write_png(folder / "bench.svg", folder / "bench.png")
    if reason is not None:
        note(reason)
