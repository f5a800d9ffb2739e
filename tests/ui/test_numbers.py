"""The numbers on the screen and their pictures: null stays a dash, and a picture says what the step says."""

from __future__ import annotations

from typing import Any

import pytest

from sparkchat.ui.badge import badge_text
from sparkchat.ui.glyphs import ASCII, UNICODE, Glyphs
from sparkchat.ui.inspection import KEYS
from sparkchat.ui.panel_view import number_lines, panel_rows, speed_up
from sparkchat.ui.partial import PartialAnswer
from sparkchat.ui.safe_text import text_width
from sparkchat.ui.stats import AnswerStats, Snapshot, StepMark, finish_text, result_line
from sparkchat.ui.step_view import bar, position_mark, step_rows, strip_rows

TABLE = {"rows": [1, 2], "step_ms": [20.0, 22.0], "plain_ms": 18.0}
INFO = {"drafter": "d", "reason_off": None, "cost_table": TABLE, "mode": "static"}


def step(**changes: Any) -> dict[str, Any]:
    made = {
        "event": "step",
        "id": "1",
        "i": 0,
        "t_ns": 0,
        "mode": "static",
        "mode_requested": "static",
        "draft_ids": [1, 2, 3, 4, 5],
        "draft_text": [" the", " cat", " sat", " on", " it"],
        "confidence": [0.9, 0.8, 0.5, 0.4, 0.2],
        "survival": [0.9, 0.72, 0.36, 0.14, 0.03],
        "verify_len": 4,
        "rows": 5,
        "correct_drafts": 2,
        "cap_trim": 0,
        "committed_ids": [1, 2, 9],
        "bonus_token": 9,
        "reject": {"pos": 2, "draft_id": 3, "target_id": 9, "p_draft": 0.4, "p_target": 0.1, "target_rank": 2},
        "step_ms": 24.1,
        "predicted_step_ms": 23.8,
        "tokens_per_second": None,
        "fallback": None,
    }
    return {**made, **changes}


def plain(rows: list[Any]) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]


def snapshot(**changes: Any) -> Snapshot:
    stats = AnswerStats()
    stats.add_step(step(**changes))
    return stats.snapshot(" dog")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_marks_say_what_became_of_each_draft(glyphs: Glyphs) -> None:
    marks = [position_mark(step(), position, glyphs)[0] for position in range(5)]
    assert marks == [glyphs.accepted, glyphs.accepted, glyphs.rejected, glyphs.unverified, glyphs.unverified]
    assert len({glyphs.accepted, glyphs.rejected, glyphs.unverified, glyphs.bonus, glyphs.trimmed}) == 5
    trimmed = step(reject=None, cap_trim=2, verify_len=5)
    assert [position_mark(trimmed, position, glyphs)[1] for position in range(5)] == [
        "accepted",
        "accepted",
        "trimmed",
        "trimmed",
        "unverified",
    ]


def test_step_shows_positions_cut_and_the_targets_own_token() -> None:
    rows = plain(step_rows(snapshot(), 60, 12, UNICODE))
    assert rows[0].startswith("step 1  static")
    assert "survival" in rows[1] and " verify 4 of 5 " in rows[6]
    assert "✓" in rows[2] and "cat" in rows[3] and "✗" in rows[4] and "0.36" in rows[4]
    assert "target chose ' dog'" in rows[8]


def test_requested_mode_is_shown_when_another_one_ran() -> None:
    rows = plain(step_rows(snapshot(mode="static", mode_requested="compact"), 60, 12, UNICODE))
    assert "static (asked for compact)" in rows[0]


def test_bar_is_survival_and_tick_is_confidence() -> None:
    assert plain([bar(0.5, 0.8, 10, ASCII)]) == ["#####...|."]
    assert plain([bar(1.0, 1.0, 4, ASCII)]) == ["###|"]
    assert plain([bar(None, None, 14, ASCII)]) == ["- not measured"]
    assert plain([bar(float("1e9"), -5.0, 4, ASCII)]) == ["|###"]


