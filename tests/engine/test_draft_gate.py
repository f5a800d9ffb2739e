"""The gate closes on a bad mean of past predictions alone, and tries again, ever more rarely while it does not pay."""

from __future__ import annotations

import pytest

from sparkchat.engine.draft_gate import DraftGate

WINDOW, TRIAL, PAUSE, LONGEST = 24, 8, 48, 768
PLAIN = 100.0
"""Tokens a second of plain decoding."""


def observed(*thetas: float) -> DraftGate:
    gate = DraftGate()
    for theta in thetas:
        gate.observe(theta, PLAIN)
    return gate


def wait(gate: DraftGate) -> int:
    """Plain steps until the next trial."""
    steps = 0
    while not gate.is_open:
        gate.pass_plain_step()
        steps += 1
    return steps


def test_it_stays_open_while_drafting_pays() -> None:
    assert observed(*[101.0] * 500).is_open


def test_it_closes_after_a_window_of_rounds_that_do_not_pay() -> None:
    assert observed(*[97.0] * (WINDOW - 1)).is_open
    assert not observed(*[97.0] * WINDOW).is_open
    assert observed(*[99.0] * 500).is_open  # within what predictions are off by


def test_a_clear_loss_is_seen_sooner() -> None:
    assert observed(*[80.0] * (TRIAL - 1)).is_open
    assert not observed(*[80.0] * TRIAL).is_open


def test_one_bad_round_in_many_good_ones_is_forgiven() -> None:
    assert observed(*[120.0] * 40, 1.0, *[120.0] * 3).is_open


def test_without_a_plain_time_it_never_closes() -> None:
    gate = DraftGate()
    for _ in range(100):
        gate.observe(0.001, None)
    assert gate.is_open


def test_what_counts_is_the_ratio_to_plain_decoding_of_the_same_step() -> None:
    gate = DraftGate()
    for n in range(WINDOW):
        cached = 1 + n % 4
        gate.observe(97.0 / cached, PLAIN / cached)
    assert not gate.is_open


@pytest.mark.parametrize(("trial", "stays_open"), [(50.0, False), (99.0, False), (101.0, True)])
def test_after_a_pause_it_opens_for_a_trial_that_must_win(trial: float, stays_open: bool) -> None:
    gate = observed(*[50.0] * TRIAL)
    assert wait(gate) == PAUSE
    for _ in range(TRIAL):
        assert gate.is_open
        gate.observe(trial, PLAIN)
    assert gate.is_open == stays_open
    if stays_open:
        # No longer on trial: as good as plain decoding is enough, and the next pause is short again.
        for _ in range(100):
            gate.observe(99.5, PLAIN)
        assert gate.is_open
        while gate.is_open:
            gate.observe(10.0, PLAIN)
        assert wait(gate) == PAUSE


def test_trials_that_lose_are_ever_rarer() -> None:
    gate, pauses = observed(*[50.0] * TRIAL), []
    for _ in range(7):
        pauses.append(wait(gate))
        for _ in range(TRIAL):
            gate.observe(50.0, PLAIN)
    assert pauses == [48, 96, 192, 384, 768, 768, 768]
    assert TRIAL / (TRIAL + LONGEST) < 0.02


def test_a_request_that_finds_no_room_for_long_is_starved_until_it_is_verified() -> None:
    gate = DraftGate()
    for _ in range(24):
        assert not gate.is_starved
        gate.observe(150.0, PLAIN, verify_len=0)
    assert gate.is_starved
    gate.observe(150.0, PLAIN, verify_len=1)
    assert not gate.is_starved
