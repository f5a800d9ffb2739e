"""DeepSeek V4 with the drafters in its checkpoints: no mode, block length, batch or history changes a greedy token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import MODES, Runner, parse_strict, random_prompts, sparkchat
from fixtures.deepseek_v4 import (
    parsed,
    random_weights,
    stored_weights,
    v4_config,
    write_json,
    write_shards,
    write_tiny_v4,
)
from fixtures.deepseek_v4_mix import DRAFTER_KINDS, write_v4_mix, write_v4_mix_mtp
from fixtures.mix import mix_table
from sparkchat.errors import UsageError

OpenRunner = Callable[..., Runner]
WIDEST = 8
"""Wider than the published block of 5: more rows in a pass than the tokens of a small compressed entry."""
COMBINATIONS = [(mode, block) for block in range(1, WIDEST + 1) for mode in MODES]


@pytest.fixture(scope="module")
def folder_of(build_once: Callable[..., Any]) -> Callable[[str], Path]:
    def get(kind: str) -> Path:
        if kind == "tiny":
            return build_once("v4-tiny", lambda folder: write_tiny_v4(folder, hc_sinkhorn_iters=4))
        if kind == "mtp":
            return build_once("v4-mtp", write_v4_mix_mtp)
        return build_once(f"v4-{kind}", lambda folder: write_v4_mix(folder, kind, dspark_block_size=WIDEST))

    return get


def lines(prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    return [{"prompt_ids": prompt, "ignore_eos": True, **options} for prompt in prompts]


def assert_equal(runner: Runner, combinations: list[tuple[str, int]], prompts: list[list[int]], tokens: int) -> None:
    """Deal the combinations out to the prompts and compare each with plain decoding of its prompt."""
    plain = runner.ids(lines(prompts, mode="off", max_tokens=tokens))
    assert all(len(set(ids)) > 10 for ids in plain)
    dealt = [(n % len(prompts), mode, block) for n, (mode, block) in enumerate(combinations)]
    asked = [lines([prompts[i]], mode=m, block_size=b, max_tokens=tokens)[0] for i, m, b in dealt]
    for (i, mode, block), ids in zip(dealt, runner.ids(asked), strict=True):
        at = next((n for n, (a, b) in enumerate(zip(ids, plain[i], strict=True)) if a != b), None)
        assert at is None, f"{mode}, block {block}, prompt of {len(prompts[i])}: token {at} differs"


WIDTHS = {"oracle": (1, 2, 3, 4, 5, 6, 7, 8), "half": (3, 5, 7), "anti": (5, 8)}


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_every_width_equals_plain_decoding_over_several_windows(
    kind: str, folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of(kind)
    chosen = [(MODES[(n + len(kind)) % 3], width) for n, width in enumerate(WIDTHS[kind])]
    # The longer prompt's answer crosses the first entry of 128 tokens, and both cross windows of 16.
    assert_equal(runner(folder, folder), chosen, random_prompts(2, 70), 75)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DRAFTER_KINDS, "tiny"])
def test_every_width_and_mode_equals_plain_decoding_at_length(
    kind: str, folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of(kind)
    widest = 5 if kind == "tiny" else WIDEST
    chosen = [(mode, block) for mode, block in COMBINATIONS if block <= widest]
    wide = runner(folder, folder, concurrency=24, context=2400)
    assert_equal(wide, chosen, random_prompts(6, 250), 2000)


def test_random_weights_equal_plain_decoding_where_nearly_all_is_rejected(
    folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of("tiny")
    prompts = random_prompts(2, 70, low=2, high=510)
    assert_equal(runner(folder, folder), [("static", 5), ("compact", 5), ("static", 4), ("cap-accept", 3)], prompts, 60)


def test_the_previews_block_equals_plain_decoding_and_is_accepted(
    folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of("mtp")
    opened = runner(folder, folder)
    prompts = random_prompts(2, 90)
    assert_equal(opened, [("static", 1), ("static", 2), ("static", 3)], prompts, 60)
    result = opened.run(lines(prompts[:1], mode="static", block_size=2, max_tokens=100))[0]
    assert 2.4 < result["speculation"]["mean_acceptance_length"] <= 3.0


def test_acceptance_is_what_the_drafter_was_made_for(folder_of: Callable[[str], Path], runner: OpenRunner) -> None:
    rates, followed, table = {}, [], mix_table().full().argmax(-1)
    for kind in DRAFTER_KINDS:
        folder = folder_of(kind)
        requests = lines(random_prompts(4, 40), mode="static", block_size=5, max_tokens=80)
        results = runner(folder, folder).run(requests)
        stats = [result["speculation"] for result in results]
        verified, accepted = (sum(s[f"num_{k}_draft_tokens"] for s in stats) for k in ("verified", "accepted"))
        rates[kind] = accepted / verified
        for request, result in zip(requests, results, strict=True):
            text = [request["prompt_ids"][-1], *result["token_ids"]]
            followed += [int(table[a]) == b for a, b in pairwise(text)]
    assert rates["anti"] == 0.0
    assert 0.05 < rates["half"] < 0.6 < rates["oracle"]
    # Else nothing would depend on what is cached.
    assert 0.80 < sum(followed) / len(followed) < 0.97


def test_a_conversation_that_goes_on_or_changes_is_what_a_fresh_one_would_be(
    folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of("half")
    opened = runner(folder, folder)
    first = random_prompts(1, 1)[0] + random_prompts(2, 150)[1]
    answer = opened.ids([{**lines([first], mode="static", max_tokens=30)[0], "session": "s"}])[0]
    longer = [*first, *answer, 301, 302, 303]
    edited = [*longer[:-20], *range(310, 350)]
    elsewhere = [*first[:60], *range(310, 350)]
    for prompt in (longer, edited, elsewhere):
        line = lines([prompt], mode="static", max_tokens=40)[0]
        assert opened.ids([{**line, "session": "s"}]) == opened.ids([{**line, "mode": "off"}])


@pytest.mark.parametrize("drafter", ["oracle", "mtp"])
def test_after_a_long_answer_a_chat_goes_back_to_its_question(
    drafter: str, folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    """Further back than the rings hold, as when a next turn leaves out the thinking."""
    folder = folder_of(drafter)
    opened, question = runner(folder, folder), random_prompts(2, 90)[1]
    opened.ids([{**lines([question], mode="static", max_tokens=120)[0], "session": "s"}])
    line = lines([[*question[:-1], 333, 334, 335]], mode="static", max_tokens=40)[0]
    result = opened.run([{**line, "session": "s"}])[0]
    assert result["token_ids"] == opened.ids([{**line, "mode": "off"}])[0]
    assert result["usage"]["cached_tokens"] == len(question) - 1


def test_mode_compact_without_confidence_verifies_whole_blocks_and_says_so(
    folder_of: Callable[[str], Path], runner: OpenRunner
) -> None:
    folder = folder_of("mtp")
    outcome = runner(folder, folder).watch(lines(random_prompts(1, 9), mode="compact", max_tokens=20))[0]
    assert {step["mode"] for step in outcome.steps} == {"static"}
    assert all("confidence head" in step["fallback"] for step in outcome.steps)


@pytest.mark.parametrize("drafter", ["dspark", "mtp"])
def test_large_vocabularies_draft_without_changing_a_token(
    drafter: str, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    folder = build_once(f"v4-wide-{drafter}", lambda f: write_tiny_v4(f, drafter=drafter, vocab_size=4096))
    assert_equal(runner(folder, folder), [("static", 3)], random_prompts(1, 20), 12)


DAMAGE = {
    "layers.1.ffn.experts.3.w2.scale": None,
    "mtp.2.hc_attn_base": torch.full((24,), torch.nan),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_ends_the_command_with_its_tensor_named(name: str, tmp_path: Path) -> None:
    config = parsed(v4_config())
    stored = stored_weights(config, random_weights(config))
    if DAMAGE[name] is None:
        del stored[name]
    else:
        stored[name] = DAMAGE[name]
    write_shards(tmp_path, config, stored)
    write_json(tmp_path / "config.json", v4_config())
    done = sparkchat("run", tmp_path, "--prompt-ids", "5,6", "--max-tokens", "2", "--context", "64")
    assert done.code == 6
    assert name in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_whole_checkpoint_answers_on_the_command_line(folder_of: Callable[[str], Path]) -> None:
    done = sparkchat(
        *("run", folder_of("tiny"), "--prompt-ids", "5,6", "--max-tokens", "8", "--context", "64", "--json"),
        *("--ignore-eos", "--mode", "static"),
    )
    assert done.code == 0, done.err
    result = parse_strict(done.out)
    assert len(result["token_ids"]) == 8
    assert result["speculation"]["num_proposed_draft_tokens"] > 0


def test_a_block_longer_than_trained_is_refused(folder_of: Callable[[str], Path], runner: OpenRunner) -> None:
    folder = folder_of("tiny")
    result = runner(folder, folder).run(lines([[5]], mode="static", block_size=6))[0]
    assert "trained with 5" in result["error"]
    with pytest.raises(UsageError, match="trained with 5"):
        runner(folder, folder, block_size=9)
