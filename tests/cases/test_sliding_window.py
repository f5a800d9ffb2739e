"""A target with sliding windows of 16 keeps its tokens when drafts are rolled back, also over a whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Runner, assert_same, random_prompts, to_request

OpenRunner = Callable[..., Runner]
KINDS = ("oracle", "half", "anti")


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_length_around_the_window_gives_the_plain_tokens(
    kind: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    target = mix_folders["window"]
    opened = runner(target, mix_folders[kind], concurrency=16)
    prompts = [random_prompts(2, n, seed=n)[1] for n in (1, *range(11, 22), 100)]
    options = {"max_tokens": 26, "ignore_eos": True}
    plain = opened.ids({"prompt_ids": p, "mode": "off", **options} for p in prompts)
    for mode in MODES:
        ours = opened.ids({"prompt_ids": p, "mode": mode, **options} for p in prompts)
        assert_same(target, prompts, ours, plain)


@pytest.mark.parametrize(
    ("target", "kind", "mode"),
    [
        ("target", "half", "static"),
        ("window", "half", "off"),
        ("window", "half", "static"),
        ("window", "half", "compact"),
        ("window", "anti", "cap-accept"),
    ],
)
def test_a_long_session_answers_like_a_fresh_one(
    target: str, kind: str, mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    opened = runner(mix_folders[target], mix_folders[kind], concurrency=2)
    session = f"{target}-{kind}-{mode}"
    transcript: list[int] = []
    answered = 0
    for turn in range(4):
        transcript += random_prompts(2, 7 + 6 * turn, seed=turn)[1]
        line: dict[str, Any] = {"prompt_ids": transcript, "mode": mode, "max_tokens": 30, "ignore_eos": True}
        fresh = opened.run([line])[0]
        kept = opened.run([{**line, "session": session}])[0]
        assert_same(mix_folders[target], [transcript], [kept["token_ids"]], [fresh["token_ids"]])
        assert fresh["usage"]["cached_tokens"] == 0
        # All but the last delivered token and the new message have been computed before.
        assert kept["usage"]["cached_tokens"] >= answered - 1
        transcript = [*transcript, *kept["token_ids"]]
        answered = len(transcript)


@pytest.mark.parametrize(
    ("target", "mode"), [("target", "static"), ("window", "off"), ("window", "static"), ("window", "compact")]
)
def test_an_edited_message_is_answered_like_a_fresh_one(
    target: str, mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    opened = runner(mix_folders[target], mix_folders["half"], concurrency=2)
    first, second, edited = random_prompts(3, 40, seed=4)[2], [301] * 9, [302] * 9
    options: dict[str, Any] = {"mode": mode, "max_tokens": 30, "ignore_eos": True}
    session = {"session": f"edit-{target}-{mode}"}
    answer = opened.ids([{"prompt_ids": first, **options, **session}])[0]
    opened.ids([{"prompt_ids": [*first, *answer, *second], **options, **session}])
    for prompt in ([*first, *answer, *edited], [*first[:10], *edited], first[:3], [*first, *answer, *second]):
        kept = opened.ids([{"prompt_ids": prompt, **options, **session}])
        fresh = opened.ids([{"prompt_ids": prompt, **options}])
        assert_same(mix_folders[target], [prompt], kept, fresh)


def test_a_cancelled_answer_can_be_continued(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["window"], mix_folders["half"], concurrency=2)
    engine, prompt = opened.engine, random_prompts(2, 30, seed=8)[1]
    line = {"id": "cut", "prompt_ids": prompt, "mode": "static", "max_tokens": 200, "session": "s", "ignore_eos": True}
    events = engine.submit(to_request(line, 0))
    for _ in range(15):
        events += engine.step()
    events += engine.cancel("cut")
    result = events[-1]["result"]
    assert result["finish_reason"] == "cancelled"
    assert 0 < len(result["token_ids"]) < 200
    assert not engine.has_work
    follow_up = [*prompt, *result["token_ids"], 305, 306]
    options = {"prompt_ids": follow_up, "mode": "static", "max_tokens": 50, "ignore_eos": True}
    kept = opened.run([{**options, "session": "s"}])[0]
    assert kept["usage"]["cached_tokens"] >= len(prompt) + len(result["token_ids"]) - 1
    assert_same(mix_folders["window"], [follow_up], [kept["token_ids"]], opened.ids([options]))


def test_many_sessions_take_turns_on_few_slots(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["window"], mix_folders["half"], concurrency=2)
    prompts = random_prompts(9, 50, seed=6)
    options = {"mode": "static", "max_tokens": 30, "ignore_eos": True}
    plain = opened.ids({"prompt_ids": p, **options, "mode": "off"} for p in prompts)
    for _ in range(2):
        ours = opened.ids({"prompt_ids": p, **options, "session": f"s{n % 5}"} for n, p in enumerate(prompts))
        assert_same(mix_folders["window"], prompts, ours, plain)
