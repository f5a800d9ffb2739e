"""Predicted against measured step times, by requests, verified rows and context.

    python benchmarks/step_times.py MODEL [--drafter DIR] [--block-size N] [--threads N] [--quick]
        [--together 1,8,16,32] [--contexts 64,512] [--most-context N] [--tokens N] [--rounds N]
        [--temperature F] [--top-p F] [--repetition F] [--out FILE.json]

The table is measured first, as ``sparkchat tune --cost`` does it, or with --quick as a first start does. Then requests
answer held-out chats behind prompts of every length in --contexts, in the modes off, static and compact,
and every step is set beside what the table says of its requests, those of them that drafted, its rows and its
cached tokens. Prompts are kept between answers, so that most of the time goes into steps. A cell is the median over its
steps; those that are further off than 10 % are marked. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from acceptance import SHIPPED, spec_of, where_it_ran

from sparkchat.bench.chats import held_out_chats
from sparkchat.engine.cost_probe import measure, measured_cost
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.engine import Engine
from sparkchat.params import GenerateRequest, SamplingParams

ARMS: tuple[tuple[str, Any, int | None], ...] = (
    ("off", "off", None),
    ("static", "static", None),
    ("compact", "compact", None),
)
"""(name, mode, drafts a step where they are not the run's own)"""
BAR = 0.10
FIRST_STEPS = 1
"""Of each answer, that count nowhere: the step behind a prompt finds cold caches."""
TUNE_SECONDS = 5.0
REPEATS = 24


@dataclass(frozen=True)
class Step:
    requests: int
    drafting: int
    rows: int
    context: int
    """Cached tokens of all requests."""
    measured_ms: float
    is_filtered: bool


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    most = max(options.together)
    spec = replace(
        spec_of(options.model, options.drafter, most),
        threads=options.threads,
        block_size=options.block_size,
        context=max(options.contexts) + options.tokens + 64,
        cache_dir=None,
    )
    engine = Engine(spec)
    table = CostLookup(table_for(engine, options.quick, most))
    engine.pair.cost = table
    for line in table_lines(table):
        print(line, flush=True)
    steps: list[tuple[str, int, Step]] = []
    for together in options.together:
        for tokens in options.contexts:
            if tokens * together > options.most_context and tokens > min(options.contexts):
                continue
            prompts = prompts_of(engine, together, tokens)
            for _ in range(options.rounds):
                for name, mode, block in ARMS:
                    found = list(answered(engine, prompts, mode, block, options))
                    steps += [(name, tokens, step) for step in found]
    cells = cells_of(steps, table)
    for line in told(cells):
        print(line)
    if options.out:
        report = {"settings": {k: str(v) for k, v in vars(options).items()}, **where_it_ran(), "cells": cells}
        options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def table_for(engine: Engine, is_quick: bool, most: int) -> Any:
    """As ``tune`` measures it, or as a start does that finds no table."""
    pair, spec = engine.pair, engine.spec
    if is_quick:
        return measured_cost(spec, pair, lambda event: None).table
    counts = [2**n for n in range(most.bit_length()) if 2**n < most] + [most]
    if pair.measure_steps is not None:
        return pair.measure_steps(counts)
    block = spec.block_size or pair.block_size
    return measure(pair, counts, block, TUNE_SECONDS * (len(counts) + 1), REPEATS)


def prompts_of(engine: Engine, together: int, tokens: int) -> list[tuple[int, ...]]:
    """Token ids of held-out questions, each behind others until it is ``tokens`` long; without a tokenizer, any ids."""
    if engine.text.tokenizer is None:
        vocab = engine.pair.target.config.vocab_size
        return [tuple((7919 * i + 104729 * n + 13) % vocab for i in range(tokens)) for n in range(together)]
    found: list[tuple[int, ...]] = []
    chats = held_out_chats(together * 64, seed=tokens)
    for number in range(together):
        ids: list[int] = []
        for prompt, _ in chats[number::together]:
            ids = [*engine.text.tokenizer.encode(f"{prompt}\n"), *ids] if len(ids) < tokens else ids
        found.append(tuple(ids[-tokens:]))
    return found


def answered(
    engine: Engine, prompts: Sequence[tuple[int, ...]], mode: Any, block: int | None, options: argparse.Namespace
) -> Iterator[Step]:
    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        repetition_penalty=options.repetition,
        max_tokens=options.tokens,
        ignore_eos=True,
    )
    for number, ids in enumerate(prompts):
        engine.submit(
            GenerateRequest(
                id=str(number), prompt_ids=ids, mode=mode, block_size=block, sampling=sampling, session=f"s{number}"
            )
        )
    seen = 0
    while engine.has_work:
        events = [event for event in engine.step() if event["event"] == "step"]
        if len(events) < len(prompts):
            continue  # some prompts are not run yet, or some answers are over
        seen += 1
        if seen > FIRST_STEPS:
            yield Step(
                len(events),
                sum(bool(event["draft_ids"]) for event in events),
                sum(event["rows"] for event in events),
                sum(event["prefix_len"] for event in events),
                events[0]["step_ms"],
                options.temperature > 0.0 and options.top_p < 1.0,
            )


