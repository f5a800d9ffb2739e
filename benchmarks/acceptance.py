"""Acceptance and confidence of a drafter on published evaluation prompts, by DeepSpec's definitions.

    python benchmarks/acceptance.py MODEL --prompts gsm8k=gsm8k.jsonl [--prompts mt-bench=question.jsonl ...]
        [--chats N] [--drafter DIR] [--count N] [--tokens N] [--temperature F] [--top-p F] [--repetition F]
        [--without-markov] [--together N] [--dtype NAME] [--blocks FILE.npz] [--out FILE.json]

Prompt files are JSON lines (or those gzipped), a prompt a line: ``turns`` (DeepSpec's eval_datasets, FastChat's
question.jsonl: the first turn counts), ``question`` (GSM8K's test.jsonl) or ``prompt`` (HumanEval.jsonl.gz). With
--chats the first N different held-out chats are a further set, ``chats``, some with a system text.

Every block is verified whole. As in DeepSpec: the token from the prompt counts nowhere, an answer ends behind an
accepted end token, a block then counts up to that token, and lengths include the token behind the accepted drafts. The
threshold sweep is replayed on the recorded blocks: the leading drafts whose raw confidence reaches the threshold would
have been verified. Intervals are 95 % bootstraps over prompts.

Calibration error is told raw and with the correction that the profile has for this kind of sampling. Of so few blocks
even perfect confidences show an error; ``chance`` is its mean, and the interval is the bootstrap's, turned about the
measured value (resampling adds the same noise once more).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from sparkchat.bench.chats import Chat, held_out_chats
from sparkchat.catalog import load_profile
from sparkchat.engine.calibration import PositionMetrics, corrected_survival, measure
from sparkchat.engine.engine import Engine
from sparkchat.params import Correction, GenerateRequest, LoadSpec, SamplingParams
from sparkchat.paths import user_paths
from sparkchat.resolve import corrections_of, resolve_options
from sparkchat.sampling_kind import sampling_kind

SHIPPED = Path("sparkchat/drafters/smollm2-135m")
SEED = 980406
"""Prompt n is answered with SEED + n."""
THRESHOLDS = tuple(n / 10 for n in range(10))
RESAMPLES = 400
PERFECT_DRAWS = 50


@dataclass(frozen=True)
class Rounds:
    """N verified blocks of up to g drafts."""

    logits: np.ndarray
    """[N, g] raw confidences"""
    accepted: np.ndarray
    """[N] leading drafts accepted"""
    judged: np.ndarray
    """[N] drafts that counted: g, or fewer where an accepted draft ended the answer"""
    length: np.ndarray
    """[N] tokens of the round: one more than accepted, except behind an accepted end token"""
    prompt: np.ndarray
    """[N] which prompt"""

    def of(self, prompts: np.ndarray) -> Rounds:
        """The rounds of these prompts, a prompt named twice counting twice."""
        where = [np.flatnonzero(self.prompt == number) for number in prompts]
        chosen = np.concatenate(where) if where else np.zeros(0, dtype=int)
        return Rounds(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def main() -> None:
    options = parse_options()
    report: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}, "sets": {}, **where_it_ran()}
    arrays: dict[str, np.ndarray] = {}
    with drafter_folder(options.drafter, options.without_markov) as drafter:
        engine = Engine(replace(spec_of(options.model, drafter, options.together), dtype=options.dtype))
        report["engine"] = engine.info
        for name, prompts in sets_of(options):
            rounds = collect(engine, prompts, sampling_of(options), options.together)
            report["sets"][name] = figures(rounds, engine.pair.calibration.get(sampling_kind(sampling_of(options))))
            arrays |= {f"{name}.{part}": getattr(rounds, part) for part in Rounds.__dataclass_fields__}
            print(told(name, report["sets"][name]), flush=True)
    if options.blocks:
        np.savez_compressed(options.blocks, **arrays)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=named_file, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--chats", type=int, default=0)
    parser.add_argument("--drafter", type=Path, default=SHIPPED)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition", type=float, default=1.0)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--without-markov", action="store_true")
    parser.add_argument("--blocks", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.prompts and not options.chats:
        parser.error("there is nothing to answer; give --prompts NAME=FILE or --chats N")
    return options


def named_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=FILE with a file that is there")
    return name, Path(path)


def read_prompts(path: Path) -> list[str]:
    """The first turn of every line. Raises ValueError naming the line that has none."""
    prompts = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            turns = row.get("turns") or [row.get("question") or row.get("prompt")]
            if not isinstance(turns[0], str):
                raise ValueError(f"{path}, line {number}: no turns, question or prompt")
            prompts.append(turns[0])
    return prompts


def sets_of(options: argparse.Namespace) -> Iterator[tuple[str, list[Chat]]]:
    for name, path in options.prompts:
        yield name, [(prompt, None) for prompt in read_prompts(path)[: options.count]]
    if options.chats:
        drawn = dict.fromkeys(held_out_chats(20 * options.chats, seed=11))
        yield "chats", list(itertools.islice(drawn, options.chats))


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        repetition_penalty=options.repetition,
        max_tokens=options.tokens,
    )


def spec_of(model: Path, drafter: Path, together: int) -> LoadSpec:
    profile = load_profile("smollm2-135m", user_paths())
    assert profile is not None
    return LoadSpec(
        name=model.stem,
        model_path=str(model),
        drafter_path=str(drafter),
        device="cuda" if torch.cuda.is_available() else "cpu",
        mode="static",
        context=2048,
        concurrency=together,
        chat_template=profile.get("model.chat_template") if model.stem.startswith("SmolLM2-135M") else None,
        threads=torch.get_num_threads(),
        **(corrections_of(resolve_options(profile, {}, {})) if drafter.resolve() == SHIPPED.resolve() else {}),
    )


@contextmanager
def drafter_folder(folder: Path, without_markov: bool) -> Iterator[Path]:
    """The drafter as it is, or a copy whose sequential head adds nothing (its second matrix is zero)."""
    if not without_markov:
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        tensors = load_file(folder / "model.safetensors")
        tensors["markov_head.markov_w2.weight"].zero_()
        save_file(tensors, f"{copy}/model.safetensors", metadata={"format": "pt"})
        (Path(copy) / "config.json").write_text((folder / "config.json").read_text())
        yield Path(copy)


def collect(engine: Engine, prompts: Sequence[Chat], sampling: SamplingParams, together: int, first: int = 0) -> Rounds:
    """Answer ``prompts``, ``together`` at a time, every block verified whole; ``first``: number of the first one."""
    found: list[tuple[list[float], int, int, int, int]] = []
    for start in range(0, len(prompts), together):
        steps: dict[str, list[dict[str, Any]]] = {}
        ends: dict[str, str] = {}
        for number, (prompt, system) in enumerate(prompts[start : start + together], first + start):
            request = GenerateRequest(id=str(number), prompt=prompt, system=system, mode="static", sampling=sampling)
            engine.submit(request.with_sampling(seed=SEED + number))
        while engine.has_work:
            for event in engine.step():
                if event["event"] == "step":
                    steps.setdefault(event["id"], []).append(event)
                elif event["event"] == "end":
                    ends[event["id"]] = event["result"]["finish_reason"]
        for name, rounds in steps.items():
            for place, step in enumerate(rounds):
                row = round_of(step, place == len(rounds) - 1 and ends[name] == "length")
                if row is not None:
                    found.append((*row, int(name)))
    columns = list(zip(*found, strict=True)) if found else [[]] * 5
    return Rounds(*(np.array(column) for column in columns))


def round_of(step: dict[str, Any], is_cut: bool) -> tuple[list[float], int, int, int] | None:
    """(raw confidences, accepted, judged, length) of a step event; None for one that the token limit may have cut."""
    correct, committed = step["correct_drafts"], len(step["committed_ids"])
    if is_cut:
        return None
    if committed > correct:
        return step["confidence_logit"], correct, len(step["draft_ids"]), correct + 1
    # The answer ended here: at an accepted draft, or at the token behind the accepted ones; neither is delivered.
    if step["reject"] is None and correct < step["verify_len"]:
        return step["confidence_logit"], correct + 1, correct + 1, correct + 1
    return step["confidence_logit"], correct, len(step["draft_ids"]), correct + 1


def figures(rounds: Rounds, correction: Correction | None = None) -> dict[str, Any]:
    """All figures of one set; JSON has no NaN, so what was not measured is null."""
    prompts = np.unique(rounds.prompt)
    draw = np.random.default_rng(7)
    again = [rounds.of(draw.choice(prompts, len(prompts))) for _ in range(RESAMPLES)]
    alive = by_position(rounds)
    return {
        "prompts": len(prompts),
        "rounds": len(rounds.accepted),
        "acceptance_length": float(rounds.length.mean()),
        "acceptance_length_interval": interval([float(one.length.mean()) for one in again]),
        "verify_rate": float(rounds.length.sum() / (rounds.judged.sum() + len(rounds.judged))),
        "accept_rate": alive,
        "conditional": [now / past if past else None for now, past in zip(alive, [1.0, *alive[:-1]], strict=True)],
        "thresholds": sweep(rounds),
        "calibration": {
            "raw": calibration(rounds, None),
            "corrected": None if correction is None else calibration(rounds, correction),
        },
    }


def calibration(rounds: Rounds, correction: Correction | None) -> list[dict[str, float | None]]:
    """By position: error with its interval, what chance alone shows, AUC and Brier score."""
    draw, prompts = np.random.default_rng(9), np.unique(rounds.prompt)
    found = metrics_of(rounds, correction)
    again = np.array(
        [
            [m.ece or 0.0 for m in metrics_of(rounds.of(draw.choice(prompts, len(prompts))), correction)]
            for _ in range(RESAMPLES // 4)
        ]
    )
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    alive = corrected(rounds, correction)
    judged, chance = torch.from_numpy(rounds.judged), np.zeros(alive.shape[1])
    for _ in range(PERFECT_DRAWS):
        uniform = torch.from_numpy(draw.random((len(alive), 1)))
        drawn = torch.minimum((uniform < alive).sum(dim=1), judged)
        chance += [(m.ece or 0.0) / PERFECT_DRAWS for m in measure(alive, drawn, judged)]
    return [
        {
            "ece": m.ece,
            "low": max(0.0, 2 * m.ece - float(high[k])),
            "high": max(0.0, 2 * m.ece - float(low[k])),
            "chance": float(chance[k]),
            "auc": m.auc,
            "brier": m.brier,
        }
        if m.ece is not None
        else {"ece": None}
        for k, m in enumerate(found)
    ]


def corrected(rounds: Rounds, correction: Correction | None) -> torch.Tensor:
    logits = torch.from_numpy(rounds.logits).double()
    return corrected_survival(logits, [correction] * len(logits))


def metrics_of(rounds: Rounds, correction: Correction | None) -> tuple[PositionMetrics, ...]:
    alive = corrected(rounds, correction)
    return measure(alive, torch.from_numpy(rounds.accepted), torch.from_numpy(rounds.judged))


def by_position(rounds: Rounds) -> list[float]:
    """Share of the blocks that drafted k whose first k drafts were all accepted, k = 1..g."""
    return [
        float((rounds.accepted > k)[rounds.judged > k].mean()) if bool((rounds.judged > k).any()) else 0.0
        for k in range(rounds.logits.shape[1])
    ]


def sweep(rounds: Rounds) -> list[dict[str, float]]:
    """Tokens kept, rows verified and the share of rows that became tokens, by threshold on the raw confidence."""
    confidence = 1.0 / (1.0 + np.exp(-rounds.logits))
    found = []
    for threshold in THRESHOLDS:
        lens = np.minimum((confidence >= threshold).cumprod(axis=1).sum(axis=1), rounds.judged)
        is_whole = lens >= rounds.judged
        kept = np.where(is_whole, rounds.length, np.minimum(rounds.accepted, lens) + 1)
        # Behind an accepted end token there is no further row.
        found.append(
            {
                "threshold": threshold,
                "accepted": float(kept.mean()),
                "verified": float((lens + 1).mean()),
                "rate": float(kept.sum() / (lens + 1).sum()),
            }
        )
    return found


def interval(values: Sequence[float]) -> list[float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return [float(low), float(high)]


def told(name: str, found: dict[str, Any]) -> str:
    low, high = found["acceptance_length_interval"]
    conditional = " ".join("-" if c is None else f"{c:.3f}" for c in found["conditional"])
    return (
        f"{name}: acceptance length {found['acceptance_length']:.2f} ({low:.2f} to {high:.2f}), verify rate "
        f"{found['verify_rate']:.3f}, {found['rounds']} rounds; given those before: {conditional}"
    )


def where_it_ran() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "machine": platform.machine(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
