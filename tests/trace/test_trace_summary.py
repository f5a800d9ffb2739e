"""Totals, both acceptance denominators, modes and calibration, against numbers worked out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.trace_sessions import Answer, ready
from sparkchat.trace import TraceWriter, read_lines, summarize
from sparkchat.trace.calibration import Observation, calibration, observations


def written(path: Path, *answers: Answer) -> Path:
    with TraceWriter(path) as writer:
        writer.event(ready())
        for answer in answers:
            for event in answer.events():
                writer.event(event)
    return path


def step(mode: str = "static", **changes: Any) -> dict[str, Any]:
    base = {
        "mode": mode,
        "draft_ids": [1, 2, 3],
        "verify_len": 3,
        "correct_drafts": 1,
        "cap_trim": 0,
        "committed_ids": [1, 9],
        "survival": [0.9, 0.5, 0.1],
    }
    return base | changes


def by_hand(path: Path, steps: list[dict[str, Any]]) -> dict[str, Any]:
    lines: list[dict[str, Any]] = [
        {"schema": "sparkchat.trace/1", "type": "header", "model": "m", "block_size": 3},
        {"type": "turn", "turn": 0, "id": "a", "num_prompt_tokens": 5},
    ]
    for i, fields in enumerate(steps):
        rows = fields["verify_len"] + 1
        lines.append({"type": "step", "turn": 0, "id": "a", "i": i, "prefix_len": 0, "rows": rows, **fields})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return summarize(path).to_json()


def test_counts_by_hand(tmp_path: Path) -> None:
    found = by_hand(
        tmp_path / "a",
        [
            step(correct_drafts=3, committed_ids=[1, 2, 3, 9], step_ms=2.0),
            step("compact", verify_len=1, cap_trim=None, correct_drafts=1, committed_ids=[1, 9], step_ms=1.0),
            step("compact", verify_len=0, cap_trim=None, correct_drafts=0, committed_ids=[9], step_ms=1.0),
            step("cap-accept", cap_trim=2, correct_drafts=1, committed_ids=[1, 2], step_ms=2.0),
        ],
    )
    assert found["num_steps"] == 4 and found["num_committed_tokens"] == 9
    assert found["mean_acceptance_length"] == pytest.approx(9 / 4)
    assert found["acceptance_histogram"] == [1, 2, 0, 1] and found["verify_len_histogram"] == [1, 1, 0, 2]
    positions = found["acceptance_by_position"]
    assert [(p["proposed"], p["verified"], p["accepted"]) for p in positions] == [(4, 3, 3), (4, 2, 1), (4, 2, 1)]
    assert [p["rate_of_all_steps"] for p in positions] == [3 / 4, 1 / 4, 1 / 4]
    assert [p["rate_of_verified_steps"] for p in positions] == [1.0, 1 / 2, 1 / 2]
    assert found["modes"] == ["static", "compact", "cap-accept"]
    compact, cap = found["by_mode"]["compact"], found["by_mode"]["cap-accept"]
    assert compact["num_steps"] == 2 and compact["mean_verify_len"] == 0.5
    assert compact["tokens_per_second"] == pytest.approx(1500.0)
    # What compact cut off cannot be known, and must not look like 0.
    assert compact["num_trimmed_tokens"] is None and cap["num_trimmed_tokens"] == 2
    assert found["num_completion_tokens"] == 10 and found["num_prompt_tokens"] == 5
    assert found["num_complete_turns"] == 0 and found["tokens_per_second"] is None


def test_drafts_behind_the_end_of_the_answer_do_not_count(tmp_path: Path) -> None:
    found = by_hand(tmp_path / "a", [step(correct_drafts=3, committed_ids=[1, 2])])
    assert found["num_accepted_draft_tokens"] == 2 and found["acceptance_histogram"] == [0, 0, 1]


def test_recounted_totals_are_those_of_the_results(tmp_path: Path) -> None:
    answers = [
        Answer(str(n), modes=modes, seed=n, num_tokens=50)
        for n, modes in enumerate([("static",), ("compact",), ("cap-accept", "off"), ("off",)])
    ]
    trace = written(tmp_path / "a", *answers)
    found = summarize(trace).to_json()
    results = [line.data["speculation"] for line in read_lines(trace) if line.type == "end"]
    for name in ("num_steps", "num_proposed_draft_tokens", "num_verified_draft_tokens", "num_accepted_draft_tokens"):
        assert found[name] == sum(result[name] for result in results)
        assert found[name] == sum(figures[name] for figures in found["by_mode"].values())
    assert found["num_completion_tokens"] == 200 and found["finish_reasons"] == {"length": 4}
    total_ms = sum(2.0 * result["num_steps"] for result in results)
    assert found["tokens_per_second"] == pytest.approx(196 / total_ms * 1e3)
    assert found["mean_ttft_ms"] == 5.0


def test_zero_of_everything_has_nulls_for_ratios(tmp_path: Path) -> None:
    found = summarize(written(tmp_path / "a", Answer(num_tokens=0))).to_json()
    assert found["mean_acceptance_length"] is None and found["tokens_per_second"] is None
    assert found["mean_step_ms"] is None and found["calibration"] is None and found["acceptance_by_position"] == []
    json.dumps(found, allow_nan=False)
    only_header = tmp_path / "b"
    only_header.write_text('{"schema": "sparkchat.trace/1", "type": "header"}\n')
    assert summarize(only_header).to_json()["num_turns"] == 0


def test_text_names_what_was_measured(tmp_path: Path) -> None:
    trace = written(tmp_path / "a", Answer(modes=("static", "compact"), num_tokens=60))
    text = summarize(trace).to_text()
    for part in ("tiny + tiny-drafter", "mean acceptance length", "position", "static:", "compact:", "calibration all"):
        assert part in text
    assert "trimmed tokens -" in text and "nan" not in text


def test_labels_come_from_where_the_target_judged() -> None:
    assert observations(step()) == [(1, 0.9, True), (2, 0.5, False), (3, 0.1, False)]
    assert observations(step("compact", verify_len=1, cap_trim=None)) == [(1, 0.9, True)]
    # cap-accept verifies the whole block: what the cap threw away is known to have been right.
    capped = observations(step("cap-accept", correct_drafts=0, cap_trim=2, committed_ids=[1]))
    assert [label for _, _, label in capped] == [True, True, False]


def test_cut_steps_and_missing_estimates_give_no_labels() -> None:
    assert observations(step(committed_ids=[1])) == []  # the answer ended inside the accepted run
    assert observations(step(survival=[])) == [] and observations(step(survival=None)) == []
    assert observations(step(survival=[None, 2.0, 0.1])) == [(3, 0.1, False)]
    assert calibration([]) is None


def scored(*pairs: tuple[float, bool]) -> dict[str, Any]:
    found = calibration(Observation(1, value, label) for value, label in pairs)
    assert found is not None
    return found


def test_ece_by_hand() -> None:
    # Bin [0.9, 0.95): mean 0.92, rate 1/2; bin [0.1, 0.15): mean 0.1, rate 0.
    assert scored((0.91, True), (0.93, False), (0.1, False))["ece"] == pytest.approx((2 * 0.42 + 1 * 0.1) / 3)
    assert scored((1.0, True))["ece"] == 0.0 and scored((1.0, True))["auc"] is None


def test_auc_against_counting_pairs() -> None:
    rng = random.Random(3)
    pairs = [(rng.choice([0.1, 0.2, 0.5, 0.9]), rng.random() < 0.4) for _ in range(60)]
    good, bad = [v for v, label in pairs if label], [v for v, label in pairs if not label]
    wins = sum((a > b) + 0.5 * (a == b) for a in good for b in bad)
    assert scored(*pairs)["auc"] == pytest.approx(wins / len(good) / len(bad))


def test_scores_over_all_positions_are_those_of_one_heap() -> None:
    rng = random.Random(4)
    found = [Observation(rng.randint(1, 4), rng.random(), rng.random() < 0.5) for _ in range(500)]
    split, heap = calibration(found), calibration(each._replace(position=1) for each in found)
    assert split is not None and heap is not None and len(split["by_position"]) == 4
    for name in ("count", "mean_survival", "reached_rate", "ece", "auc", "brier"):
        assert split[name] == pytest.approx(heap[name])


def test_calibration_of_a_perfect_head_is_small_and_of_a_wrong_one_large() -> None:
    rng = random.Random(5)
    values = [rng.random() for _ in range(20_000)]
    right = scored(*((value, rng.random() < value) for value in values))
    wrong = scored(*((value, rng.random() < value / 2) for value in values))
    assert right["ece"] < 0.02 and wrong["ece"] > 0.2 and right["auc"] > 0.8
    assert right["by_position"][0]["count"] == 20_000
