"""Tokens per second on the CPU, all arms in one run: transformers bf16, off, static, compact.

    python benchmarks/cpu_chat.py MODEL.gguf [--drafter DIR] [--prompts N] [--tokens N] [--out FILE.json]

transformers runs the same weights dequantised to bfloat16 (reading the GGUF file itself it keeps codes packed, which
is slower); --no-transformers leaves that arm out. Set GOMP_SPINCOUNT=5000 to have threads wait as those of the program.

Every prompt goes through every arm before the next one, in rotating order, so that a slow minute of the machine hits
all arms alike; ratios are of paired sums, with a bootstrap interval over prompts. Prompts are the held-out ones of
``sparkchat.train.prompts``: no drafter was trained on their topics or wording.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from sparkchat.catalog import load_profile
from sparkchat.collector import look_at_rest, take_over
from sparkchat.engine.engine import Engine
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams
from sparkchat.paths import user_paths
from sparkchat.resolve import corrections_of, resolve_options
from sparkchat.train.prompts import prompt_books


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    prompts = held_out_prompts(options.prompts)
    sampling = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, repetition_penalty=options.repetition,
        max_tokens=options.tokens, ignore_eos=True, seed=1,
    )  # fmt: skip
    engine = Engine(spec_of(options))
    arms: dict[str, Any] = {name: EngineArm(engine, name, sampling) for name in ("off", "static", "compact")}
    if not options.no_transformers:
        arms["transformers-bf16"] = TransformersArm(options.model, engine, sampling)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.answer(prompts[0])  # warm-up, not counted
    take_over()  # as the engine's own process does
    names = list(arms)
    for number, prompt in enumerate(prompts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            look_at_rest()
            records[name].append(arms[name].answer(prompt))
        print(number + 1, {name: f"{records[name][-1]['tokens_per_second']:.1f}" for name in names}, flush=True)
    report = summarize(records, engine, options)
    print(json.dumps(report["arms"], indent=1))
    print(json.dumps(report["ratios"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafter", type=Path, default=Path("sparkchat/drafters/smollm2-135m"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--repetition", type=float, default=1.1)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def held_out_prompts(count: int) -> list[str]:
    _, book = prompt_books()
    draw = random.Random(7)
    return [book.user_prompt(draw) for _ in range(count)]


def spec_of(options: argparse.Namespace) -> LoadSpec:
    profile = load_profile("smollm2-135m", user_paths())
    assert profile is not None
    return LoadSpec(
        name="smollm2-135m",
        model_path=str(options.model),
        drafter_path=str(options.drafter),
        device="cpu",
        mode="compact",
        block_size=options.block_size,
        chat_template=profile.get("model.chat_template"),
        **corrections_of(resolve_options(profile, {}, {})),
        threads=options.threads,
    )


class EngineArm:
    """One verify mode of our engine."""

    def __init__(self, engine: Engine, mode: str, sampling: SamplingParams) -> None:
        self._engine, self._mode, self._sampling, self._count = engine, mode, sampling, 0

    def answer(self, prompt: str) -> dict[str, Any]:
        self._count += 1
        request = GenerateRequest(
            id=f"{self._mode}-{self._count}", prompt=prompt, mode=self._mode, sampling=self._sampling
        )  # type: ignore[arg-type]
        result = self._engine.generate([request])[0]
        assert result["finish_reason"] == "length", result
        return {
            "tokens": len(result["token_ids"]) - 1,
            "ms": result["timing"]["decode_ms"],
            "tokens_per_second": result["timing"]["tokens_per_second"],
            "token_ids": result["token_ids"],
            "speculation": result["speculation"],
        }


class TransformersArm:
    """``generate`` of transformers in bfloat16 on the same weights and prompt ids, as a user would call it."""

    def __init__(self, gguf: Path, engine: Engine, sampling: SamplingParams) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from sparkchat.train.weights import read_target

        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        weights = {f"model.{name}": value.to(torch.bfloat16) for name, value in read_target(gguf)[1].items()}
        missing = self._model.load_state_dict(weights, strict=False)
        assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, missing
        self._model.tie_weights()
        self._engine, self._sampling = engine, sampling

    @torch.inference_mode()
    def answer(self, prompt: str) -> dict[str, Any]:
        ids = self._engine.text.prompt_of(GenerateRequest(id="t", prompt=prompt)).token_ids
        clock = FirstTokenClock()
        s = self._sampling
        output = self._model.generate(
            torch.tensor([ids]), do_sample=True, temperature=s.temperature, top_p=s.top_p, top_k=0,
            repetition_penalty=s.repetition_penalty, max_new_tokens=s.max_tokens, min_new_tokens=s.max_tokens,
            streamer=clock,
        )  # fmt: skip
        elapsed, tokens = clock.last - clock.first, output.shape[1] - len(ids) - 1
        return {"tokens": tokens, "ms": elapsed * 1e3, "tokens_per_second": tokens / elapsed}


class FirstTokenClock:
    """A streamer that notes when the first and the last token came."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self._calls = 0

    def put(self, _: torch.Tensor) -> None:
        self._calls += 1  # the first call is the prompt
        self.last = time.perf_counter()
        if self._calls == 2:
            self.first = self.last

    def end(self) -> None:
        pass


def summarize(records: dict[str, list[dict[str, Any]]], engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    arms = {}
    for name, rows in records.items():
        arms[name] = {"tokens_per_second": rate(rows), "prompts": len(rows), "tokens": sum(r["tokens"] for r in rows)}
        if "speculation" in rows[0]:
            steps = sum(r["speculation"]["num_steps"] for r in rows)
            arms[name]["acceptance_length"] = sum(r["tokens"] for r in rows) / steps
            arms[name]["mean_verify_len"] = sum(r["speculation"]["num_verified_draft_tokens"] for r in rows) / steps
    pairs = [("compact", "off"), ("static", "off"), ("off", "transformers-bf16"), ("compact", "transformers-bf16")]
    return {
        "arms": arms,
        "ratios": {f"{a}/{b}": ratio(records[a], records[b]) for a, b in pairs if a in records and b in records},
        # Of files their names: a report says nothing of the machine's folders.
        "settings": {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items()},
        "engine": engine.info,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform()},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "load_average": os.getloadavg(),
    }


def rate(rows: list[dict[str, Any]]) -> float:
    return 1e3 * sum(r["tokens"] for r in rows) / sum(r["ms"] for r in rows)


def ratio(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, float]:
    """Ratio of speeds over the same prompts, with a 95 % bootstrap interval over prompts."""
    draw = random.Random(11)
    values = []
    for _ in range(2000):
        chosen = [draw.randrange(len(a)) for _ in a]
        values.append(rate([a[i] for i in chosen]) / rate([b[i] for i in chosen]))
    values.sort()
    return {"ratio": rate(a) / rate(b), "low": values[50], "high": values[1949]}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