@pytest.mark.parametrize("size", [(38, 30), (38, 14), (100, 8), (78, 7), (40, 4), (20, 3), (9, 2), (200, 60)])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_panel_never_leaves_its_room(size: tuple[int, int], glyphs: Glyphs) -> None:
    stats = AnswerStats()
    for number in range(200):
        stats.add_step(step(i=number, draft_text=["你好\n", "\x1b[0m", "👨‍👩‍👧", "[/]", "x" * 50]))
    for shown in (stats.snapshot(), Snapshot(), snapshot(draft_ids=[], draft_text=[], verify_len=0, correct_drafts=0)):
        rows = plain(panel_rows(shown, INFO, *size, glyphs))
        assert len(rows) <= size[1]
        assert all(text_width(row) <= size[0] for row in rows)
        assert not any("\x1b" in row or "\n" in row for row in rows)
    if glyphs is ASCII:
        rows = plain(panel_rows(snapshot(), INFO, *size, glyphs))
        assert all(row.isascii() for row in rows)


def test_strip_has_one_column_a_step() -> None:
    marks = [StepMark(3, 1, "static"), StepMark(2, 2, "static"), StepMark(0, 0, "off")]
    assert plain(strip_rows(marks, 60, 4, ASCII))[1:] == [".  ", ".# ", "## "]
    long = [StepMark(1, 1, "static")] * 500
    assert all(text_width(row) <= 60 for row in plain(strip_rows(long, 60, 5, UNICODE)))


def test_running_numbers_follow_the_engines_clock() -> None:
    stats = AnswerStats()
    for number in range(21):
        stats.add_step(step(t_ns=number * 100_000_000))
    shown = stats.snapshot()
    assert shown.tokens_per_second_now == pytest.approx(30.0)
    assert shown.mean_acceptance_length == pytest.approx(3.0)
    assert (shown.num_proposed, shown.num_verified, shown.num_accepted) == (105, 84, 42)
    assert shown.mean_step_ms == pytest.approx(24.1)


def test_nothing_measured_is_a_dash_not_a_zero() -> None:
    nothing = Snapshot()
    assert nothing.mean_acceptance_length is None and nothing.tokens_per_second is None
    line = result_line({"usage": {}, "speculation": {}, "timing": {}, "mode": "off", "finish_reason": "stop"})
    assert line == "- tokens · - tok/s · acceptance length - · off · complete"
    lost = plain(panel_rows(snapshot(cap_trim=None), {}, 38, 30, UNICODE))
    assert any("lost -" in row for row in lost)


def test_an_answer_that_was_drafted_in_part_is_not_called_undrafted() -> None:
    counts = {"reason_off": "mode is off", "num_verified_draft_tokens": 129, "mean_acceptance_length": 1.07}
    result = {"usage": {}, "speculation": counts, "timing": {}, "mode": "off", "finish_reason": "stop"}
    assert "acceptance length 1.07" in result_line(result)
    counts |= {"num_verified_draft_tokens": 0, "mean_acceptance_length": 1.0}
    assert "no speculation: mode is off" in result_line(result)


def test_what_a_screen_of_80_columns_has_to_say_fits_it() -> None:
    title = plain(strip_rows([StepMark(5, 1, "static")] * 99, 38, 5, UNICODE))[0]
    assert title.startswith("last 38 steps: verified / accepted")
    assert text_width(KEYS) <= 74


def test_finish_reason_in_words() -> None:
    assert finish_text({"finish_reason": "stop_string", "stop": "\x1b"}) == "stopped at '\\x1b'"
    assert "boom" in finish_text({"finish_reason": "error", "error": "boom"})


COMPACT = {"mode": "compact", "mode_requested": "compact"}


@pytest.mark.parametrize(
    ("info", "newest", "mode", "words"),
    [
        ({}, None, "static", None),
        (INFO, None, "static", None),
        (INFO, step(), "static", None),
        ({**INFO, "drafter": None, "reason_off": "no drafter was trained"}, None, "static", "no drafter was trained"),
        ({**INFO, "drafter": None}, None, "off", "no speculation"),
        (INFO, None, "off", "mode off was chosen"),
        ({**INFO, "reason_off": "vocabularies differ"}, None, "static", "vocabularies differ"),
        ({**INFO, "cost_table": None}, None, "compact", "no cost table, nothing is trimmed"),
        (INFO, None, "cap-accept", "capped"),
        (INFO, step(fallback="drafting does not pay"), "static", "drafting does not pay"),
        ({**INFO, "heads": {"confidence": False}, "cost_table": None}, None, "compact", "no confidence head"),
        ({**INFO, "heads": {"confidence": False}}, None, "static", None),
        (INFO, step(simulated="chat"), "static", "acceptance is simulated (chat)"),
        # The table was measured behind the newest step, which had none.
        (INFO, step(**COMPACT, fallback="no step-cost table", predicted_step_ms=None), "compact", None),
        (INFO, step(**COMPACT, fallback="confidence is not a number"), "compact", "confidence is not a number"),
        (INFO, step(mode="static", mode_requested="compact"), "compact", "asked for compact, running static"),
    ],
)
def test_badge_always_has_a_reason(info: dict, newest: dict | None, mode: str, words: str | None) -> None:
    shown = badge_text(info, Snapshot() if newest is None else snapshot(**newest), mode)
    assert (shown is None) if words is None else (words in (shown or ""))


