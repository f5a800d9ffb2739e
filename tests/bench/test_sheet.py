"""What counts as measured, what as missing, and how long the rest will take."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sparkchat.bench.counted import Counted
from sparkchat.bench.measuring import Tally
from sparkchat.bench.sheet import MOST_ROUNDS, Sheet
from sparkchat.private_file import write_private


def tally(tokens: int, seconds: float = 1.0, **fields: float) -> Tally:
    return Tally([Counted(tokens=tokens, seconds=seconds)], **fields)  # type: ignore[arg-type]


def filled(sheet: Sheet, *rounds: tuple[int, str], seconds: float = 2.0) -> Sheet:
    for number, (together, arm) in enumerate(rounds, start=1):
        sheet.add(together, arm, tally(number), seconds)
    return sheet


ARMS = ["off", "static"]


def test_arms_stand_side_by_side_with_the_rounds_that_all_have_answered() -> None:
    sheet = filled(Sheet(ARMS, {1: 3}), (1, "off"), (1, "static"), (1, "static"), (1, "off"), (1, "off"))
    found = sheet.tallies()[1]
    assert {arm: (t.rounds, t.sums.tokens) for arm, t in found.items()} == {"off": (2, 1 + 4), "static": (2, 2 + 3)}
    assert sheet.comparable() == sheet.tallies()
    assert sheet.missing() == [{"concurrency": 1, "arm": arm, "rounds": 1} for arm in ARMS]
    assert sheet.missing_in_words() == "1 of 3 rounds at 1 together"


def test_of_a_first_round_that_was_broken_off_those_count_that_answered_it() -> None:
    sheet = filled(Sheet(["off", "static", "compact"], {1: 1, 8: 2, 16: 1, 32: 1}), (1, "off"), (1, "static"))
    filled(sheet, (1, "compact"), (8, "off"), (8, "static"))
    assert {n: list(found) for n, found in sheet.tallies().items()} == {
        1: ["off", "static", "compact"],
        8: ["off", "static"],
    }
    assert list(sheet.comparable()) == [1]
    assert sheet.missing_in_words() == (
        "compact at 8 together, 1 of 2 rounds of the other arms at 8 together, everything at 16 and 32 together"
    )
    assert sum(lack["rounds"] for lack in sheet.missing()) == 2 + 1 + 1 + 3 + 3
    assert sheet.num_rows == (3, 12)


def test_a_whole_sheet_misses_nothing() -> None:
    sheet = filled(Sheet(ARMS, {1: 1}), (1, "off"))
    assert not sheet.has_all(1, "static")
    filled(sheet, (1, "static"))
    assert (sheet.missing(), sheet.missing_in_words(), sheet.num_rows) == ([], "", (2, 2))
    assert sheet.seconds_left() == (0.0, False)
    assert Sheet(ARMS, {1: 1}).tallies() == {}


def test_of_one_concurrency_only_the_least_of_what_is_left_is_known() -> None:
    sheet = Sheet(ARMS, {1: 2, 8: 1})
    assert sheet.seconds_left() is None
    filled(sheet, (1, "off"), seconds=3.0)
    assert sheet.seconds_left() == (3 * 3.0 + 2 * 3.0, True)
    alone = filled(Sheet(ARMS, {4: 2}), (4, "off"), seconds=3.0)
    assert alone.seconds_left() == (9.0, False)


def test_what_is_left_lies_on_the_line_through_what_is_known() -> None:
    sheet = filled(Sheet(ARMS, {1: 1, 3: 1, 7: 1}), (1, "off"), (1, "static"), seconds=2.0)
    filled(sheet, (3, "off"), seconds=3.0)
    assert sheet.seconds_left() == (3.0 + 2 * (3.0 + 4 * 0.5), False)
    # More requests never take less, whatever a first round with captures took.
    falling = filled(Sheet(ARMS, {1: 1, 3: 1, 7: 1}), (1, "off"), (1, "static"), seconds=9.0)
    filled(falling, (3, "off"), seconds=3.0)
    assert falling.seconds_left() == (3.0 + 2 * 3.0, False)


def test_what_captures_took_is_not_expected_again() -> None:
    sheet = Sheet(ARMS, {8: 4})
    sheet.add(8, "off", tally(1, captures=9, thrown_away=2, seconds_thrown_away=90.0), 93.0)
    assert sheet.seconds_left() == (7 * 3.0, False)
    # A round that captured nothing says more.
    sheet.add(8, "static", tally(1), 1.0)
    assert sheet.seconds_left() == (6 * 1.0, False)
    sheet.add(8, "off", tally(1), 2.0)
    assert sheet.seconds_left() == (5 * 1.5, False)
    assert sheet.seconds == 96.0


def test_quick_rounds_are_more() -> None:
    sheet = Sheet(ARMS, {1: 2, 8: 2}, least_seconds=1.5)
    assert (sheet.num_wanted(1), sheet.num_wanted(8)) == (2, 2)
    sheet.add(1, "off", tally(1, 0.9), 2.0)
    assert sheet.num_wanted(1) == 2
    sheet.add(1, "static", tally(1, 0.4), 2.0)
    assert sheet.num_wanted(1) == 4
    # However long the others take: what is told to be done stays done.
    for arm in ARMS:
        sheet.add(1, arm, tally(1, 0.1), 3.0)
    assert sheet.num_wanted(1) == 4
    assert [lack["rounds"] for lack in sheet.missing()] == [2, 2, 2, 2]
    for arm in ARMS:
        sheet.add(8, arm, tally(1, 1e-6), 1.0)
    assert sheet.num_wanted(8) == MOST_ROUNDS
    assert Sheet(ARMS, {1: 2}).num_wanted(1) == 2


def test_a_file_is_replaced_whole_and_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bench.json"
    file.write_text("old")
    file.chmod(0o644)
    before = os.umask(0)
    try:
        write_private(file, "new")
    finally:
        os.umask(before)
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_private(file, "newer")
    assert [f.name for f in tmp_path.iterdir() if "bench" in f.name] == ["bench.json"]
    assert file.read_text() == "new"
