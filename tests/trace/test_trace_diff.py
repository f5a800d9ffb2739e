"""Comparing two traces: the first token that differs, and changes with intervals that hold what they promise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.trace_files import make_hostile, write_session
from fixtures.trace_sessions import Answer
from sparkchat.trace.diff import diff
from sparkchat.trace.ratio_change import Cluster, ratio_change, student_t, within_one_answer


def pair(tmp_path: Path, first: list[Answer], second: list[Answer]) -> dict[str, Any]:
    a = write_session(tmp_path / "a.spark.jsonl", *first)
    b = write_session(tmp_path / "b.spark.jsonl", *second)
    found = diff(a, b)
    json.dumps(found.to_json(), allow_nan=False)
    assert found.to_text()
    return found.to_json()


def test_a_session_equals_itself(tmp_path: Path) -> None:
    answers = [Answer(str(n), seed=n) for n in range(4)]
    found = pair(tmp_path, answers, [Answer(str(n), seed=n) for n in range(4)])
    assert (found["num_paired"], found["num_equal"], found["num_different"]) == (4, 4, 0)
    assert found["num_same_prompt"] == 4 and found["settings"] == [] and found["paired_by"] == "id"
    for name in ("acceptance_length", "draft_acceptance_rate"):
        assert found[name]["difference"] == 0.0
        assert found[name]["interval"] == {"low": 0.0, "high": 0.0, "level": 0.95}


def test_the_first_token_that_differs_is_named_with_its_text_and_lines(tmp_path: Path) -> None:
    a = write_session(tmp_path / "a", Answer("x", num_tokens=30, seed=1))

    def change(line: dict[str, Any]) -> None:
        for piece in line.get("deltas") or ():
            if line["type"] == "step" and line["i"] >= 3:
                piece.update(token_ids=[n + 5000 for n in piece["token_ids"]], text="CHANGED ")

    b = write_session(tmp_path / "b", Answer("x", num_tokens=30, seed=1), change=change)
    found = diff(a, b).to_json()["different"]
    steps = [json.loads(line) for line in a.read_text().splitlines()]
    before = [i for line in steps if line["type"] == "step" and line["i"] < 3 for i in line["committed_ids"]]
    (only,) = found
    assert only["index"] == 1 + len(before)
    assert only["token"]["b"] == only["token"]["a"] + 5000
    assert only["line"] == {"a": 6, "b": 6}
    assert only["before"].endswith(f"t{before[-1]} ")
    assert only["after"]["b"].startswith("CHANGED ") and only["after"]["a"].startswith(f"t{only['token']['a']} ")
    assert only["reason"] is None and "rounding" in diff(a, b).to_text()


def test_one_answer_that_is_longer(tmp_path: Path) -> None:
    found = pair(tmp_path, [Answer("x", num_tokens=10, seed=1)], [Answer("x", num_tokens=30, seed=1)])
    (only,) = found["different"]
    assert only["num_tokens"] == {"a": 10, "b": 30} and only["index"] == 10
    assert only["token"]["a"] is None and only["after"]["a"] == "" and only["after"]["b"]


def test_answers_to_other_questions_are_paired_by_order_and_said_to_be_others(tmp_path: Path) -> None:
    found = pair(
        tmp_path,
        [Answer("1", seed=1, prompt=(1, 2)), Answer("2", seed=2)],
        [Answer("7", seed=3, prompt=(3, 4)), Answer("8", seed=2), Answer("9", seed=2)],
    )
    assert found["paired_by"] == "order" and (found["num_paired"], found["num_only_b"]) == (2, 1)
    assert found["num_same_prompt"] == 1 and found["different"][0]["reason"] == "the questions differ"


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    a = write_session(tmp_path / "a", Answer())

    def change(line: dict[str, Any]) -> None:
        if line["type"] == "header":
            line.update(device="cuda", drafter=None)

    b = write_session(tmp_path / "b", Answer(), change=change)
    assert diff(a, b).to_json()["settings"] == [
        {"name": "drafter", "a": "tiny-drafter", "b": None},
        {"name": "device", "a": "cpu", "b": "cuda"},
    ]


def test_sampled_answers_are_not_called_wrong(tmp_path: Path) -> None:
    def warm(line: dict[str, Any]) -> None:
        if line["type"] == "turn":
            line["sampling"] = {"temperature": 1.0, "seed": line["sampling"]["seed"]}

    a = write_session(tmp_path / "a", Answer("x", seed=1), change=warm)
    b = write_session(tmp_path / "b", Answer("x", seed=2), change=warm)
    assert diff(a, b).to_json()["different"][0]["reason"] == "sampled with other seeds"


def test_hostile_and_damaged_files_are_compared(tmp_path: Path) -> None:
    a = write_session(tmp_path / "a", Answer("x", seed=1), change=make_hostile)
    b = tmp_path / "b"
    data = write_session(tmp_path / "c", Answer("x", seed=2)).read_bytes().splitlines(keepends=True)
    b.write_bytes(b"".join([*data[:3], b"garbage\n", *data[3:-1]]))
    found = diff(a, b)
    assert found.to_json()["damaged_lines"] == {"a": 0, "b": 1} and not found.is_same
    assert "\x1b" not in found.to_text()


def test_ratio_change_by_hand() -> None:
    # A: 10/5 = 2; B: 18/6 = 3. Residuals of the difference: ((8-9)/6 - (6-4)/5, (10-9)/6 - (4-6)/5) = (-17/30, 17/30).
    clusters = [Cluster(6, 2, 8, 3), Cluster(4, 3, 10, 3)]
    found = ratio_change(clusters)
    assert (found.a, found.b, found.change) == (2.0, 3.0, 1.0)
    error = (2 / 1 * 2 * (17 / 30) ** 2) ** 0.5
    assert found.high == pytest.approx(1.0 + 12.7062 * error, rel=1e-4)
    assert found.low == pytest.approx(1.0 - 12.7062 * error, rel=1e-4)
    factor = ratio_change(clusters, is_factor=True)
    assert factor.change == 1.5 and factor.low is not None and factor.high is not None
    assert factor.low * factor.high == pytest.approx(1.5**2)


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (100, 1.98397)]
)
def test_student_t_against_tables(degrees: int, t: float) -> None:
    assert student_t(0.95, degrees) == pytest.approx(t, rel=1e-5)


def test_too_little_gives_no_interval() -> None:
    assert ratio_change([]).change is None
    one = ratio_change([Cluster(4, 2, 6, 2)])
    assert one.change == 1.0 and one.low is None and one.method is None
    assert ratio_change([Cluster(4, 2), Cluster(5, 2), Cluster(0, 0, 6, 2)]).low is None
    assert ratio_change([Cluster(4, 2, 0, 2)] * 3, is_factor=True).change is None
    assert not list(within_one_answer([1] * 15, [1] * 100))


@pytest.mark.parametrize("is_paired", [True, False])
def test_intervals_cover_the_true_change(is_paired: bool) -> None:
    """Answers of random length whose own rate varies: about 95 of 100 intervals hold the truth."""
    rng = random.Random(7)

    def answer(rate: float) -> tuple[float, float]:
        steps = rng.randint(20, 60)
        return float(sum(1 + (rng.random() < rate) + (rng.random() < rate) for _ in range(steps))), float(steps)

    num_covered = 0
    for _ in range(200):
        clusters = []
        for _ in range(20):
            own, other = rng.uniform(-0.2, 0.2), rng.uniform(-0.2, 0.2)
            a, b = answer(0.5 + own), answer(0.6 + (own if is_paired else other))
            clusters += [Cluster(*a, *b)] if is_paired else [Cluster(*a), Cluster(0, 0, *b)]
        found = ratio_change(clusters)
        assert found.low is not None and found.high is not None
        num_covered += found.low <= 0.2 <= found.high
    assert 178 <= num_covered <= 199


def test_neighbouring_steps_of_one_answer_give_an_interval(tmp_path: Path) -> None:
    found = pair(tmp_path, [Answer("x", num_tokens=300, seed=1)], [Answer("x", num_tokens=300, seed=2)])
    change = found["acceptance_length"]
    assert change["interval"]["low"] < change["difference"] < change["interval"]["high"]
    assert "only answer" in change["method"] and found["tokens_per_second"]["interval"] is None
