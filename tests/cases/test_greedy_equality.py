"""At temperature 0 no mode, block length, batch or drafter changes a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases.harness import MODES, Runner, assert_same, random_prompts, to_request
from fixtures.tiny import write_tiny

OpenRunner = Callable[..., Runner]
KINDS = ("tiny", "tiny-gated", "tiny-rnn", "oracle", "half", "anti", "window-oracle", "window-half", "window-anti")
COMBINATIONS = [(mode, block) for mode in MODES for block in (1, 2, 3, 4, 5)]


def folders_of(kind: str, mix_folders: dict[str, Path], build_once: Callable[..., Any]) -> tuple[Path, Path]:
    if kind.startswith("tiny"):
        head = kind.partition("-")[2] or "vanilla"
        pair = build_once(f"tiny-{head}", lambda folder: write_tiny(folder, head=head))
        return pair.target, pair.drafter
    drafter = kind.rpartition("-")[2]
    return mix_folders["window" if kind.startswith("window") else "target"], mix_folders[drafter]


@pytest.fixture
def pair(request: Any, mix_folders: dict[str, Path], build_once: Callable[..., Any]) -> tuple[Path, Path]:
    return folders_of(request.param, mix_folders, build_once)


def prompts_for(target: Path, count: int, longest: int) -> list[list[int]]:
    low, high = (0, 512) if target.parent.name.startswith("tiny") else (300, 500)
    return random_prompts(count, longest, low=low, high=high)


def lines(prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    return [{"prompt_ids": prompt, "ignore_eos": True, **options} for prompt in prompts]


def check_equality(runner: Runner, target: Path, prompts: list[list[int]], max_tokens: int) -> None:
    """Every mode and block length over the prompts, dealt out so that each prompt meets several of them."""
    plain = runner.ids(lines(prompts, mode="off", max_tokens=max_tokens))
    dealt = [(n % len(prompts), combination) for n, combination in enumerate(COMBINATIONS)]
    requests = [
        {**lines([prompts[i]], max_tokens=max_tokens)[0], "mode": mode, "block_size": block}
        for i, (mode, block) in dealt
    ]
    assert_same(target, [prompts[i] for i, _ in dealt], runner.ids(requests), [plain[i] for i, _ in dealt])


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_every_mode_and_block_length_equals_plain_decoding(pair: tuple[Path, Path], runner: OpenRunner) -> None:
    target, drafter = pair
    check_equality(runner(target, drafter), target, prompts_for(target, 5, 200), max_tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_every_mode_and_block_length_equals_plain_decoding_at_length(
    pair: tuple[Path, Path], runner: OpenRunner
) -> None:
    target, drafter = pair
    prompts = prompts_for(target, 200, 200)
    wide = runner(target, drafter, concurrency=32)
    plain = wide.ids(lines(prompts, mode="off", max_tokens=300))
    for mode, block in COMBINATIONS:
        ours = wide.ids(lines(prompts, mode=mode, block_size=block, max_tokens=300))
        assert_same(target, prompts, ours, plain)


@pytest.mark.parametrize("pair", ["tiny", "oracle", "window-half"], indirect=True)
def test_plain_decoding_is_what_transformers_generates(pair: tuple[Path, Path], runner: OpenRunner) -> None:
    target, drafter = pair
    prompts = prompts_for(target, 4, 100)
    model = AutoModelForCausalLM.from_pretrained(target)
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    for mode in ("off", "static"):
        ours = runner(target, drafter).ids(lines(prompts, mode=mode, max_tokens=40))
        assert_same(target, prompts, ours, expected)


@pytest.mark.parametrize("pair", ["tiny", "oracle", "window-half"], indirect=True)
def test_a_batch_gives_what_each_request_gets_alone(pair: tuple[Path, Path], runner: OpenRunner) -> None:
    target, drafter = pair
    requests = [
        {**line, "mode": ("off", *MODES)[n % 4], "max_tokens": 10 + 9 * n}
        for n, line in enumerate(lines(prompts_for(target, 6, 60)))
    ]
    together = runner(target, drafter).ids(requests)
    single = runner(target, drafter, concurrency=1)
    assert_same(target, [r["prompt_ids"] for r in requests], together, [single.ids([r])[0] for r in requests])


def test_oracle_drafts_are_taken_and_anti_drafts_are_not(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    rates = {}
    for kind in ("oracle", "half", "anti"):
        requests = lines(random_prompts(4, 40), mode="static", max_tokens=80)
        stats = [r["speculation"] for r in runner(mix_folders["target"], mix_folders[kind]).run(requests)]
        verified, accepted = (sum(s[f"num_{k}_draft_tokens"] for s in stats) for k in ("verified", "accepted"))
        assert verified > 0
        rates[kind] = accepted / verified
    assert rates["anti"] == 0.0
    assert 0.05 < rates["half"] < 0.6 < rates["oracle"]


def test_compact_verifies_fewer_drafts_and_of_several_lengths(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    requests = lines(random_prompts(3, 20), mode="compact", max_tokens=120)
    for result in runner(mix_folders["target"], mix_folders["oracle"]).run(requests):
        speculation = result["speculation"]
        assert result["mode"] == "compact"
        assert sum(1 for n in speculation["verify_len_histogram"] if n) >= 2
        assert speculation["num_verified_draft_tokens"] < speculation["num_proposed_draft_tokens"]


def test_mode_switched_in_the_middle_changes_nothing(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    target = mix_folders["window"]
    opened = runner(target, mix_folders["half"])
    prompts = random_prompts(3, 30)
    plain = opened.ids(lines(prompts, mode="off", max_tokens=90))
    engine, modes, results, turn = opened.engine, ("off", *MODES), {}, 0
    before = engine.mode
    for n, line in enumerate(lines(prompts, max_tokens=90)):
        engine.submit(to_request(line, n))
    while engine.has_work:
        engine.set_mode(modes[turn // 3 % 4])
        turn += 1
        results |= {e["id"]: e["result"] for e in engine.step() if e["event"] == "end"}
    engine.set_mode(before)
    assert turn > 12
    assert_same(target, prompts, [results[f"r{n}"]["token_ids"] for n in range(3)], plain)
