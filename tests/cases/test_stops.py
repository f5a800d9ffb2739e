"""An answer ends at the first end token, wherever in a block it was drafted, and counts what was delivered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Outcome, Runner, random_prompts
from fixtures import bigram, mix, tape

OpenRunner = Callable[..., Runner]
ALL_MODES = ("off", *MODES)
MAX_TOKENS = 48


def with_ends(folder: Path, source: Path, config_eos: Any, generation_eos: Any) -> Path:
    """Copy a checkpoint (its weights by link) and declare other end tokens; None takes the key out."""
    shutil.copytree(source, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    for name, eos in (("config.json", config_eos), ("generation_config.json", generation_eos)):
        data = json.loads((source / name).read_text())
        data.pop("eos_token_id", None)
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(data | ({} if eos is None else {"eos_token_id": eos})))
    return folder


DECLARED: dict[str, Callable[[int, int], tuple[Any, Any]]] = {
    # name: (end token, another live token) -> eos_token_id of config.json and of generation_config.json
    "one-in-config": lambda end, other: (end, None),
    "list-in-both": lambda end, other: ([571, 572, end], [571, 572, end]),
    "list-only-in-generation-config": lambda end, other: (None, [571, 572, end]),
    "generation-config-wins": lambda end, other: (other, [571, end]),
}


@dataclass(frozen=True)
class Ends:
    """Answers without an end, and a token that they first say at many different places."""

    prompts: list[list[int]]
    endless: list[list[int]]
    end: int
    other: int


@pytest.fixture
def ends(mix_folders: dict[str, Path], build_once: Callable[..., Any], runner: OpenRunner) -> Ends:
    return build_once("ends", lambda _: choose_ends(runner(mix_folders["target"], concurrency=60)))


def choose_ends(opened: Runner) -> Ends:
    prompts = random_prompts(60, 12, seed=2)
    options = {"mode": "off", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    endless = opened.ids({"prompt_ids": p, **options} for p in prompts)
    places = {token: {run.index(token) for run in endless if token in run} for run in endless for token in run}
    end, other = sorted(places, key=lambda token: -len(places[token]))[:2]
    assert len(places[end]) >= 15, "no token comes up at enough places to test anything"
    return Ends(prompts, endless, end, other)


# Where end tokens are declared does not matter to what is drafted.
@pytest.mark.parametrize(("declared", "kind"), [*((name, "oracle") for name in DECLARED), ("list-in-both", "half")])
def test_answer_is_the_plain_one_up_to_its_first_end_token(
    declared: str,
    kind: str,
    ends: Ends,
    mix_folders: dict[str, Path],
    build_once: Callable[..., Any],
    runner: OpenRunner,
) -> None:
    eos = DECLARED[declared](ends.end, ends.other)
    target = build_once(f"ends-{declared}", lambda folder: with_ends(folder, mix_folders["target"], *eos))
    lines = [
        {"prompt_ids": p, "mode": ALL_MODES[n % 4], "max_tokens": MAX_TOKENS, "block_size": 1 + n // 4 % 5}
        for n, p in enumerate(ends.prompts)
    ]
    for outcome, run in zip(runner(target, mix_folders[kind], concurrency=60).watch(lines), ends.endless, strict=True):
        check_end(outcome, run, ends.end)


def check_end(outcome: Outcome, endless: list[int], end: int) -> None:
    expected = endless[: endless.index(end)] if end in endless else endless
    result = outcome.result
    assert result["token_ids"] == expected
    assert result["finish_reason"] == ("stop" if end in endless else "length")
    assert result["stop"] == (end if end in endless else None)
    assert [i for e in outcome.of_kind("delta") for i in e["token_ids"]] == expected
    check_accounts(outcome)


def check_accounts(outcome: Outcome) -> None:
    """Every figure of one answer follows from the tokens that were delivered."""
    result, speculation = outcome.result, outcome.result["speculation"]
    delivered = result["token_ids"]
    histogram, steps = speculation["acceptance_histogram"], outcome.steps
    assert result["usage"]["completion_tokens"] == len(delivered)
    assert result["usage"]["prompt_tokens"] == len(result["prompt_token_ids"])
    assert [i for s in steps for i in s["committed_ids"]] == delivered[1:]
    assert sum(histogram) == speculation["num_steps"] == len(steps)
    accepted = sum(i * n for i, n in enumerate(histogram))
    assert accepted == speculation["num_accepted_draft_tokens"] == sum(speculation["accepted_at_pos"])
    assert sum(speculation["verified_at_pos"]) == speculation["num_verified_draft_tokens"]
    assert sum(speculation["proposed_at_pos"]) == speculation["num_proposed_draft_tokens"]
    assert sum(speculation["verify_len_histogram"]) == len(steps)
    verified = sum(i * n for i, n in enumerate(speculation["verify_len_histogram"]))
    assert verified == speculation["num_verified_draft_tokens"] == sum(s["verify_len"] for s in steps)
    assert all(s["rows"] == s["verify_len"] + 1 for s in steps)
    if not steps:
        assert speculation["mean_acceptance_length"] is None
    else:
        mean = max(0, len(delivered) - 1) / len(steps)
        assert speculation["mean_acceptance_length"] == pytest.approx(mean)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_rejected_end_token_does_not_end_the_answer(
    mode: str, mix_folders: dict[str, Path], build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    def build(folder: Path) -> Path:
        target = mix.mix_table()
        drafter = bigram.BigramDrafter(kind="anti", decoy=bigram.IM_END, confidence=lambda token: 3.0)
        return bigram.write_bigram_drafter(folder, target, drafter, shape=mix.MIX_SHAPE)

    opened = runner(mix_folders["target"], build_once("mix-drafts-end", build))
    prompts = random_prompts(4, 20)
    plain = opened.ids({"prompt_ids": p, "mode": "off", "max_tokens": 40} for p in prompts)
    for outcome, ids in zip(
        opened.watch({"prompt_ids": p, "mode": mode, "max_tokens": 40} for p in prompts), plain, strict=True
    ):
        assert outcome.ids == ids
        assert len(ids) == 40
        assert outcome.result["finish_reason"] == "length"
        if mode == "static":
            assert outcome.result["speculation"]["num_verified_draft_tokens"] > 0


@pytest.mark.parametrize("kind", ["oracle", "half", "anti"])
def test_token_budget_is_kept_to_the_token(kind: str, mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders[kind])
    prompt = [333, 334]
    endless = opened.ids([{"prompt_ids": prompt, "mode": "off", "max_tokens": 64}])[0]
    lines = [
        {"prompt_ids": prompt, "mode": mode, "max_tokens": n, "block_size": 5}
        for mode in ALL_MODES
        for n in (1, 2, 4, 5, 6, 7, 11, 64)
    ]
    for outcome, line in zip(opened.watch(lines), lines, strict=True):
        assert outcome.ids == endless[: line["max_tokens"]]
        assert outcome.result["finish_reason"] == "length"
        check_accounts(outcome)


@pytest.mark.parametrize("kind", ["oracle", "anti"])
def test_budget_and_end_token_in_the_same_block(kind: Any, build_once: Callable[..., Any], runner: OpenRunner) -> None:
    played = tape.one_tape(*(f"piece {n}, ".encode() for n in range(9)))
    target = build_once("tape-nine", lambda folder: tape.write_tape(folder, played))
    table = played.table()
    drafter = build_once(
        f"tape-nine-{kind}", lambda f: bigram.write_bigram_drafter(f, table, bigram.BigramDrafter(kind=kind))
    )
    ids = list(played.ids[0])
    lines = [
        {"prompt_ids": [65], "mode": m, "max_tokens": n} for m in ALL_MODES for n in (1, 5, 6, 7, 8, 9, 10, 11, 64)
    ]
    for outcome, line in zip(runner(target, drafter).watch(lines), lines, strict=True):
        limit = line["max_tokens"]
        assert outcome.ids == ids[:limit]
        assert outcome.result["text"] == outcome.streamed() == played.text(0, limit)
        assert outcome.result["finish_reason"] == ("length" if limit <= 9 else "stop")
        check_accounts(outcome)


def test_end_token_as_the_very_first_token_gives_an_empty_answer(
    build_once: Callable[..., Any], runner: OpenRunner
) -> None:
    table = bigram.Table((bigram.IM_END,), bigram.torch.zeros(1, 1), bigram.torch.zeros(1))
    target = build_once("ends-at-once", lambda folder: bigram.write_bigram(folder, table))
    drafter = build_once("ends-at-once-oracle", lambda f: bigram.write_bigram_drafter(f, table, bigram.BigramDrafter()))
    for outcome in runner(target, drafter).watch({"prompt_ids": [65], "mode": m} for m in ALL_MODES):
        assert (outcome.ids, outcome.result["text"]) == ([], "")
        assert (outcome.result["finish_reason"], outcome.result["stop"]) == ("stop", bigram.IM_END)
        check_accounts(outcome)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_stop_string_cuts_the_text_before_it(mode: str, build_once: Callable[..., Any], runner: OpenRunner) -> None:
    played = tape.one_tape(b"one ", b"tw", b"o th", b"ree EN", b"D four", b" five")
    target = build_once("tape-stops", lambda folder: tape.write_tape(folder, played))
    table = played.table()
    drafter = build_once("tape-stops-oracle", lambda f: bigram.write_bigram_drafter(f, table, bigram.BigramDrafter()))
    cases = {("END",): "one two three ", ("two three",): "one ", ("three E", "one"): "", ("ENDE", "EN!"): None}
    lines = [{"prompt_ids": [65], "mode": mode, "stop": list(stop)} for stop in cases]
    for outcome, (stop, text) in zip(runner(target, drafter).watch(lines), cases.items(), strict=True):
        result = outcome.result
        if text is None:
            assert (result["finish_reason"], result["text"]) == ("stop", "one two three END four five")
        else:
            assert (result["finish_reason"], result["text"]) == ("stop_string", text)
            assert result["stop"] in stop
        assert outcome.streamed() == result["text"]
        check_accounts(outcome)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_context_limit_ends_the_answer(mode: str, mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"], context=64)
    outcome, full, over = opened.watch(
        [
            {"prompt_ids": [301] * 50, "mode": mode},
            {"prompt_ids": [301] * 64, "mode": mode},
            {"prompt_ids": [301] * 65, "mode": mode},
        ]
    )
    assert len(outcome.ids) == 14
    assert outcome.result["finish_reason"] == "length"
    check_accounts(outcome)
    for refused in (full, over):
        assert refused.result["finish_reason"] == "error"
        assert "64" in refused.result["error"]
        assert refused.ids == []
