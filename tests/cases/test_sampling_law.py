"""At temperature > 0 the tokens follow the target's law, whatever the drafter likes and however far is verified.

Every row of these tables is the same law p, so consecutive tokens are independent draws from it and one long answer
is a large sample. Seeds are fixed: a failure is a finding, not bad luck of one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import MODES, Runner, chi_square_p, varied_cost
from fixtures import bigram

OpenRunner = Callable[..., Runner]
ALL_MODES = ("off", *MODES)
P = (0.2, 0.5, 0.3)
Q = (0.45, 0.35, 0.2)
LOWEST_P = 1e-4
GRID = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t in (0.3, 0.7, 1.0, 1.5)
    for k in (0, 2)
    for p in (1.0, 0.8)
    for m in (0.0, 0.1)
]


def filtered_law(logits: Sequence[float], options: dict[str, Any]) -> list[float]:
    """Temperature, then top-k, top-p, min-p on the sorted law, written out for a handful of tokens."""
    probs = (torch.tensor(logits, dtype=torch.float64) / options["temperature"]).softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if options.get("top_k"):
        order = order[: options["top_k"]]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if mass < options.get("top_p", 1.0) * total or not kept:
            kept.append(i)
        mass += probs[i]
    kept = [i for i in kept if probs[i] >= options.get("min_p", 0.0) * probs[order[0]]]
    norm = sum(probs[i] for i in kept)
    return [probs[i] / norm if i in kept else 0.0 for i in range(len(probs))]


def confidence(token: int) -> float:
    """Differs by previous token, so that planned lengths depend on what was drafted."""
    return {300: 2.5, 301: 0.0, 302: -1.5}.get(token, 0.0)


def table_pair(folder: Path) -> tuple[Path, Path]:
    """Target p and draft law q of three tokens."""
    table = bigram.single_row(P)
    drafter = bigram.BigramDrafter(kind=None, logits=torch.tensor(Q).log().expand(3, -1).clone(), confidence=confidence)
    return (
        bigram.write_bigram(folder / "target", table),
        bigram.write_bigram_drafter(folder / "drafter", table, drafter),
    )


def rounding_pair(folder: Path) -> tuple[Path, Path]:
    """bf16, target logits equal, draft logits 100 and 99.5: rounding logits / 0.7 would shift the law to 0.545."""
    table = bigram.Table((300, 301), torch.full((2, 2), 100.0), torch.full((2,), 100.0))
    law = torch.tensor([[100.0, 99.5], [100.0, 99.5]])
    drafter = bigram.BigramDrafter(kind=None, logits=law, confidence=lambda token: 4.0)
    return (
        bigram.write_bigram(folder / "target", table, dtype=torch.bfloat16),
        bigram.write_bigram_drafter(folder / "drafter", table, drafter, dtype=torch.bfloat16),
    )


def pair_p_value(answers: Sequence[Sequence[int]], law: Sequence[float]) -> float:
    """Test disjoint pairs of consecutive tokens: their law is the product, also across the edge of a block."""
    pairs = Counter((a, b) for ids in answers for a, b in zip(ids[0::2], ids[1::2], strict=False))
    cells = [(i, j) for i in range(len(law)) for j in range(len(law))]
    assert all(0 <= token - 300 < len(law) for pair in pairs for token in pair), "a dead token came up"
    counts = [pairs[300 + i, 300 + j] for i, j in cells]
    return chi_square_p(counts, [law[i] * law[j] for i, j in cells])


def sample(count: int, length: int, first_seed: int, **options: Any) -> list[dict[str, Any]]:
    common = {"prompt_ids": [65], "max_tokens": length, "ignore_eos": True, **options}
    return [{**common, "seed": first_seed + n} for n in range(count)]


def answers(opened: Runner, count: int, length: int, first_seed: int, **options: Any) -> list[list[int]]:
    return opened.ids(sample(count, length, first_seed, **options))


def check_laws(opened: Runner, laws: Sequence[tuple[dict[str, Any], Sequence[float]]], count: int, length: int) -> None:
    """Fail when two samples of distinct seeds in a row are too unlikely; answers under all options share the batch."""
    found: list[list[float]] = [[] for _ in laws]
    for first_seed in (0, 10**9):
        open_ones = [n for n, seen in enumerate(found) if max(seen, default=0.0) < LOWEST_P]
        asked = [line for n in open_ones for line in sample(count, length, first_seed, **laws[n][0])]
        drawn = opened.ids(asked)
        for place, n in enumerate(open_ones):
            found[n].append(pair_p_value(drawn[place * count : (place + 1) * count], laws[n][1]))
    for seen, (options, law) in zip(found, laws, strict=True):
        assert max(seen) >= LOWEST_P, f"{options}: p-values {seen}, law {law}"


def check_law(opened: Runner, law: Sequence[float], count: int, length: int, **options: Any) -> None:
    check_laws(opened, [(options, law)], count, length)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_long_answers_follow_the_law_under_every_filter(
    mode: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    logits = torch.tensor(P).log().tolist()
    # One mode meets every fourth setting here, all of them in the slow test.
    chosen = GRID[ALL_MODES.index(mode) :: 4]
    check_laws(opened, [({"mode": mode, **o}, filtered_law(logits, o)) for o in chosen], 12, 40)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("options", GRID, ids=str)
def test_long_answers_follow_the_law_at_full_size(
    mode: str, options: dict[str, Any], build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    check_law(opened, filtered_law(torch.tensor(P).log().tolist(), options), 200, 200, mode=mode, **options)


@pytest.mark.parametrize("mode", MODES)
def test_first_tokens_after_the_prompt_follow_the_law(
    mode: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    check_law(opened, P, 1000, 4, mode=mode, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL_MODES)
def test_first_tokens_after_the_prompt_follow_the_law_at_full_size(
    mode: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    check_law(opened, P, 20_000, 2, mode=mode, temperature=1.0)
    check_law(opened, P, 20_000, 4, mode=mode, temperature=1.0)


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_drafts_are_drawn_from_the_very_law_of_the_ratio(
    mode: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    opened = runner(*build_once("rounding", rounding_pair), concurrency=32)
    check_law(opened, (0.5, 0.5), 32, 100, mode=mode, temperature=0.7)


def test_neighbouring_seeds_are_independent(build_once: Callable[..., Any], runner: OpenRunner) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    runs = answers(opened, 200, 15, 5000, mode="static", temperature=1.0)
    columns = [pair for a, b in zip(runs[0::2], runs[1::2], strict=True) for pair in zip(a, b, strict=True)]
    assert pair_p_value(columns, P) >= LOWEST_P
    assert len({tuple(run) for run in runs}) >= 199


def test_a_token_outside_the_filter_never_comes_up(build_once: Callable[..., Any], runner: OpenRunner) -> None:
    opened = runner(*build_once("law", table_pair), concurrency=64)
    filters = ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5})
    tried = [{"mode": mode, "temperature": 1.0, **options} for mode in ALL_MODES for options in filters]
    drawn = opened.ids(line for options in tried for line in sample(5, 30, 77, **options))
    for n, options in enumerate(tried):
        assert {token for ids in drawn[5 * n : 5 * n + 5] for token in ids} == {301, 302}, options


def lookahead_pair(folder: Path) -> tuple[Path, Path]:
    """S is followed by A (0.7) or B (0.3), both by S; drafts say A or B evenly. Confidence: 0.8 after S, then by token.

    After A the second draft looks certain, after B hopeless. With steps of 1, 2 and 2.22 ms a planner that looks at the
    second confidence before it decides on the first verifies A far more often than B, and A comes out 85 % of the time.
    """
    never = -60.0
    p = torch.tensor([[never, 0.7, 0.3], [1.0, never, never], [1.0, never, never]])
    q = torch.tensor([[never, 0.5, 0.5], [1.0, never, never], [1.0, never, never]])
    logits = [torch.where(law > 0, law.clamp_min(1e-9).log(), law) for law in (p, q)]
    table = bigram.Table((300, 301, 302), logits[0], logits[0][1])
    by_token = {300: 1.3863, 301: 2.1972, 302: -30.0}
    drafter = bigram.BigramDrafter(kind=None, logits=logits[1], confidence=lambda t: by_token.get(t, 0.0), block=2)
    return (
        bigram.write_bigram(folder / "target", table),
        bigram.write_bigram_drafter(folder / "drafter", table, drafter),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [(1.0, 2.0, 2.2222), (1.0, 1.3, 1.32)], ids=str)
def test_lengths_do_not_look_at_the_token_they_judge(
    mode: str, steps: tuple[float, ...], build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    from sparkchat.params import CostTable

    # A request with a seed is planned as if alone, as in the counterexample, also beside others.
    opened = runner(*build_once("lookahead", lookahead_pair), concurrency=16, cost=CostTable((1, 2, 3), steps))
    counts: Counter[int] = Counter()
    for ids in answers(opened, 16, 100, 31, mode=mode, temperature=1.0):
        counts.update(b for a, b in pairwise(ids) if a == 300)
    assert set(counts) <= {301, 302}
    assert chi_square_p([counts[301], counts[302]], [0.7, 0.3]) >= LOWEST_P


def test_lengths_planned_over_a_batch_keep_the_law(build_once: Callable[..., Any], runner: OpenRunner) -> None:
    opened = runner(*build_once("lookahead", lookahead_pair), concurrency=6, cost=varied_cost())
    for mode in ("compact", "cap-accept"):
        counts: Counter[int] = Counter()
        # Without a seed of their own the requests share one plan.
        lines = [{"prompt_ids": [65], "max_tokens": 120, "mode": mode, "temperature": 1.0} for _ in range(12)]
        for ids in opened.ids(lines):
            counts.update(b for a, b in pairwise(ids) if a == 300)
        # No seed, no repeatability: six standard errors.
        total = sum(counts.values())
        assert abs(counts[301] / total - 0.7) < 6 * (0.21 / total) ** 0.5


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(
    mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    target, drafter = mix_folders["window"], mix_folders["half"]
    lines = [
        {"prompt_ids": [301 + n] * (1 + 5 * n), "mode": mode, "seed": 1000 + n, "max_tokens": 12 + 6 * n, **options}
        for n, options in enumerate(
            (
                {"temperature": 0.8},
                {"temperature": 1.3, "top_k": 5},
                {"temperature": 0.0},
                {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
                {"temperature": 0.6, "min_p": 0.05},
            )
        )
    ]
    together = runner(target, drafter).ids(lines)
    assert together == runner(target, drafter).ids(lines)
    single = runner(target, drafter, concurrency=1)
    assert together == [single.ids([line])[0] for line in lines]
    reordered = runner(target, drafter, concurrency=3).ids(reversed(lines))
    assert together == reordered[::-1]


def test_without_a_seed_two_answers_differ(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    line = {"prompt_ids": [301], "mode": "static", "temperature": 2.0, "max_tokens": 30}
    first, second = runner(mix_folders["target"], mix_folders["oracle"]).watch([line, line])
    assert first.ids != second.ids
    seeds = {o.of_kind("start")[0]["sampling"]["seed"] for o in (first, second)}
    assert len(seeds) == 2
    assert None not in seeds


def test_the_reported_seed_repeats_the_answer(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"])
    line = {"prompt_ids": [301], "mode": "static", "temperature": 1.5, "max_tokens": 30}
    first = opened.watch([line])[0]
    seed = first.of_kind("start")[0]["sampling"]["seed"]
    assert opened.ids([{**line, "seed": seed}])[0] == first.ids
