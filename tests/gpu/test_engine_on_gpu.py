"""The engine on a CUDA device: the same tokens in every mode and on the CPU, the same law, conversations, bf16.

Needs torch, transformers, safetensors and pytest, and no other package.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import MODES, Runner, chi_square_p, random_prompts, to_request, varied_cost
from fixtures import bigram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

Record = dict[str, Any]
Open = Callable[..., Runner]
ALL_MODES = ("off", *MODES)
LOWEST_P = 1e-4


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    """Return ``opened(target, drafter, **spec)``: an engine on the GPU in fp32 unless said, loaded once."""
    from sparkchat.engine.engine import Engine
    from sparkchat.params import LoadSpec

    engines: dict[Any, Runner] = {}

    def get(target: Path, drafter: Path | None = None, **spec: Any) -> Runner:
        key = (target, drafter, *sorted(spec.items()))
        if key not in engines:
            settings = {"device": "cuda", "dtype": "float32", "context": 1024, "concurrency": 16, **spec}
            path = None if drafter is None else str(drafter)
            loaded = LoadSpec("fixture", str(target), path, cost_table=varied_cost() if drafter else None, **settings)
            engines[key] = Runner(Engine(loaded))
        return engines[key]

    yield get
    engines.clear()


def lines_of(prompts: Sequence[Sequence[int]], **options: Any) -> list[Record]:
    return [{"prompt_ids": list(prompt), "ignore_eos": True, **options} for prompt in prompts]


# Greedy: the same tokens everywhere


@pytest.mark.parametrize("kind", ["tiny", "oracle", "half", "anti", "window"])
def test_greedy_tokens_are_those_of_mode_off_and_of_the_cpu(
    kind: str, tiny_pair: Any, mix_folders: dict[str, Path], opened: Open
) -> None:
    if kind == "tiny":
        target, drafter = tiny_pair.target, tiny_pair.drafter
    else:
        target = mix_folders["window" if kind == "window" else "target"]
        drafter = mix_folders["half" if kind == "window" else kind]
    prompts = random_prompts(12, 60, seed=31)
    on_cpu = opened(target, device="cpu").ids(lines_of(prompts, mode="off", max_tokens=60))
    runner = opened(target, drafter)
    for number, mode in enumerate(ALL_MODES):
        blocks = [1 + (n + number) % 5 for n in range(len(prompts))]
        lines = [
            {**line, "block_size": block}
            for line, block in zip(lines_of(prompts, mode=mode, max_tokens=60), blocks, strict=True)
        ]
        assert runner.ids(lines) == on_cpu, mode


def test_all_modes_side_by_side(mix_folders: dict[str, Path], opened: Open) -> None:
    prompts = random_prompts(16, 80, seed=32)
    runner = opened(mix_folders["target"], mix_folders["half"])
    plain = runner.ids(lines_of(prompts, mode="off", max_tokens=40))
    mixed = [
        {**line, "mode": ALL_MODES[n % 4], "max_tokens": 8 + 2 * n}
        for n, line in enumerate(lines_of(prompts, max_tokens=40))
    ]
    assert runner.ids(mixed) == [ids[: 8 + 2 * n] for n, ids in enumerate(plain)]


def test_penalties_and_biases_give_the_same_tokens_as_on_the_cpu(mix_folders: dict[str, Path], opened: Open) -> None:
    settings = {
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "min_tokens": 20,
        "logit_bias": [[token, 5.0 if token % 2 else -5.0] for token in range(310, 320)],
    }
    lines = lines_of(random_prompts(6, 30, seed=33), max_tokens=40, **settings)
    expected = opened(mix_folders["target"], device="cpu").ids({**line, "mode": "off"} for line in lines)
    for mode in ALL_MODES:
        found = opened(mix_folders["target"], mix_folders["oracle"]).ids({**line, "mode": mode} for line in lines)
        assert found == expected, mode


def test_the_mode_may_change_in_the_middle(tiny_pair: Any, mix_folders: dict[str, Path], opened: Open) -> None:
    for target, drafter in ((tiny_pair.target, tiny_pair.drafter), (mix_folders["window"], mix_folders["half"])):
        runner = opened(target, drafter)
        lines = lines_of(random_prompts(4, 40, seed=34), max_tokens=80)
        plain = runner.ids({**line, "mode": "off"} for line in lines)
        engine, results, turn = runner.engine, {}, 0
        for number, line in enumerate(lines):
            engine.submit(to_request(line, number))
        while engine.has_work:
            engine.set_mode(ALL_MODES[turn // 3 % 4])  # type: ignore[arg-type]
            turn += 1
            results |= {e["id"]: e["result"]["token_ids"] for e in engine.step() if e["event"] == "end"}
        assert [results[f"r{n}"] for n in range(4)] == plain


def test_conversations_go_on_where_they_were(tiny_pair: Any, mix_folders: dict[str, Path], opened: Open) -> None:
    for target, drafter in ((tiny_pair.target, tiny_pair.drafter), (mix_folders["window"], mix_folders["half"])):
        runner, transcript, known = opened(target, drafter), random_prompts(2, 30, seed=35)[1], 0
        for turn, mode in enumerate(("static", "off", "compact", "cap-accept", "static")):
            line = {"prompt_ids": transcript, "mode": mode, "max_tokens": 30, "ignore_eos": True}
            (kept,) = runner.run([{**line, "session": "chat"}])
            (fresh,) = runner.run([line])
            assert kept["token_ids"] == fresh["token_ids"]
            assert kept["usage"]["cached_tokens"] >= known
            transcript = [*transcript, *kept["token_ids"]]
            known = len(transcript) - 1  # the newest token may not have been run
            transcript.append(305 + turn)
        edited = [*transcript[:20], 400, 401]
        line = {"prompt_ids": edited, "mode": "static", "max_tokens": 30, "ignore_eos": True}
        kept, fresh = runner.ids([{**line, "session": "chat"}, line])
        assert kept == fresh


def test_a_cancelled_answer_goes_on(tiny_pair: Any, opened: Open) -> None:
    runner, prompt = opened(tiny_pair.target, tiny_pair.drafter), random_prompts(2, 600, seed=36)[1]
    line = {"prompt_ids": prompt, "mode": "static", "max_tokens": 100, "session": "cut", "ignore_eos": True}
    for steps in (1, 8):  # during the prompt, and in the answer
        runner.engine.submit(to_request(line, 0))
        for _ in range(steps):
            runner.engine.step()
        end = runner.engine.cancel("r0")[-1]
        assert end["result"]["finish_reason"] == "cancelled"
    follow_up = {**line, "prompt_ids": [*prompt, *end["result"]["token_ids"], 301], "max_tokens": 20}
    (kept,) = runner.run([follow_up])
    assert kept["token_ids"] == runner.ids([{**follow_up, "session": None}])[0]
    assert kept["usage"]["cached_tokens"] >= len(prompt)


# Sampling: the same law


P = (0.2, 0.5, 0.3)
Q = ((0.45, 0.35, 0.2), (0.15, 0.25, 0.6), (0.4, 0.3, 0.3))


@pytest.fixture(scope="module")
def three_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Independent draws from P; a drafter that leans elsewhere, with a confidence by token."""
    folder, table = tmp_path_factory.mktemp("three-tokens"), bigram.single_row(P)
    by_token = {300: 2.5, 301: 0.0, 302: -1.5}
    drafter = bigram.BigramDrafter(
        kind=None, logits=torch.tensor(Q).log(), confidence=lambda token: by_token.get(token, 0.0)
    )
    return (
        bigram.write_bigram(folder / "target", table),
        bigram.write_bigram_drafter(folder / "drafter", table, drafter),
    )


