"""The gate closes on a bad mean of past predictions alone, and tries again."""

from __future__ import annotations

import pytest

from sparkchat.engine.draft_gate import DraftGate

WINDOW, PAUSE = 16, 48
PLAIN_MS = 10.0
"""Plain decoding: 100 tokens a second."""


def observed(*thetas: float) -> DraftGate:
    gate = DraftGate()
    for theta in thetas:
        gate.observe(theta, PLAIN_MS)
    return gate


def test_it_stays_open_while_drafting_pays() -> None:
    assert observed(*[101.0] * 500).is_open


def test_it_closes_after_a_window_of_rounds_that_do_not_pay() -> None:
    assert observed(*[99.0] * (WINDOW - 1)).is_open
    assert not observed(*[99.0] * WINDOW).is_open


def test_one_bad_round_in_many_good_ones_is_forgiven() -> None:
    assert observed(*[120.0] * 40, 1.0, *[120.0] * 3).is_open


def test_without_a_plain_time_it_never_closes() -> None:
    gate = DraftGate()
    for _ in range(100):
        gate.observe(0.001, None)
    assert gate.is_open


@pytest.mark.parametrize("trial", [99.0, 101.0])
def test_after_a_pause_it_opens_for_a_whole_window(trial: float) -> None:
    gate = observed(*[50.0] * WINDOW)
    for left in range(PAUSE, 0, -1):
        assert gate.pause_left == left
        assert not gate.is_open
        gate.pass_plain_step()
    for _ in range(WINDOW - 1):
        assert gate.is_open
        gate.observe(trial, PLAIN_MS)
    gate.observe(trial, PLAIN_MS)
    assert gate.is_open == (trial > 100.0)
