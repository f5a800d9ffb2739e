"""The engine over a checkpoint folder: every mode gives plain decoding's tokens, and conversations go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import MODES, Runner, open_runner
from fixtures.deepseek_v4 import write_tiny_v4
from fixtures.tokenizer import TokenizerSpec, write_tokenizer
from models.pairs import random_ids

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = (3, 18, 37, 130)


@pytest.fixture
def folder(build_once: Callable[..., Any]) -> Path:
    """Random weights in the published layout: nearly every draft is rejected."""

    def build(path: Path) -> Path:
        write_tiny_v4(path)
        write_tokenizer(path, TokenizerSpec())
        return path

    return build_once("v4-engine", build)


@pytest.fixture
def runner(folder: Path, build_once: Callable[..., Any]) -> Runner:
    return build_once("v4-engine-runner", lambda _: open_runner(folder, folder, context=400))


def prompts() -> list[list[int]]:
    return [(random_ids(n, seed=n) + 2).tolist() for n in LENGTHS]


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_plain_decoding(runner: Runner, folder: Path, mode: str, build_once: Callable[..., Any]) -> None:
    """Four requests side by side; entries of 4 and 16 tokens and windows of 16 are crossed many times."""

    def plain(_: Path) -> list[list[int]]:
        lines = [{"prompt_ids": p, "max_tokens": 32, "mode": "off", **GREEDY} for p in prompts()]
        return open_runner(folder, context=400).ids(lines)

    wanted = build_once("v4-engine-plain", plain)
    lines = [{"prompt_ids": p, "max_tokens": 32, "mode": mode, **GREEDY} for p in prompts()]
    assert runner.ids(lines) == wanted
    assert [len(ids) for ids in wanted] == [32] * len(LENGTHS)


def ask(runner: Runner, ids: list[int], session: str | None) -> tuple[list[int], int]:
    """Eight tokens, and how many of the prompt were cached."""
    request: dict[str, Any] = {"prompt_ids": ids, "max_tokens": 8, **GREEDY}
    result = runner.run([request if session is None else {**request, "session": session}])[0]
    assert result["error"] is None
    return result["token_ids"], result["usage"]["cached_tokens"]


def test_a_conversation_equals_fresh_ones(runner: Runner) -> None:
    """Turns that go on from what is cached, one that edits the last message, one that edits the first."""
    text = prompts()[1]
    for turn in range(3):
        answer, cached = ask(runner, text, "s")
        assert answer == ask(runner, text, None)[0]
        assert (cached > 0) == (turn > 0)
        text = text + answer + [10 + turn, 7]
    edited = [*text[:-20], 5, 5, 5]
    answer, cached = ask(runner, edited, "s")
    assert answer == ask(runner, edited, None)[0] and cached > 0
    other = [8, 8, *text[2:40]]
    answer, cached = ask(runner, other, "s")
    assert answer == ask(runner, other, None)[0] and cached == 0


def test_the_prompt_may_be_cut_anywhere(runner: Runner) -> None:
    """A prompt longer than a pass is read in chunks; its answer is that of the same text read in one session."""
    text = (random_ids(330, seed=9) + 2).tolist()
    whole = ask(runner, text, None)[0]
    ask(runner, text[:203], "c")
    answer, cached = ask(runner, text, "c")
    assert answer == whole and cached > 190


def test_it_is_described(runner: Runner) -> None:
    config = runner.engine.pair.target.config
    assert config.architecture == "DeepseekV4ForCausalLM" and config.dtype_name == "float32"
    assert config.kv_dtype == torch.float32 and config.kv_bytes_per_token > 0