@pytest.mark.parametrize(("num_whole", "is_said"), [(32, True), (31, False)])
def test_compact_that_trims_nothing_is_told_after_a_while(num_whole: int, is_said: bool) -> None:
    stats = AnswerStats()
    for number in range(40):
        stats.add_step(step(**COMPACT, verify_len=5 if number >= 40 - num_whole else 3))
    assert ("nothing was trimmed" in (badge_text(INFO, stats.snapshot(), "compact") or "")) is is_said


def test_speed_up_is_against_the_plain_step_of_the_table() -> None:
    assert speed_up(100.0, INFO) == pytest.approx(1.8)
    assert speed_up(100.0, {"cost_table": {"rows": [1, 2], "step_ms": [20.0, 30.0]}}) == pytest.approx(2.0)
    assert speed_up(100.0, {"cost_table": {"rows": [2], "step_ms": [20.0]}}) is None
    assert speed_up(100.0, {}) is None and speed_up(None, INFO) is None


def test_numbers_of_the_answer_so_far() -> None:
    stats = AnswerStats()
    for number in range(21):
        changes = {"mode": "compact", "verify_len": 3, "cap_trim": None, "rows_reclaimed": 2, "bytes_reclaimed": 1500}
        stats.add_step(step(t_ns=number * 25_000_000, step_ms=20.0, **changes))
    shown = stats.snapshot()
    assert shown.idle_share == pytest.approx(0.2)
    assert (shown.rows_reclaimed, shown.bytes_reclaimed) == (42, 31_500)
    # Three drafts of each step were judged: 0.9, 0.72 and 0.36 were said, two were reached.
    assert shown.calibration is not None and shown.calibration.count == 63
    assert shown.calibration.predicted == pytest.approx(0.66) and shown.calibration.reached == pytest.approx(2 / 3)
    assert shown.calibration.error == pytest.approx((0.1 + 0.28 + 0.36) / 3)
    text = "\n".join(number_lines(shown, {**INFO, "device": "cuda:0"}))
    for words in ("speed-up 2.16x now", "GPU idle 20%", "spared in all 42 rows, 31.5 kB", "ECE 0.247", "lost -"):
        assert words in text, text
    assert "engine idle" in "\n".join(number_lines(shown, INFO))
    assert "calibration -" in "\n".join(number_lines(Snapshot(), {}))


def test_gpu_time_of_a_step_counts_where_it_is_measured() -> None:
    stats = AnswerStats()
    for number in range(11):
        stats.add_step(step(t_ns=number * 20_000_000, step_ms=20.0, gpu_ms=5.0))
    assert stats.snapshot().idle_share == pytest.approx(0.75)


def test_partial_result_is_counted_from_the_events() -> None:
    partial = PartialAnswer({"model": "m", "block_size": 5, "drafter": "d"})
    partial.add({"event": "start", "prompt_token_ids": [7, 8], "mode": "static", "block_size": 5})
    partial.add({"event": "delta", "text": "a", "token_ids": [0], "channel": "answer"})
    partial.add({"event": "delta", "text": "hm", "token_ids": [5], "channel": "thinking"})
    partial.add({"event": "delta", "text": "bcd", "token_ids": [1, 2, 9], "channel": "answer"})
    partial.add(step())
    result = partial.result("cancelled")
    speculation = result["speculation"]
    assert (result["text"], result["token_ids"], partial.thinking) == ("abcd", [0, 5, 1, 2, 9], "hm")
    assert result["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "cached_tokens": 0}
    assert sum(speculation["acceptance_histogram"]) == speculation["num_steps"] == 1
    assert speculation["accepted_at_pos"] == [1, 1, 0, 0, 0]
    assert speculation["mean_acceptance_length"] == 3.0
    assert PartialAnswer({}).result("error", "x")["speculation"]["mean_acceptance_length"] is None