def answers(runner: Runner, count: int, length: int, first_seed: int, **options: Any) -> list[list[int]]:
    from sparkchat.params import GenerateRequest, SamplingParams

    requests = [
        GenerateRequest(
            id=f"r{n}",
            prompt_ids=(65,),
            mode=options["mode"],
            sampling=SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                seed=first_seed + n,
                **{k: v for k, v in options.items() if k != "mode"},
            ),
        )
        for n in range(count)
    ]
    results = runner.engine.generate(requests)
    assert {result["error"] for result in results} == {None}
    return [result["token_ids"] for result in results]


FILTERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "temperature 1": ({"temperature": 1.0}, P),
    "temperature 0.7": ({"temperature": 0.7}, tuple(p ** (1 / 0.7) for p in P)),
    "top-k 2": ({"temperature": 1.0, "top_k": 2}, (0.0, 0.5, 0.3)),
    "top-p 0.6": ({"temperature": 1.0, "top_p": 0.6}, (0.0, 0.5, 0.3)),
    "min-p 0.5": ({"temperature": 1.0, "min_p": 0.5}, (0.0, 0.5, 0.3)),
}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_law(name: str, mode: str, three_tokens: tuple[Path, Path], opened: Open) -> None:
    """4000 pairs of neighbours, also across the edges of blocks; two samples in a row may not both be unlikely."""
    options, weights = FILTERS[name]
    law = [w / sum(weights) for w in weights]
    runner = opened(*three_tokens, concurrency=64)
    found = []
    for first_seed in (0, 10**9):
        pairs = Counter(
            (a, b)
            for ids in answers(runner, 400, 20, first_seed, mode=mode, **options)
            for a, b in zip(ids[::2], ids[1::2], strict=True)
        )
        assert sum(pairs.values()) == 4000
        counts = [pairs[300 + i, 300 + j] for i in range(3) for j in range(3)]
        assert sum(counts) == 4000, "a dead token came up"
        found.append(chi_square_p(counts, [a * b for a in law for b in law]))
        if found[-1] >= LOWEST_P:
            return
    raise AssertionError(f"{name} in {mode}: p-values {found}")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_seed_repeats_an_answer_among_other_mates(mode: str, three_tokens: tuple[Path, Path], opened: Open) -> None:
    runner = opened(*three_tokens, concurrency=64)
    many = answers(runner, 64, 40, 500, mode=mode, temperature=1.0)
    few = answers(runner, 3, 40, 500, mode=mode, temperature=1.0)
    assert many[:3] == few
    assert len({tuple(ids) for ids in many}) == 64


