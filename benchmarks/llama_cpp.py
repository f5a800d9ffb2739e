"""llama.cpp beside our modes on a CPU: same target file, same prompts, same sampling, arms in turns.

    python benchmarks/llama_cpp.py LLAMA_SERVER MODEL.gguf [--drafter-gguf FILE] [--prompts N] [--tokens N]
        [--temperature F] [--block-size N] [--threads N] [--out FILE.json]

LLAMA_SERVER is llama.cpp's llama-server. With --drafter-gguf (scripts/export_drafter.py tells how to make one) further
servers draft with our drafter (--spec-type draft-dspark), one for each of --lengths. Speeds are of tokens after the
first, without the prompt pass, as each side times them itself. At temperature 0 the answers are compared with those of
our plain decoding: the sides round differently, so they part somewhere; how far they agree is told.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from cpu_chat import EngineArm, cpu_name, held_out_prompts, ratio, spec_of

from sparkchat.engine.engine import Engine
from sparkchat.params import GenerateRequest, SamplingParams

CONTEXT = 2048
_START_SECONDS = 120
Answer = dict[str, Any]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True, seed=1)
    engine = Engine(spec_of(options))
    prompts = held_out_prompts(options.prompts)
    ids = [engine.text.prompt_of(GenerateRequest(id="p", prompt=prompt)).token_ids for prompt in prompts]
    with ExitStack() as servers:
        arms: dict[str, Any] = {name: OurArm(engine, name, sampling) for name in ("off", "compact")}
        plain = servers.enter_context(server(options, []))
        arms["llama.cpp"] = LlamaArm(plain, sampling)
        if options.drafter_gguf:
            for length in options.lengths:
                drafting = ["-md", str(options.drafter_gguf), "--spec-type", "draft-dspark"]
                drafting += ["--spec-draft-n-max", str(length)]
                url = servers.enter_context(server(options, drafting))
                arms[f"llama.cpp dspark {length}"] = LlamaArm(url, sampling)
        records = answered(arms, prompts, ids)
    report = summarize(records, options, engine)
    print(json.dumps({name: report[name] for name in ("arms", "ratios", "agreement")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafter-gguf", type=Path)
    parser.add_argument("--drafter", type=Path, default=Path("sparkchat/drafters/smollm2-135m"))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--block-size", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[3], help="drafts a step of llama.cpp")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@contextmanager
def server(options: argparse.Namespace, more: Sequence[str]) -> Iterator[str]:
    """A llama-server on a free port; its address once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(options.llama_server), "-m", str(options.model), "-c", str(CONTEXT), "-np", "1"]
    command += ["-t", str(options.threads), "--host", "127.0.0.1", "--port", str(port), *more]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = process.communicate()[1].decode("utf-8", "replace").strip().splitlines()[-3:]
            raise SystemExit(f"llama-server ended with code {process.returncode}: {' / '.join(said)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"llama-server was not ready within {_START_SECONDS} s")


class OurArm(EngineArm):
    """One of our modes; tells its tokens as well."""

    def answer(self, prompt: str, _: Sequence[int]) -> Answer:
        found = super().answer(prompt)
        counts = found.pop("speculation")
        drafted, accepted = (counts[f"num_{word}_draft_tokens"] for word in ("verified", "accepted"))
        return {**found, "drafted": drafted, "accepted": accepted}


class LlamaArm:
    """A llama-server, asked with exact token ids."""

    def __init__(self, url: str, sampling: SamplingParams) -> None:
        self._url, self._sampling = url, sampling

    def answer(self, _: str, ids: Sequence[int]) -> Answer:
        s = self._sampling
        body = {
            "prompt": list(ids),
            "n_predict": s.max_tokens,
            "temperature": s.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "seed": s.seed,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            told = json.load(reply)
        times = told["timings"]
        tokens, ms = times["predicted_n"] - 1, times["predicted_ms"]
        return {
            "tokens": tokens,
            "ms": ms,
            "tokens_per_second": 1e3 * tokens / ms,
            "token_ids": told.get("tokens", []),
            "drafted": times.get("draft_n", 0),
            "accepted": times.get("draft_n_accepted", 0),
        }


def answered(arms: dict[str, Any], prompts: Sequence[str], ids: Sequence[Sequence[int]]) -> dict[str, list[Answer]]:
    """Every prompt by every arm, in rotating order; the first answer of each warms up."""
    for arm in arms.values():
        arm.answer(prompts[0], ids[0])
    records: dict[str, list[Answer]] = {name: [] for name in arms}
    names = list(arms)
    for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            records[name].append(arms[name].answer(prompt, tokens))
        print(number + 1, {name: f"{records[name][-1]['tokens_per_second']:.1f}" for name in names}, flush=True)
    return records


def summarize(records: dict[str, list[Answer]], options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    arms = {}
    for name, rows in records.items():
        tokens, drafted = sum(r["tokens"] for r in rows), sum(r["drafted"] for r in rows)
        accepted = sum(r["accepted"] for r in rows)
        arms[name] = {
            "tokens_per_second": 1e3 * tokens / sum(r["ms"] for r in rows),
            "share_of_drafts_accepted": accepted / drafted if drafted else None,
            "acceptance_length": tokens / (tokens - accepted) if drafted else None,
        }
    pairs = [(a, b) for a, b in (("compact", "off"), ("off", "llama.cpp"), ("compact", "llama.cpp")) if b in records]
    pairs += [(name, "llama.cpp") for name in records if name.startswith("llama.cpp ")]
    pairs += [("compact", name) for name in records if name.startswith("llama.cpp ")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "arms": arms,
        "ratios": {f"{a} / {b}": ratio(records[a], records[b]) for a, b in pairs},
        "agreement": agreement(records) if options.temperature == 0 else None,
        "settings": {key: str(value) for key, value in vars(options).items()},
        "engine": engine.info,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "commit": commit.stdout.strip(),
        "load_average": os.getloadavg(),
    }


def agreement(records: dict[str, list[Answer]]) -> dict[str, float]:
    """Share of our plain tokens that an arm gives before the first that differs, over all prompts."""
    plain = [row["token_ids"] for row in records["off"]]
    shares = {}
    for name, rows in records.items():
        same = 0
        for wanted, row in zip(plain, rows, strict=True):
            pairs = enumerate(zip(wanted, row["token_ids"], strict=False))
            same += next((n for n, (a, b) in pairs if a != b), min(len(wanted), len(row["token_ids"])))
        shares[name] = same / sum(map(len, plain))
    return shares


if __name__ == "__main__":
    main()
