"""DeepSeek V4 through ``run``: the checkpoint's own drafters, and thinking apart from the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Cli, Done, child_environment
from fixtures.commands import run_forked
from fixtures.deepseek_v4 import v4_config, write_json
from fixtures.deepseek_v4_script import ANSWER, MARKERS, THOUGHT, WORDS, write_script_v4
from sparkchat.deepseek_prompt import ASSISTANT, BOS, EFFORTS, END_THINK, THINK, USER


@pytest.fixture
def cli() -> Cli:
    """Commands in forks of a process that has imported everything: what is tested here is what comes after."""

    def run(*args: str | Path, stdin: str = "") -> Done:
        code, out, err = run_forked([str(arg) for arg in args], stdin.encode(), child_environment(), 60)
        return Done(code, out.decode(), err.decode())

    return run


SMALL = ("--device", "cpu", "--context", "128", "--temperature", "0")


@pytest.fixture
def folder_of(build_once: Callable[..., Any]) -> Callable[[str], Path]:
    return lambda drafter: build_once(
        f"v4-script-{drafter}", lambda path: write_script_v4(path / "v4", drafter=drafter)
    )


def prompt_ids(text: str, tag: str) -> list[int]:
    ids = [MARKERS.index(BOS), MARKERS.index(USER), *(b for b in map(_byte_id, text)), MARKERS.index(ASSISTANT)]
    return [*ids, MARKERS.index(tag)]


def _byte_id(char: str) -> int:
    return len(MARKERS) + ord(char)


def test_dspark_drafts_and_thinking_has_a_channel_of_its_own(cli: Cli, folder_of: Callable[[str], Path]) -> None:
    done = cli("run", folder_of("dspark"), "--think", "--mode", "static", "--jsonl", *SMALL, "Hi")
    assert done.code == 0, done.err
    events = [json.loads(line) for line in done.out.splitlines()]
    result = events[-1]
    texts: dict[str, str] = {"thinking": "", "answer": ""}
    for event in events:
        if event["event"] == "delta":
            texts[event["channel"]] += event["text"]
    assert texts == {"thinking": "".join(THOUGHT), "answer": "".join(ANSWER)}
    assert (result["text"], result["thinking"]) == (texts["answer"], texts["thinking"])
    assert result["prompt_token_ids"] == prompt_ids("Hi", THINK)
    assert result["token_ids"] == [*(WORDS[w] for w in THOUGHT), MARKERS.index(END_THINK), *(WORDS[w] for w in ANSWER)]
    assert result["finish_reason"] == "stop"
    # One token from the prompt pass, a whole block with the model's own token behind it, then "." before the end token.
    assert [event["correct_drafts"] for event in events if event["event"] == "step"] == [5, 1]


def test_mtp_drafts_the_previews_answer_without_thinking(cli: Cli, folder_of: Callable[[str], Path]) -> None:
    done = cli("run", folder_of("mtp"), "--no-think", "--mode", "static", "--block-size", "2", "--json", *SMALL, "Hi")
    assert done.code == 0, done.err
    result = done.json
    assert (result["text"], result["finish_reason"]) == ("".join(ANSWER), "stop")
    assert result["prompt_token_ids"] == prompt_ids("Hi", END_THINK)
    # One token from the prompt pass, two drafts with "." behind them, and a step that meets the end token.
    assert result["speculation"]["num_accepted_draft_tokens"] == result["speculation"]["num_steps"] == 2


def test_a_chat_shows_thinking_apart_and_goes_on(cli: Cli, folder_of: Callable[[str], Path]) -> None:
    done = cli("run", folder_of("dspark"), "--plain", "--think", *SMALL, stdin="Hi\nAgain\n/quit\n")
    assert done.code == 0, done.err
    assert done.out.count("".join(ANSWER)) == 2
    assert done.out.count("thinking ...") == 2
    assert "".join(THOUGHT) not in done.out and THINK not in done.out and END_THINK not in done.out


def test_made_up_weights_run_over_two_ranks(cli: Cli, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", v4_config(hc_sinkhorn_iters=2))
    flags = ("--dummy-weights", "--tp", "2", "--mode", "static", "--max-tokens", "6", "--ignore-eos", "--json")
    done = cli("run", tmp_path, *flags, "--prompt-ids", "5,6,7", *SMALL)
    assert done.code == 0, done.err
    assert len(done.json["token_ids"]) == 6
    assert done.json["speculation"]["num_proposed_draft_tokens"] > 0
    assert "the weights are random" in done.err


@pytest.mark.parametrize("profile, level", [("deepseek-v4-flash", "high"), ("deepseek-v4-flash-preview", "max")])
def test_a_level_of_effort_is_the_publishers_text_of_that_release(
    profile: str, level: str, cli: Cli, folder_of: Callable[[str], Path]
) -> None:
    """What the newer release calls high is what the older one called max."""
    flags = ("--profile", profile, "--reasoning-effort", level, "--device", "cpu", "--temperature", "0", "--json")
    folder = folder_of("mtp" if "preview" in profile else "dspark")
    done = cli("run", folder, *flags, "--context", "1024", "--mode", "off", "Hi")
    assert done.code == 0, done.err
    first, *rest = prompt_ids("Hi", THINK)
    spelt = [WORDS.get(char, _byte_id(char)) for char in EFFORTS["preview"]["max"]]
    assert done.json["prompt_token_ids"] == [first, *spelt, *rest]
    assert done.json["text"] == "".join(ANSWER)


def test_levels_in_a_chat_and_where_there_are_none(cli: Cli, folder_of: Callable[[str], Path]) -> None:
    flags = ("--plain", "--profile", "deepseek-v4-flash", "--device", "cpu", "--temperature", "0", "--context", "1024")
    lines = ["/think high", "Hi", "/think off", "Hi", "/think medium", "/think auto", "/quit", ""]
    done = cli("run", folder_of("dspark"), *flags, stdin="\n".join(lines))
    assert done.code == 0, done.err
    for words in ("thinking: on, effort high", "thinking: off\n", "give on, off, auto, low, high, max, show or hide"):
        assert words in done.out, done.out
    assert done.out.count("thinking ...") == 1 and done.out.count("".join(ANSWER)) == 2
    assert "thinking: auto (the model's template decides)\n" in done.out
    unknown = cli("run", folder_of("dspark"), "--reasoning-effort", "high", *SMALL, "Hi")
    assert unknown.code == 2 and "does not say which release" in unknown.err and "--profile" in unknown.err
    off = cli("run", folder_of("dspark"), "--reasoning-effort", "high", "--no-think", *SMALL, "Hi")
    assert off.code == 2 and "--reasoning-effort high says how long to think, and thinking was switched off" in off.err
    exact = cli("run", folder_of("dspark"), "--reasoning-effort", "high", *SMALL, "--prompt-ids", "5")
    assert exact.code == 2 and "--reasoning-effort has no place with --prompt-ids" in exact.err