# bfloat16: near-ties may turn out either way, nothing else


def bf16_step(value: float) -> float:
    return 2.0 ** (math.floor(math.log2(max(abs(value), 2.0**-60))) - 7)


@pytest.mark.parametrize("kind", ["oracle", "half", "anti"])
def test_bf16_tokens_are_the_best_or_within_two_steps_of_it(
    kind: str, mix_folders: dict[str, Path], opened: Open
) -> None:
    """Judged by one plain pass of another library over the finished text."""
    from transformers import AutoModelForCausalLM

    prompts = random_prompts(8, 60, seed=41)
    runner = opened(mix_folders["target"], mix_folders[kind], dtype="bfloat16")
    judge = AutoModelForCausalLM.from_pretrained(mix_folders["target"], dtype=torch.bfloat16).to("cuda").eval()
    num_far = num_off = 0
    for mode in ALL_MODES:
        lines = lines_of(prompts, mode=mode, max_tokens=80)
        first, second = runner.ids(lines), runner.ids(lines)
        assert first == second, f"two runs in mode {mode} differ"
        for prompt, ids in zip(prompts, first, strict=True):
            with torch.no_grad():
                logits = judge(torch.tensor([[*prompt, *ids]], device="cuda")).logits[0].float()
            rows = logits[len(prompt) - 1 : -1]
            best = rows.max(dim=-1).values.tolist()
            chosen = rows.gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0].tolist()
            for top, ours in zip(best, chosen, strict=True):
                num_off += ours < top
                num_far += top - ours > 2 * bf16_step(top)
    assert num_far == 0, f"{num_far} tokens are far from the best, {num_off} not the best"


def test_bf16_keeps_the_law(tmp_path_factory: pytest.TempPathFactory, opened: Open) -> None:
    """Target logits equal, draft logits 100 and 99.5 at temperature 0.7: rounding logits / 0.7 gives 0.545."""
    folder = tmp_path_factory.mktemp("rounding")
    table = bigram.Table((300, 301), torch.full((2, 2), 100.0), torch.full((2,), 100.0))
    drafter = bigram.BigramDrafter(kind=None, logits=torch.tensor([[100.0, 99.5]] * 2), confidence=lambda token: 4.0)
    target = bigram.write_bigram(folder / "target", table, dtype=torch.bfloat16)
    path = bigram.write_bigram_drafter(folder / "drafter", table, drafter, dtype=torch.bfloat16)
    runner = opened(target, path, concurrency=64, dtype="bfloat16")
    for mode in ALL_MODES:
        found = []
        for first_seed in (0, 10**9):
            tokens = Counter(t for ids in answers(runner, 200, 20, first_seed, mode=mode, temperature=0.7) for t in ids)
            found.append(chi_square_p([tokens[300], tokens[301]], [0.5, 0.5]))
        assert max(found) >= LOWEST_P, (mode, found)


# Costs


def test_step_costs_are_measured_on_the_device(tiny_pair: Any, opened: Open) -> None:
    from sparkchat.engine.cost_probe import measure

    pair = opened(tiny_pair.target, tiny_pair.drafter).engine.pair
    table = measure(pair, [1, 4], pair.block_size)
    assert table.rows == tuple(range(1, pair.block_size + 2))
    assert [batch.requests for batch in table.batches] == [1, 4]
    assert table.plain_ms is not None
    assert 0 < table.plain_ms < 1000
