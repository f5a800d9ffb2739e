"""Penalties, minimum length and logit bias see every delivered token, however many a step delivers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Runner, assert_same, random_prompts
from fixtures import bigram, mix

OpenRunner = Callable[..., Runner]
BIAS = [[300 + 17 * n, 5.0 if n % 2 else -5.0] for n in range(10)]
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": BIAS},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": BIAS},
}
MAX_TOKENS = 50


# Each on its own where some drafts are taken and some are not; all of them with every drafter.
@pytest.mark.parametrize(
    ("setting", "kind"), [*((name, "half") for name in SETTINGS), ("all", "oracle"), ("all", "anti")]
)
def test_setting_acts_alike_with_and_without_speculation(
    setting: str, kind: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    target = mix_folders["target"]
    opened = runner(target, mix_folders[kind], concurrency=16)
    prompts = random_prompts(3, 60)
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    unset = opened.ids({"prompt_ids": p, "mode": "off", **options} for p in prompts)
    plain = opened.ids({"prompt_ids": p, "mode": "off", **options, **SETTINGS[setting]} for p in prompts)
    assert plain != unset, "the setting changes nothing here, so the test shows nothing"
    dealt = [
        (p, ids, mode, 1 + (n + m) % 5)
        for m, mode in enumerate(MODES)
        for n, (p, ids) in enumerate(zip(prompts, plain, strict=True))
    ]
    ours = opened.ids(
        {"prompt_ids": p, "mode": mode, "block_size": block, **options, **SETTINGS[setting]}
        for p, _, mode, block in dealt
    )
    assert_same(target, [d[0] for d in dealt], ours, [d[1] for d in dealt])


def penalised_greedy(table: Any, prompt: list[int], settings: dict[str, Any], count: int) -> list[int]:
    """The rules written out for a table model: repetition over prompt and output, the other two over the output."""
    full, tokens = table.full(), list(prompt)
    for _ in range(count):
        row, output = full[tokens[-1]].clone(), tokens[len(prompt) :]
        for token_id, bias in settings.get("logit_bias", ()):
            row[token_id] += bias
        for token_id in set(tokens):
            r = settings.get("repetition_penalty", 1.0)
            row[token_id] = row[token_id] / r if row[token_id] > 0 else row[token_id] * r
        for token_id in set(output):
            row[token_id] -= settings.get("presence_penalty", 0.0)
            row[token_id] -= settings.get("frequency_penalty", 0.0) * output.count(token_id)
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("setting", ["repetition", "presence", "frequency", "bias"])
def test_setting_does_what_its_rule_says(setting: str, build_once: Callable[..., Any], runner: OpenRunner) -> None:
    table = mix.mix_table()
    target = build_once("bigram-of-mix", lambda folder: bigram.write_bigram(folder, table))
    drafter = build_once(
        "bigram-of-mix-oracle", lambda f: bigram.write_bigram_drafter(f, table, bigram.BigramDrafter())
    )
    prompts = random_prompts(2, 30, seed=9)
    strong = {"repetition": {"repetition_penalty": 4.0}, "presence": {"presence_penalty": 9.0}}
    settings = strong.get(setting, {"frequency": {"frequency_penalty": 6.0}}.get(setting, SETTINGS[setting]))
    expected = [penalised_greedy(table, p, settings, 120) for p in prompts]
    for mode in ("off", "static", "compact"):
        lines = [{"prompt_ids": p, "mode": mode, "max_tokens": 120, "ignore_eos": True, **settings} for p in prompts]
        assert_same(target, prompts, runner(target, drafter).ids(lines), expected)


@pytest.mark.parametrize("kind", ["oracle", "half", "anti"])
def test_minimum_length_holds_back_the_end_token_exactly_that_long(
    kind: Any, build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    # The end token is the best choice after every live token; without it the next one along the cycle is.
    live = (*bigram.live_ids(40), bigram.IM_END)
    logits = bigram.torch.full((41, 41), -20.0)
    for i in range(40):
        logits[i, (i + 1) % 40] = 5.0
    logits[:, 40] = 8.0
    table = bigram.Table(live, logits, logits[0].clone())
    target = build_once("eager-to-end", lambda folder: bigram.write_bigram(folder, table))
    # Drafts follow the cycle, so that several of them are accepted while the end token is barred.
    cycle = logits.clone()
    cycle[:, 40] = -20.0
    half = cycle.clone()
    half[1::2] = cycle[1::2].roll(1, 1)
    law = {"oracle": cycle, "half": half, "anti": logits}[kind]
    drafter = build_once(
        f"eager-to-end-{kind}",
        lambda f: bigram.write_bigram_drafter(f, table, bigram.BigramDrafter(kind=None, logits=law)),
    )
    lines = [
        {"prompt_ids": [300 + n], "mode": mode, "min_tokens": n, "max_tokens": 30, "block_size": block}
        for mode in ("off", *MODES)
        for block in (1, 3, 5)
        for n in (0, 1, 2, 5, 6, 20)
    ]
    for outcome, line in zip(runner(target, drafter).watch(lines), lines, strict=True):
        assert len(outcome.ids) == line["min_tokens"]
        assert (outcome.result["finish_reason"], outcome.result["stop"]) == ("stop", bigram.IM_END)


def test_penalties_count_the_prompt_only_where_their_rule_does(
    build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    table = bigram.Table((300, 301), bigram.torch.tensor([[2.0, 1.0], [2.0, 1.0]]), bigram.torch.tensor([2.0, 1.0]))
    target = build_once("two-tokens", lambda folder: bigram.write_bigram(folder, table))
    opened = runner(target)
    first = {
        name: opened.ids([{"prompt_ids": [300, 300, 65], "max_tokens": 1, **options}])[0]
        for name, options in {
            "none": {},
            "presence": {"presence_penalty": 1.5},
            "frequency": {"frequency_penalty": 1.5},
            "repetition": {"repetition_penalty": 3.0},
        }.items()
    }
    assert first == {"none": [300], "presence": [300], "frequency": [300], "repetition": [301]}


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_no_nucleus_at_all_is_the_likeliest_token_and_seeds_go_up_to_64_bits(
    mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    opened = runner(mix_folders["target"], mix_folders["half"])
    line = {"prompt_ids": [301, 350], "mode": mode, "max_tokens": 12}
    greedy, *drawn = opened.ids(
        [line, *({**line, "temperature": 1.5, "top_p": 0, "seed": seed} for seed in (0, 2**64 - 1))]
    )
    assert drawn == [greedy, greedy]
    last, again = opened.ids([{**line, "temperature": 1.5, "seed": 2**64 - 1}] * 2)
    assert last == again


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_dangerous_settings_are_refused_or_hold(mode: str, mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"])
    last = bigram.VOCAB - 1
    out_of_range, all_banned = opened.run(
        [
            {"prompt_ids": [301], "mode": mode, "max_tokens": 3, "logit_bias": [[5000, 1.0]]},
            {"prompt_ids": [301], "mode": mode, "max_tokens": 3, "logit_bias": [[t, -1e30] for t in range(last)]},
        ]
    )
    assert out_of_range["finish_reason"] == "error"
    assert "5000" in out_of_range["error"]
    assert all_banned["token_ids"] == [last] * 3
