"""How a token came about, and settings that change while tokens come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkchat.ui.document import Section
from sparkchat.ui.glyphs import UNICODE
from sparkchat.ui.scripted import ScriptedOptions
from sparkchat.ui.step_log import StepRecord
from sparkchat.ui.token_detail import token_at, token_line, walked
from ui.chat import make_config

Open = Callable[..., Any]
STEPS = [
    StepRecord({"i": 0, "draft_text": ["ab", "c"], "draft_ids": [1, 2], "correct_drafts": 2, "verify_len": 2}, "D"),
    StepRecord(
        {
            "i": 1,
            "draft_text": ["x", "y\x1b[0m"],
            "draft_ids": [1, 2],
            "draft_prob": [0.5, 0.25],
            "survival": [0.9, 0.4],
            "correct_drafts": 1,
            "verify_len": 2,
            "reject": {"pos": 1, "draft_id": 2, "target_id": 9, "p_draft": 0.25, "p_target": 0.125, "target_rank": 4},
        },
        "Z",
    ),
    StepRecord({"i": 2, "draft_text": [], "draft_ids": [], "correct_drafts": 0, "verify_len": 0}, "p"),
]


def marked() -> Section:
    made = Section("markdown", "", 40, UNICODE)
    for text, origin, step in (
        *(("first ", "prefill", None), ("abc", "draft", 0), ("D", "bonus", 0)),
        *(("x", "draft", 1), ("Z", "corrected", 1), ("p", "plain", 2)),
    ):
        made.append(text)
        made.mark_origin(origin, step)
    return made


def lines(section: Section) -> list[str]:
    found, offset = [], 0
    while (token := token_at(section, offset, STEPS)) is not None:
        step = STEPS[token.step] if token.step is not None else None
        found.append(token_line(token, step))
        offset = token.end
    return found


def test_every_token_says_how_it_came_about() -> None:
    assert lines(marked()) == [
        "'first ' from the prompt pass, before any draft",
        "'ab' draft 1, accepted: survival -, p(draft) -, step 1",
        "'c' draft 2, accepted: survival -, p(draft) -, step 1",
        "'D' the target's own, after 2 accepted drafts, step 1",
        "'x' draft 1, accepted: survival 0.90, p(draft) 0.50, step 2",
        "'Z' chosen by the target over draft 2 'y\\x1b[0m': p(draft) 0.25, p(target) 0.12, rank 4, step 2",
        "'p' plain decoding, nothing drafted, step 3",
    ]


def test_a_token_whose_step_is_gone_says_so() -> None:
    token = token_at(marked(), 7, [])
    assert token is not None and (token.start, token.end) == (6, 9)
    assert "not at hand" in token_line(token, None)
    assert token_at(Section("plain", "", 40, UNICODE), 0, STEPS) is None


def test_walking_visits_every_token_once_in_both_directions() -> None:
    first, second = marked(), marked()
    sections = [first, Section("plain", "user", 40, UNICODE), second]
    at, seen = None, []
    for _ in range(20):
        found = walked(sections, at, -1)
        assert found is not None
        at = token_at(*found, STEPS)
        seen.append((at.section is second, at.start))
    assert seen[:14] == [(True, o) for o in (12, 11, 10, 9, 8, 6, 0)] + [(False, o) for o in (12, 11, 10, 9, 8, 6, 0)]
    assert set(seen[14:]) == {(False, 0)}
    found = walked(sections, at, 1)
    assert found == (first, 6) and walked([], None, 1) is None


async def test_a_token_can_be_chosen_and_its_step_opened(chat: Open) -> None:
    async with chat(size=(120, 40), options=ScriptedOptions(tokens_per_second=2000, accuracy=0.4)) as c:
        await c.ready()
        await c.say("short")
        await c.pilot.press("alt+left")
        await c.pilot.pause()
        for _ in range(12):
            if "chosen by the target over" in c.screen:
                break
            await c.pilot.press("alt+left")
            await c.pilot.pause()
        assert "chosen by the target over" in c.screen and "F4 step" in c.screen
        step = c.app._token.step
        await c.pilot.press("f4")
        await c.pilot.pause()
        assert f"{step + 1} of {c.app.chat._snapshot.num_steps} steps" in c.screen
        assert "rejected" in c.screen and "p(target)" in c.screen
        await c.pilot.press("escape")
        await c.send("/stats")
        await c.pilot.pause()
        assert "chosen by the target over" in c.screen
        await c.send("/edit")
        await c.pilot.pause()
        assert "chosen by the target over" not in c.screen and c.app._token is None


async def test_clicks_unfold_copy_and_explain(chat: Open) -> None:
    text = "say\n```python\nprint('x')\n```\nend"
    async with chat(size=(80, 30), options=ScriptedOptions(tokens_per_second=2000, text=text)) as c:
        await c.ready()
        await c.say("x")
        rows = c.screen.split("\n")
        y = next(y for y, row in enumerate(rows) if "code 1 python" in row)
        top = c.app.transcript.region.y
        await c.pilot.click("#transcript", offset=(4, y - top))
        await c.pilot.pause()
        assert c.app.clipboard == "print('x')"
        await c.pilot.press("f3")
        await c.pilot.click("#transcript", offset=(1, y - 1 - top))
        await c.pilot.pause()
        assert "from the prompt pass" in c.screen


async def test_settings_change_in_mid_answer_and_are_marked_in_the_trace(chat: Open, tmp_path: Path) -> None:
    path = tmp_path / "t.spark.jsonl"
    config = make_config(trace_path=path, max_tokens=400)
    async with chat(size=(120, 40), config=config, options=ScriptedOptions(tokens_per_second=15)) as c:
        await c.ready()
        await c.send("think prose")
        await c.until(lambda: c.app.chat.active and c.app.chat.active.channel == "thinking")
        await c.send("/think off")
        await c.until(lambda: "think True -> False" in c.status)
        await c.send("/set temperature 0.25")
        await c.until(lambda: "temperature 0.0 -> 0.25, from this step on" in c.status)
        await c.send("/set seed 7")
        await c.until(lambda: "seed = 7 from the next answer on" in c.status)
        await c.pilot.press("escape")
        await c.answered()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changes = [line["changes"] for line in lines if line["type"] == "setting_change"]
    assert changes == [{"think": {"from": True, "to": False}}, {"temperature": {"from": 0.0, "to": 0.25}}]
    assert all(line["turn"] == 0 and line["t_ns"] for line in lines if line["type"] == "setting_change")
