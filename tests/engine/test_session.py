"""Turns of one conversation: what was computed is used again, and the answer is that of a fresh conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import Outcome, Runner, random_prompts, to_request
from engine.conftest import NAN_TOKEN

OpenRunner = Callable[..., Runner]
Record = dict[str, Any]
OPTIONS: Record = {"mode": "static", "max_tokens": 16, "ignore_eos": True}
PROMPT = random_prompts(2, 30, seed=21)[1]


def same_as_fresh(opened: Runner, prompt: list[int], session: str, **options: Any) -> Outcome:
    """Answer in the session and without one: tokens, drafts and confidences agree."""
    line = {**OPTIONS, **options, "prompt_ids": prompt}
    (kept,) = opened.watch([{**line, "session": session}])
    (fresh,) = opened.watch([line])
    assert kept.result["error"] is None
    assert kept.ids == fresh.ids
    assert [s["draft_ids"] for s in kept.steps] == [s["draft_ids"] for s in fresh.steps]
    for ours, theirs in zip(kept.steps, fresh.steps, strict=True):
        assert ours["confidence_logit"] == pytest.approx(theirs["confidence_logit"], abs=1e-4)
    assert fresh.result["usage"]["cached_tokens"] == 0
    return kept


def cached(outcome: Outcome) -> int:
    assert outcome.of_kind("start")[0]["cached_tokens"] == outcome.result["usage"]["cached_tokens"]
    return outcome.result["usage"]["cached_tokens"]


@pytest.mark.parametrize("mode", ["off", "static", "compact", "cap-accept"])
def test_the_next_turn_computes_only_what_is_new(mode: str, tiny: Runner) -> None:
    session, transcript, known = f"turns-{mode}", list(PROMPT), 0
    for turn in range(3):
        answer = same_as_fresh(tiny, transcript, session, mode=mode)
        assert cached(answer) == known
        transcript += answer.ids
        known = len(transcript) - 1  # the newest token has not been run
        transcript += [310 + turn, 320 + turn]


def test_an_edited_message_keeps_what_is_before_it(tiny: Runner) -> None:
    first = same_as_fresh(tiny, PROMPT, "edit")
    whole = [*PROMPT, *first.ids, 305]
    same_as_fresh(tiny, whole, "edit")
    edited = [*PROMPT[:12], 400, *PROMPT[13:], 401]
    assert cached(same_as_fresh(tiny, edited, "edit")) == 12
    assert cached(same_as_fresh(tiny, whole, "edit")) == 12
    assert cached(same_as_fresh(tiny, whole, "edit")) == len(whole) - 1  # asked again
    assert cached(same_as_fresh(tiny, whole[:5], "edit")) == 4
    assert cached(same_as_fresh(tiny, [499, 498], "edit")) == 0


def test_modes_may_change_from_turn_to_turn(tiny: Runner) -> None:
    transcript = list(PROMPT)
    for mode in ("off", "static", "off", "compact", "off", "cap-accept"):
        transcript += same_as_fresh(tiny, transcript, "mixed", mode=mode).ids


def test_a_sliding_window_that_cannot_go_back_starts_anew(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["window"], mix_folders["half"], context=1024)
    long = [301 + n % 150 for n in range(820)]
    line = {**OPTIONS, "prompt_ids": long, "session": "w", "max_tokens": 4}
    opened.run([line])
    near, far = [*long[:800], 310], [*long[:60], 310]
    for prompt, at_least in ((near, 800), (far, 0)):
        kept, fresh = opened.run([{**line, "prompt_ids": prompt}, {**line, "prompt_ids": prompt, "session": None}])
        assert kept["token_ids"] == fresh["token_ids"]
        assert kept["usage"]["cached_tokens"] == at_least


# Endings out of turn


def begin(opened: Runner, *lines: Record) -> list[Record]:
    return [event for n, line in enumerate(lines) for event in opened.engine.submit(to_request(line, n))]


def finish(opened: Runner) -> list[Record]:
    events = []
    while opened.engine.has_work:
        events += opened.engine.step()
    return events


def results(events: list[Record]) -> dict[str, Record]:
    return {event["id"]: event["result"] for event in events if event["event"] == "end"}


@pytest.mark.parametrize("mode", ["off", "static", "compact", "cap-accept"])
def test_a_cancelled_answer_is_kept_and_goes_on(mode: str, tiny: Runner) -> None:
    session = f"cancelled-{mode}"
    begin(tiny, {**OPTIONS, "prompt_ids": PROMPT, "mode": mode, "session": session, "max_tokens": 200})
    for _ in range(5):
        tiny.engine.step()
    result = results(tiny.engine.cancel("r0"))["r0"]
    assert (result["finish_reason"], result["mode"]) == ("cancelled", mode)
    assert 3 <= len(result["token_ids"]) < 200
    assert not tiny.engine.has_work
    follow_up = [*PROMPT, *result["token_ids"], 305, 306]
    assert cached(same_as_fresh(tiny, follow_up, session, mode=mode)) == len(follow_up) - 3


def test_cancelling_before_the_first_token(tiny_pair: Any, runner: OpenRunner) -> None:
    """In the middle of a long prompt, after its first chunk of 256 tokens; and before any of it."""
    opened = runner(tiny_pair.target, tiny_pair.drafter, context=1024)
    long = random_prompts(2, 700, seed=2)[1]
    for steps, known in ((0, 0), (1, 256), (2, 512)):
        session = f"prompt-{steps}"
        line = {**OPTIONS, "prompt_ids": long, "session": session}
        events = begin(opened, line)
        for _ in range(steps):
            events += opened.engine.step()
        (end,) = opened.engine.cancel("r0")
        assert end["result"]["finish_reason"] == "cancelled"
        assert (end["result"]["token_ids"], end["result"]["timing"]["ttft_ms"]) == ([], None)
        assert [e["event"] for e in events] == (["start"] if steps else [])
        assert not opened.engine.has_work
        assert cached(same_as_fresh(opened, long, session, max_tokens=6)) == known


def test_cancelling_what_waits_disturbs_nobody(tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(tiny_pair.target, tiny_pair.drafter, concurrency=1)
    lines = [{**OPTIONS, "prompt_ids": [301 + n, 302], "id": name} for n, name in enumerate("abc")]
    expected = [opened.ids([line])[0] for line in lines]
    events = begin(opened, *lines)
    for _ in range(3):
        events += opened.engine.step()
    (end,) = opened.engine.cancel("b")
    assert (end["id"], end["result"]["finish_reason"], end["result"]["token_ids"]) == ("b", "cancelled", [])
    assert opened.engine.cancel("b") == opened.engine.cancel("nobody") == []
    events += finish(opened)
    found = results(events)
    assert [found["a"]["token_ids"], found["c"]["token_ids"]] == [expected[0], expected[2]]
    assert "b" not in found
    assert [e["id"] for e in events if e["event"] == "start"] == ["a", "c"]


def test_a_hundred_cancelled_requests_leave_no_row_behind(tiny: Runner) -> None:
    expected = tiny.ids([{**OPTIONS, "prompt_ids": PROMPT}])
    for n in range(100):
        begin(tiny, {**OPTIONS, "prompt_ids": [301, 302 + n], "session": f"gone-{n}" if n % 2 else None})
        for _ in range(n % 4):
            tiny.engine.step()
        assert results(tiny.engine.cancel("r0"))["r0"]["finish_reason"] == "cancelled"
    assert not tiny.engine.has_work
    assert tiny.ids([{**OPTIONS, "prompt_ids": PROMPT}] * 4) == expected * 4


def test_two_requests_of_one_session_take_turns(tiny: Runner) -> None:
    line = {**OPTIONS, "session": "queue"}
    first, other = {**line, "prompt_ids": PROMPT}, {**OPTIONS, "prompt_ids": [350, 351], "max_tokens": 40}
    expected = [tiny.ids([{**first, "session": None}])[0], tiny.ids([other])[0]]
    second = {**line, "prompt_ids": [*PROMPT, *expected[0], 360]}
    expected.insert(1, tiny.ids([{**second, "session": None}])[0])
    outcomes = tiny.watch([first, second, other])
    assert [o.ids for o in outcomes] == expected
    assert cached(outcomes[1]) == len(PROMPT) + len(expected[0]) - 1
    # The third did not wait for the second.
    started = {n: o.of_kind("start")[0]["t_ns"] for n, o in enumerate(outcomes)}
    assert started[2] < started[1]
    # A queued request whose forerunner is cancelled goes on from what is there.
    events = begin(tiny, {**first, "max_tokens": 100}, second)
    for _ in range(4):
        events += tiny.engine.step()
    events += tiny.engine.cancel("r0") + finish(tiny)
    assert results(events)["r1"]["token_ids"] == expected[1]


def test_an_error_in_the_middle_frees_the_session(damaged_target: Path, tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(damaged_target, tiny_pair.drafter)
    plain = {"mode": "off"}  # a random drafter proposes the damaged token too
    good = same_as_fresh(opened, PROMPT, "error", **plain)
    transcript = [*PROMPT, *good.ids]
    (broken,) = opened.run([{**OPTIONS, **plain, "prompt_ids": [*transcript, NAN_TOKEN, 301], "session": "error"}])
    assert broken["finish_reason"] == "error"
    assert broken["usage"]["cached_tokens"] == len(transcript) - 1
    assert cached(same_as_fresh(opened, [*transcript, 302], "error", **plain)) == 0
    assert cached(same_as_fresh(opened, [*transcript, 302, 303], "error", **plain)) > len(transcript)


def test_a_refused_request_leaves_the_session_alone(tiny: Runner) -> None:
    good = same_as_fresh(tiny, PROMPT, "refused")
    (refused,) = tiny.run([{**OPTIONS, "prompt_ids": [*PROMPT, 9999], "session": "refused"}])
    assert refused["finish_reason"] == "error"
    follow_up = [*PROMPT, *good.ids, 300]
    assert cached(same_as_fresh(tiny, follow_up, "refused")) == len(follow_up) - 2


def test_idle_sessions_give_way_oldest_first(tiny_pair: Any, runner: OpenRunner) -> None:
    """One request at a time has two rows: the running one and one idle session."""
    opened = runner(tiny_pair.target, tiny_pair.drafter, concurrency=1)
    line = {**OPTIONS, "max_tokens": 4}

    def ask(session: str | None) -> int:
        (result,) = opened.run([{**line, "prompt_ids": [*PROMPT, 1], "session": session}])
        return result["usage"]["cached_tokens"]

    assert [ask("a"), ask("a"), ask("b"), ask("a")] == [0, 30, 0, 30]
    assert ask(None) == 0  # takes the row of b, which was used before a
    assert [ask("a"), ask("b"), ask("b")] == [30, 0, 30]
    assert same_as_fresh(opened, [*PROMPT, 1, 2], "a")
