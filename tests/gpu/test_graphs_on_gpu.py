"""Captured steps on a CUDA device: the tokens of the reference path in every mode, its law, and flat memory.

Everything is fp32 on small pairs, so that a token that differs is a mistake and no rounding. Needs torch, triton,
transformers, safetensors and pytest, and no other package.

A fault on the device ends the process's use of it, and all tests behind it fail. So run each form by itself:

    for form in torch kernels small overlap; do python3 -m pytest -q tests/gpu/test_graphs_on_gpu.py -k $form; done
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, chi_square_p, random_prompts, to_request, varied_cost
from fixtures import bigram
from fixtures.shapes import write_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

MODES = ("off", "static", "compact", "cap-accept")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}
FORMS = ("torch", "kernels", "small", "overlap")
"""Captured steps of torch's operations; of the kernels; of the kernels, the small ones or all of them starting while
the one before ends.
They are compared with the form "loop", the reference path."""
LOWEST_P = 1e-4
Open = Callable[..., Runner]


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    """Return ``opened(form, target, drafter, **spec)``: an engine on the GPU in fp32 unless said, loaded once."""
    from sparkchat.engine import engine as engine_module
    from sparkchat.kernels.launch import Overlap
    from sparkchat.params import LoadSpec

    engines: dict[Any, Runner] = {}
    build = engine_module.build_decoder

    def get(form: str, target: Path, drafter: Path | None = None, **spec: Any) -> Runner:
        key = (form, target, drafter, *sorted(spec.items()))
        if key not in engines:
            settings = {"device": "cuda", "dtype": "float32", "context": 600, "concurrency": 8, **spec}
            loaded = LoadSpec(
                "fixture",
                str(target),
                None if drafter is None else str(drafter),
                cost_table=varied_cost() if drafter else None,
                graphs=form != "loop",
                **settings,
            )
            overlaps = {"small": Overlap.SMALL, "overlap": Overlap.ALL}.get(form, Overlap.NONE)
            engine_module.build_decoder = partial(build, is_fused=form != "torch", overlaps=overlaps)
            try:
                engines[key] = Runner(engine_module.Engine(loaded))
            finally:
                engine_module.build_decoder = build
        return engines[key]

    yield get
    engines.clear()


def lines_of(mode: str | None, sampling: str, tokens: int = 40, count: int = 8) -> list[dict[str, Any]]:
    return [
        {
            "prompt_ids": prompt,
            "max_tokens": tokens + n,
            "ignore_eos": True,
            "seed": n,
            **({} if mode is None else {"mode": mode}),
            **SAMPLINGS[sampling],
        }
        for n, prompt in enumerate(random_prompts(count, 60, seed=3))
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_tokens_are_those_of_the_reference_path(form: str, sampling: str, tiny_pair: Any, opened: Open) -> None:
    loop, captured = (opened(f, tiny_pair.target, tiny_pair.drafter) for f in ("loop", form))
    for mode in MODES:
        lines = lines_of(mode, sampling)
        outcomes = captured.watch(lines)
        assert [outcome.ids for outcome in outcomes] == loop.ids(lines), mode
        assert all(step["graph"]["replayed"] for outcome in outcomes for step in outcome.steps), mode


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["oracle", "half", "window"])
def test_greedy_tokens_are_those_of_mode_off(form: str, kind: str, mix_folders: dict[str, Path], opened: Open) -> None:
    target = mix_folders["window" if kind == "window" else "target"]
    drafter = mix_folders["half" if kind == "window" else kind]
    plain = opened("loop", target, drafter).ids(lines_of("off", "greedy", tokens=60))
    captured = opened(form, target, drafter)
    for number, mode in enumerate(MODES):
        lines = [
            {**line, "block_size": 1 + (n + number) % 5} for n, line in enumerate(lines_of(mode, "greedy", tokens=60))
        ]
        assert captured.ids(lines) == plain, mode


@pytest.mark.parametrize("form", FORMS)
def test_one_request_alone(form: str, tiny_pair: Any, opened: Open) -> None:
    loop, captured = (opened(f, tiny_pair.target, tiny_pair.drafter) for f in ("loop", form))
    for mode in MODES:
        for sampling in SAMPLINGS:
            line = lines_of(mode, sampling)[-1]
            (outcome,) = captured.watch([line])
            assert outcome.ids == loop.ids([line])[0], (mode, sampling)
            if mode == "compact":
                assert len({step["verify_len"] for step in outcome.steps}) > 1
                # A trimmed block replays a smaller graph.
                trimmed = [step for step in outcome.steps if step["verify_len"] == step["budget"]]
                assert all(f" {step['rows']} rows" in step["graph"]["key"] for step in trimmed)


@pytest.mark.parametrize("form", FORMS)
def test_the_mode_may_change_between_steps(form: str, tiny_pair: Any, opened: Open) -> None:
    loop, captured = (opened(f, tiny_pair.target, tiny_pair.drafter) for f in ("loop", form))
    plain = loop.ids(lines_of("off", "greedy", tokens=80))
    engine, results, turn = captured.engine, {}, 0
    for number, line in enumerate(lines_of(None, "greedy", tokens=80)):
        engine.submit(to_request(line, number))
    while engine.has_work:
        engine.set_mode(MODES[turn // 3 % 4])  # type: ignore[arg-type]
        turn += 1
        results |= {e["id"]: e["result"]["token_ids"] for e in engine.step() if e["event"] == "end"}
    assert [results[f"r{n}"] for n in range(8)] == plain


@pytest.mark.parametrize("form", FORMS)
def test_requests_of_all_kinds_side_by_side(form: str, tiny_pair: Any, opened: Open) -> None:
    loop, captured = (opened(f, tiny_pair.target, tiny_pair.drafter) for f in ("loop", form))
    lines = [
        {**line, **SAMPLINGS[("greedy", "sampled", "filtered")[n % 3]], "max_tokens": 3 + 7 * n % 40}
        for n, line in enumerate(lines_of(None, "greedy", count=20))
    ]
    lines = [{**line, "mode": MODES[n % 4], "block_size": 1 + n % 5} for n, line in enumerate(lines)]
    lines[5]["repetition_penalty"] = 1.2
    assert captured.ids(lines) == loop.ids(lines)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"temperature": 1.0}, P),
        ({"temperature": 0.7}, tuple(p ** (1 / 0.7) for p in P)),
        ({"temperature": 1.0, "top_k": 2}, (0.0, 0.5, 0.3)),
        ({"temperature": 1.0, "top_p": 0.6}, (0.0, 0.5, 0.3)),
    ],
    ids=["temperature-1", "temperature-0.7", "top-k", "top-p"],
)
def test_tokens_follow_the_law(
    form: str, options: dict[str, Any], weights: tuple[float, ...], three_tokens: tuple[Path, Path], opened: Open
) -> None:
    """Pairs of neighbours, also across the edges of blocks; two samples in a row may not both be unlikely."""
    law = [w / sum(weights) for w in weights]
    runner = opened(form, *three_tokens, concurrency=64)
    for mode in MODES:
        found = []
        for first_seed in (0, 10**9):
            lines = [
                {"prompt_ids": [65], "mode": mode, "max_tokens": 20, "ignore_eos": True, "seed": first_seed + n}
                for n in range(320)
            ]
            answers = runner.ids({**line, **options} for line in lines)
            pairs = Counter((a, b) for ids in answers for a, b in zip(ids[::2], ids[1::2], strict=True))
            counts = [pairs[300 + i, 300 + j] for i in range(3) for j in range(3)]
            assert sum(counts) == 3200, "a dead token came up"
            found.append(chi_square_p(counts, [a * b for a in law for b in law]))
            if found[-1] >= LOWEST_P:
                break
        assert max(found) >= LOWEST_P, (mode, found)


@pytest.mark.parametrize("form", FORMS[1:])
def test_memory_stays_where_it_is(form: str, tiny_pair: Any, opened: Open) -> None:
    """Over two thousand steps and fifty changes of mode, once every graph has been made."""
    runner = opened(form, tiny_pair.target, tiny_pair.drafter)

    def work() -> None:
        engine = runner.engine
        for number, line in enumerate(lines_of(None, "sampled", tokens=400)):
            engine.submit(to_request(line, number))
        for turn in range(1000):
            if turn % 40 == 0:
                engine.set_mode(MODES[turn // 40 % 4])  # type: ignore[arg-type]
            if not engine.has_work:
                break
            engine.step()
        assert not engine.has_work

    work()
    sizes = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        work()
    assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("form", FORMS[1:])
def test_simulated_rounds_in_the_shapes_of_a_profile(form: str, tmp_path: Path, opened: Open) -> None:
    folder = write_shapes(tmp_path)
    settings = {"dummy_weights": True, "simulate_acceptance": "code", "dtype": "bfloat16"}
    runner = opened(form, folder, folder / "drafter", **settings)
    (outcome,) = runner.watch(
        [{"prompt_ids": [1, 2, 3], "mode": "static", "max_tokens": 500, "ignore_eos": True, "temperature": 1.0}]
    )
    assert 4.0 < outcome.result["speculation"]["mean_acceptance_length"] < 6.5
    idle = [step["gpu_idle_ms"] for step in outcome.steps[1:] if step["gpu_idle_ms"] is not None]
    assert len(idle) > len(outcome.steps) // 2
