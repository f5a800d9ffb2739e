"""Runs requests, written as the batch command reads them, in one engine of this process or through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fixtures.commands import run_forked

if TYPE_CHECKING:
    from sparkchat.engine.engine import Engine
    from sparkchat.params import CostTable, GenerateRequest

ROOT = Path(__file__).parents[2]
MODES = ("static", "compact", "cap-accept")
Record = dict[str, Any]


def to_request(line: Record, number: int) -> GenerateRequest:
    """Build a request from one batch line: sampling options lie flat beside the rest."""
    from sparkchat.params import GenerateRequest, SamplingParams

    sampling_names = {f.name for f in fields(SamplingParams)}
    sampling = {k: v for k, v in line.items() if k in sampling_names}
    rest = {k: v for k, v in line.items() if k not in sampling_names}
    for name in ("stop", "logit_bias"):
        if name in sampling:
            sampling[name] = tuple(tuple(v) if isinstance(v, list) else v for v in sampling[name])
    for name in ("prompt_ids", "messages"):
        if name in rest:
            rest[name] = tuple(rest[name])
    return GenerateRequest(**{"id": f"r{number}", **rest}, sampling=SamplingParams(**sampling))


@dataclass
class Outcome:
    """What one request gave: its result, its events in order, and its thinking."""

    result: Record
    events: list[Record]

    def of_kind(self, kind: str) -> list[Record]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def ids(self) -> list[int]:
        return self.result["token_ids"]

    @property
    def steps(self) -> list[Record]:
        return self.of_kind("step")

    @property
    def thinking(self) -> str:
        return self.of_kind("end")[-1]["thinking"]

    def streamed(self, channel: str = "answer") -> str:
        return "".join(e["text"] for e in self.of_kind("delta") if e["channel"] == channel)


class Runner:
    """One engine, used for many requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, lines: Iterable[Record]) -> list[Record]:
        """Results in order; all requests share the batch."""
        return [outcome.result for outcome in self.watch(lines)]

    def ids(self, lines: Iterable[Record]) -> list[list[int]]:
        """Token ids in order; a request that ended in an error fails the test."""
        results = self.run(lines)
        assert [r["error"] for r in results] == [None] * len(results)
        return [r["token_ids"] for r in results]

    def watch(self, lines: Iterable[Record]) -> list[Outcome]:
        """Results and events in order."""
        requests = [to_request(line, n) for n, line in enumerate(lines)]
        assert len({r.id for r in requests}) == len(requests)
        events: list[Record] = []
        for request in requests:
            events += self.engine.submit(request)
        while self.engine.has_work:
            events += self.engine.step()
        by_id: dict[str, list[Record]] = {r.id: [] for r in requests}
        for event in events:
            if event.get("id") in by_id:
                by_id[event["id"]].append(event)
        return [Outcome(by_id[r.id][-1]["result"], by_id[r.id]) for r in requests]


def open_runner(
    target: Path,
    drafter: Path | None = None,
    *,
    concurrency: int = 8,
    context: int = 640,
    cost: CostTable | None = None,
    **spec: Any,
) -> Runner:
    """Load a pair in this process. Without ``cost`` a table is given under which compact lengths vary."""
    from sparkchat.engine.engine import Engine
    from sparkchat.params import LoadSpec

    if cost is None and drafter is not None:
        cost = varied_cost()
    loaded = LoadSpec(
        name="fixture",
        model_path=str(target),
        drafter_path=None if drafter is None else str(drafter),
        device="cpu",
        context=context,
        concurrency=concurrency,
        cost_table=cost,
        threads=1,
        **spec,
    )
    return Runner(Engine(loaded))


def varied_cost() -> CostTable:
    """A step costs a fixed part plus a part for each row, with a cliff: plans of every length come up."""
    from sparkchat.params import CostTable

    rows = tuple(range(1, 65))
    return CostTable(rows, tuple(1.0 + 0.12 * r + (0.4 if r > 20 else 0.0) for r in rows))


@dataclass(frozen=True)
class Finished:
    """A finished process."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[Record]:
        return [parse_strict(line) for line in self.out.splitlines()]


def sparkchat(*args: str | Path, stdin: str | bytes = "", timeout: float = 120, afresh: bool = False) -> Finished:
    """Run ``python -m sparkchat ARGS`` to its end: in a process that is forked with all imported, or ``afresh``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = stdin.encode() if isinstance(stdin, str) else stdin
    words = [str(arg) for arg in args]
    if not afresh:
        code, out, err = run_forked(words, given, environment, timeout)
        return Finished(code, out.decode(), err.decode())
    command = [sys.executable, "-m", "sparkchat", *words]
    done = subprocess.run(command, input=given, capture_output=True, timeout=timeout, env=environment, check=False)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def batch(model: str | Path, lines: Iterable[Record | str], *args: str | Path, afresh: bool = False) -> Finished:
    """Run ``sparkchat batch`` over these lines; a line that is a string is sent as it is."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return sparkchat("batch", model, *args, stdin=text, afresh=afresh)


def parse_strict(text: str) -> Any:
    """Read JSON and refuse NaN and Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON: {text[:200]}")

    return json.loads(text, parse_constant=refuse)


def random_prompts(count: int, longest: int, *, low: int = 300, high: int = 500, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to ``longest`` ids; the first is the shortest, the last the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + (longest - 1) * n // max(1, count - 1) for n in range(count)]
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def first_difference(target: Path, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]) -> str:
    """Say where two answers part and how close the choice was: near 0 points to rounding, else to lost state."""
    from transformers import AutoModelForCausalLM

    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        top = model(torch.tensor([[*prompt, *plain[:at]]])).logits[0, -1].topk(2)
    margin = float(top.values[0] - top.values[1])
    return (
        f"prompt of {len(prompt)}, token {at} of {len(ours)}/{len(plain)}: "
        f"{ours[at : at + 3]} for {plain[at : at + 3]}; "
        f"transformers says {int(top.indices[0])} by {margin:.2e}"
    )


def assert_same(
    target: Path, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]
) -> None:
    """Fail with the first difference of the first answer that differs."""
    assert len(ours) == len(plain)
    for prompt, a, b in zip(prompts, ours, plain, strict=True):
        if list(a) != list(b):
            raise AssertionError(first_difference(target, prompt, a, b))


def chi_square_p(counts: Sequence[float], law: Sequence[float]) -> float:
    """Return the p-value of Pearson's test; cells of zero probability must be empty."""
    total = sum(counts)
    cells = [(c, total * p) for c, p in zip(counts, law, strict=True)]
    assert all(c == 0 for c, expected in cells if expected == 0), f"impossible tokens came up: {counts} for {law}"
    kept = [(c, e) for c, e in cells if e > 0]
    if len(kept) < 2:
        return 1.0
    statistic = sum((c - e) ** 2 / e for c, e in kept)
    half_degrees = torch.tensor((len(kept) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
