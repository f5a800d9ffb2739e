"""Verification passes what the engine writes and names, with line numbers, what was changed afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.trace_sessions import Answer, ready, side_by_side
from sparkchat.trace import TraceWriter, verify

Lines = list[dict[str, Any]]


def write(path: Path, *answers: Answer) -> Lines:
    with TraceWriter(path) as writer:
        writer.event(ready())
        for event in side_by_side(*answers):
            writer.event(event)
    return [json.loads(line) for line in path.read_text().splitlines()]


def save(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


MODES = [("static",), ("compact",), ("cap-accept",), ("off",), ("static", "compact", "cap-accept", "off")]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 5, 6, 7, 64])
def test_what_the_engine_writes_holds(tmp_path: Path, modes: tuple[str, ...], num_tokens: int) -> None:
    path = tmp_path / "a"
    answers = [Answer(str(n), modes=modes, num_tokens=num_tokens, seed=n, num_thinking=n) for n in range(4)]
    write(path, *answers)
    report = verify(path)
    assert report.ok, report.to_text()
    assert [turn.is_complete for turn in report.turns] == [True] * 4 and report.notes == ()


def steps_of(lines: Lines) -> Lines:
    return [line for line in lines if line["type"] == "step"]


def change_step(**fields: Any) -> Callable[[Lines], None]:
    return lambda lines: steps_of(lines)[2].update(fields)


def change_end(name: str, value: Any) -> Callable[[Lines], None]:
    return lambda lines: lines[-1]["speculation"].__setitem__(name, value)


def add_to_end(name: str, amount: float) -> Callable[[Lines], None]:
    def add(lines: Lines) -> None:
        lines[-1]["speculation"][name] += amount

    return add


def swap_ids(lines: Lines) -> None:
    step = next(line for line in steps_of(lines)[1:] if len(line["committed_ids"]) > 1)
    step["committed_ids"] = step["committed_ids"][::-1]


CORRUPTIONS: dict[str, tuple[Callable[[Lines], Any], str]] = {
    "rows": (change_step(rows=2), "rows = verify_len + 1"),
    "verify_len": (change_step(verify_len=9, rows=10), "verify_len"),
    "too many accepted": (change_step(correct_drafts=9), "accepted"),
    "too many committed": (change_step(committed_ids=list(range(9))), "committed"),
    "committed id changed": (change_step(committed_ids=[77777]), "committed ids = delivered ids after the first"),
    "committed order": (swap_ids, "committed ids = delivered ids after the first"),
    "prefix_len": (change_step(prefix_len=3), "prefix_len"),
    "i": (change_step(i=7), "structure"),
    "time": (change_step(t_ns=1), "time"),
    "static drafts": (change_step(draft_ids=[1]), "static block"),
    "survival rises": (change_step(survival=[0.1, 0.2, 0.3, 0.4]), "survival"),
    "survival range": (change_step(survival=[1.5, 0.2, 0.1, 0.1]), "survival"),
    "list lengths": (change_step(draft_prob=[0.5]), "lengths"),
    "bonus": (change_step(bonus_token=424242), "committed"),
    "cap_trim": (change_step(mode="compact", cap_trim=1), "cap_trim"),
    "reject": (change_step(reject={"pos": 0, "draft_id": 424242}), "reject"),
    "probability": (change_step(target_prob=[1.5, 0.1, 0.1, 0.1]), "probabilities"),
    "mode": (change_step(mode_requested="fast"), "mode"),
    "id": (change_step(id="another"), "structure"),
    "stop": (lambda lines: lines[-1].update(stop="x"), "finish reason"),
    "steps": (add_to_end("num_steps", 1), "num_steps"),
    "steps against histogram": (add_to_end("num_steps", 1), "sum(histogram) = steps"),
    "accepted": (add_to_end("num_accepted_draft_tokens", 1), "sum(i*histogram[i]) = accepted drafts"),
    "mean": (add_to_end("mean_acceptance_length", 0.01), "acceptance length = committed/steps"),
    "mean null": (change_end("mean_acceptance_length", None), "acceptance length = committed/steps"),
    "proposed": (add_to_end("num_proposed_draft_tokens", 1), "proposed = steps*gamma in static"),
    "verified": (add_to_end("num_verified_draft_tokens", 1), "num_verified_draft_tokens"),
    "histogram": (change_end("acceptance_histogram", [0, 0, 0]), "acceptance_histogram"),
    "by position": (change_end("accepted_at_pos", [1, 1, 1]), "accepted_at_pos"),
    "usage": (lambda lines: lines[-1]["usage"].update(completion_tokens=3), "usage"),
    "prompt usage": (lambda lines: lines[-1]["usage"].update(prompt_tokens=99), "usage"),
    "finish reason": (lambda lines: lines[-1].update(finish_reason="tired"), "finish reason"),
    "token lost": (lambda lines: lines[-1]["token_ids"].pop(), "committed ids = delivered ids after the first"),
    "text": (lambda lines: lines[-1].update(text="other"), "streamed text = final text"),
    "stream ids": (
        lambda lines: steps_of(lines)[0]["deltas"][0]["token_ids"].append(5),
        "streamed ids = delivered ids",
    ),
    "calibration": (lambda lines: lines[-1]["calibration"].update(ece=0.5), "calibration"),
    "step gone": (lambda lines: lines.remove(steps_of(lines)[2]), "structure"),
    "last step gone": (
        lambda lines: lines.remove(steps_of(lines)[-1]),
        "committed ids = delivered ids after the first",
    ),
    "step twice": (lambda lines: lines.insert(4, lines[4]), "structure"),
    "turn line gone": (lambda lines: lines.pop(1), "structure"),
    "turn line late": (lambda lines: lines.insert(3, lines.pop(1)), "structure"),
    "end twice": (lambda lines: lines.append(lines[-1]), "structure"),
    "step after the end": (lambda lines: lines.append(lines.pop(-2)), "structure"),
    "first token": (lambda lines: lines[-1]["token_ids"].clear(), "delivered ids"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a"
    corrupt, expected = CORRUPTIONS[name]
    lines = write(path, Answer(num_tokens=60, seed=4))
    assert verify(path).ok
    corrupt(lines)
    save(path, lines)
    report = verify(path)
    assert not report.ok and not report.turns[0].ok
    named = [failure for failure in report.turns[0].failures if failure.check == expected]
    assert named and all(failure.line is not None for failure in named), report.to_text()
    assert f"line {named[0].line}: {expected}" in report.to_text()
    json.dumps(report.to_json(), allow_nan=False)


def test_the_line_named_is_the_line_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lines = write(path, Answer(num_tokens=60, seed=4))
    steps_of(lines)[2]["rows"] = 1
    save(path, lines)
    assert [failure.line for failure in verify(path).turns[0].failures] == [lines.index(steps_of(lines)[2]) + 1]


def test_only_the_turn_that_was_changed_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lines = write(path, Answer("x", num_tokens=30, seed=1), Answer("y", num_tokens=30, seed=2))
    next(step for step in steps_of(lines) if step["id"] == "y")["rows"] = 1
    save(path, lines)
    assert [turn.ok for turn in verify(path).turns] == [True, False]


def test_off_steps_do_not_owe_a_whole_block(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lines = write(path, Answer(modes=("off",), num_tokens=10))
    steps_of(lines)[1]["draft_ids"] = [5]
    save(path, lines)
    assert any(failure.check == "verify_len" for failure in verify(path).turns[0].failures)


def test_damaged_lines_fail_and_a_cut_last_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, Answer("x", num_tokens=30), Answer("y", num_tokens=30))
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    report = verify(path)
    assert report.ok and len(report.notes) == 2 and "cut" in report.to_text()
    rows = data.splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:5], b"garbage\n", *rows[5:]]))
    report = verify(path)
    assert not report.ok and report.failures[0].line == 6 and all(turn.ok for turn in report.turns)


def test_answer_without_an_end_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lines = write(path, Answer(num_tokens=30))[:-1]
    save(path, lines)
    report = verify(path)
    assert report.ok and not report.turns[0].is_complete and report.notes
    steps_of(lines)[1]["rows"] = 77
    save(path, lines)
    assert not verify(path).ok