def predicted(table: CostLookup, step: Step) -> float:
    costs = table.at(step.requests, step.context, step.drafting, is_filtered=step.is_filtered)
    if step.drafting or costs.plain_ms is None:
        return costs.step_ms(step.rows)
    return costs.plain_ms


def cells_of(steps: Sequence[tuple[str, int, Step]], table: CostLookup) -> list[dict[str, Any]]:
    """By mode, requests, length of the prompts, and rows of a request to the half."""
    groups: dict[tuple[int, int, str, float], list[Step]] = {}
    for name, tokens, step in steps:
        groups.setdefault((step.requests, tokens, name, round(2 * step.rows / step.requests) / 2), []).append(step)
    cells = []
    for (requests, tokens, name, rows), found in sorted(groups.items()):
        cells.append(
            {
                "requests": requests,
                "prompt_tokens": tokens,
                "mode": name,
                "rows_per_request": rows,
                "steps": len(found),
                "drafting": statistics.mean(step.drafting for step in found),
                "context": statistics.mean(step.context for step in found),
                "predicted_ms": statistics.median(predicted(table, step) for step in found),
                "measured_ms": statistics.median(step.measured_ms for step in found),
                "ratio": statistics.median(predicted(table, step) / step.measured_ms for step in found),
            }
        )
    return cells


def table_lines(table: CostLookup) -> list[str]:
    lines = [f"context: {table.table.context}"]
    for batch in table.table.batches:
        times = " ".join(f"{n}: {ms:.2f}" for n, ms in zip(batch.rows, batch.step_ms, strict=True))
        lines.append(f"{batch.requests} requests: plain {batch.plain_ms:.2f} ms; by rows {times}")
    return lines


def told(cells: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["requests  prompt  mode      rows/request  steps  context  predicted  measured  predicted/measured"]
    for cell in cells:
        mark = "" if abs(cell["ratio"] - 1.0) <= BAR else "  *"
        lines.append(
            f"{cell['requests']:8} {cell['prompt_tokens']:7}  {cell['mode']:9} {cell['rows_per_request']:11.1f} "
            f"{cell['steps']:6} {cell['context']:8.0f} {cell['predicted_ms']:10.2f} {cell['measured_ms']:9.2f} "
            f"{cell['ratio']:10.3f}{mark}"
        )
    # A cell of one or two steps says more of the machine's moment than of the table.
    sure = [cell for cell in cells if cell["steps"] >= 5]
    within = [cell for cell in sure if abs(cell["ratio"] - 1.0) <= BAR]
    lines.append(f"{len(within)} of {len(sure)} cells with 5 steps or more are within {BAR:.0%}")
    for requests in sorted({cell["requests"] for cell in cells}):
        found = [cell for cell in sure if cell["requests"] == requests]
        if found:
            low, high = (pick(found, key=lambda cell: cell["ratio"])["ratio"] for pick in (min, max))
            lines.append(f"{requests} together: from {low:.3f} to {high:.3f}")
    return lines


def parse_options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafter", type=Path, default=SHIPPED)
    parser.add_argument("--block-size", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="the table of a first start instead of a tuned one")
    parser.add_argument("--together", type=numbers, default=[1, 8, 16, 32])
    parser.add_argument("--contexts", type=numbers, default=[64, 512])
    parser.add_argument("--most-context", type=int, default=8192, help="tokens of all prompts of a cell together")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repetition", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
