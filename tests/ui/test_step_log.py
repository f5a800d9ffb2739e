"""The steps that the inspector can still show, and what it says of those that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkchat.ui.glyphs import UNICODE
from sparkchat.ui.inspection import inspection_rows
from sparkchat.ui.scripted import ScriptedOptions
from sparkchat.ui.step_log import BLOCK, StepLog

Open = Callable[..., Any]


def numbers(log: StepLog, request_id: str) -> list[int]:
    return [record.step["i"] for record in log.of(request_id)]


def step(request_id: str, number: int) -> dict[str, Any]:
    return {
        "event": "step",
        "id": request_id,
        "i": number,
        "draft_text": ["a\nb", "\ud800", "é"],
        "draft_prob": [1 / 3],
    }


def test_steps_come_back_as_they_were_whatever_was_asked_in_between() -> None:
    log = StepLog(most=10 * BLOCK)
    for number in range(70):
        log.add(step("one", number), "\n")
    for number in range(100):
        log.add(step("two", number), None)
    for number in range(70, 90):
        log.add(step("one", number), "z")
    steps = log.of("one")
    assert len(steps) == 90 and [record.step for record in steps] == [step("one", number) for number in range(90)]
    assert steps[69].bonus_text == "\n" and steps[-1].bonus_text == "z" and len(steps[60:80]) == 20
    assert numbers(log, "two") == list(range(100)) and not log.of("three") and not log.of(None)
    with pytest.raises(IndexError):
        steps[90]


def test_only_the_newest_are_kept_and_pictures_that_are_open_keep_theirs() -> None:
    log = StepLog(most=2 * BLOCK)
    log.add(step("first", 0), None)
    opened = log.of("first")
    for number in range(10 * BLOCK):
        log.add(step("long", number), None)
    kept = numbers(log, "long")
    assert not log.of("first") and opened[0].step["i"] == 0
    assert kept == list(range(kept[0], 10 * BLOCK)) and 2 * BLOCK <= len(kept) < 3 * BLOCK + 1
    log.clear()
    assert not log.of("long")


def test_a_kept_step_takes_a_fraction_of_its_text() -> None:
    log = StepLog()
    record = {f"field_{n}": [n / 7, n / 11] for n in range(40)}
    for number in range(4 * BLOCK):
        log.add({**record, "id": "x", "i": number}, None)
    assert sum(map(len, log._packed)) < 4 * BLOCK * len(str(record)) / 4


@pytest.mark.parametrize("width", [40, 76, 94])
def test_the_inspector_says_a_rejection_in_full(width: int) -> None:
    log = StepLog()
    reject = {"pos": 0, "draft_id": 1, "p_draft": 0.25, "p_target": 0.125, "target_rank": 12345}
    log.add(step("one", 0) | {"reject": reject}, " extraordinarily")
    rows = inspection_rows(log.of("one"), 0, width, 60, UNICODE)
    said = " ".join("".join(text for text, _ in row).strip() for row in rows)
    assert "rank 12345 for the target, which chose ' extraordinarily'" in said
    assert all(sum(len(text) for text, _ in row) <= width for row in rows)


def test_the_inspector_counts_what_is_gone() -> None:
    log = StepLog(most=BLOCK)
    for number in range(3 * BLOCK):
        log.add({**step("long", number), "verify_len": 1, "correct_drafts": 0}, None)
    steps = log.of("long")
    gone = 3 * BLOCK - len(steps)
    text = "\n".join("".join(part for part, _ in row) for row in inspection_rows(steps, 1, 80, 60, UNICODE))
    assert gone and f"{gone + 2} of {3 * BLOCK} steps" in text and f"first {gone} steps are not at hand" in text


async def test_a_token_whose_step_is_gone_opens_the_oldest_one_and_says_so(chat: Open) -> None:
    async with chat(size=(100, 40), options=ScriptedOptions(tokens_per_second=5000, accuracy=0.0)) as c:
        await c.ready()
        c.app.chat.records = StepLog(most=BLOCK)
        await c.say("prose")
        token = c.app._token_at(c.app.transcript.sections[1], 30)
        assert c.app.chat._snapshot.num_steps > 2 * BLOCK
        c.app._choose_token(token)
        await c.pilot.press("f4")
        await c.pilot.pause()
        assert f"step {token.step + 1}, which made the chosen token, is not at hand any more" in c.screen
        await c.pilot.press("right")
        await c.pilot.pause()
        assert "which made the chosen token" not in c.screen and "of 149 steps" in c.screen


async def test_rows_share_their_styles(chat: Open) -> None:
    """A style for every row would fill the library's caches with sixteen thousand of them."""
    from textual.strip import Strip

    async with chat(size=(100, 40), options=ScriptedOptions(tokens_per_second=5000)) as c:
        await c.ready()
        await c.say("short")
        before = Strip.render_ansi.cache_info().currsize
        await c.say("table")
        assert c.app.transcript.num_rows > 25
        for y in range(c.app.transcript.num_rows):
            c.app.transcript.render_line(y).render(c.app.console)
        assert Strip.render_ansi.cache_info().currsize - before < 25
