"""Every figure of the speculation object follows from the steps; a trace of whole answers agrees with itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, random_prompts, to_request
from sparkchat.engine.statistics import SpeculationStatistics
from sparkchat.trace import TraceWriter, verify


def test_sums_of_random_steps() -> None:
    rng = random.Random(3)
    for _ in range(50):
        block = rng.randint(1, 8)
        statistics, steps = SpeculationStatistics(), []
        for _ in range(rng.randint(1, 40)):
            proposed = rng.choice([0, block])
            verified = rng.randint(0, proposed)
            accepted = rng.randint(0, verified)
            committed = rng.choice([accepted, accepted + 1])
            steps.append((proposed, verified, accepted, committed))
            statistics.record(proposed=proposed, verified=verified, accepted=accepted, committed=committed)
        found = statistics.to_json(block, None)
        assert found["num_steps"] == len(steps) == sum(found["acceptance_histogram"])
        assert found["mean_acceptance_length"] == pytest.approx(sum(s[3] for s in steps) / len(steps))
        for column, name in enumerate(("proposed", "verified", "accepted")):
            at_pos = found[f"{name}_at_pos"]
            assert at_pos == [sum(s[column] > k for s in steps) for k in range(block)]
            assert found[f"num_{name}_draft_tokens"] == sum(at_pos) == sum(s[column] for s in steps)
        for column, name in ((1, "verify_len_histogram"), (2, "acceptance_histogram")):
            assert found[name] == [sum(s[column] == n for s in steps) for n in range(block + 1)]


def test_no_steps_give_no_mean_and_full_length_lists() -> None:
    found = SpeculationStatistics().to_json(5, "mode is off")
    assert found["mean_acceptance_length"] is None
    assert found["reason_off"] == "mode is off"
    assert [len(found[name]) for name in ("proposed_at_pos", "verified_at_pos", "accepted_at_pos")] == [5] * 3
    assert len(found["acceptance_histogram"]) == len(found["verify_len_histogram"]) == 6


def test_the_lists_are_copies() -> None:
    statistics = SpeculationStatistics()
    statistics.record(proposed=2, verified=2, accepted=1, committed=2)
    first = statistics.to_json(2, None)
    statistics.record(proposed=2, verified=2, accepted=2, committed=3)
    assert first["acceptance_histogram"] == [0, 1, 0]


def test_traces_of_every_kind_of_end_hold_their_identities(
    mix_folders: dict[str, Path], runner: Any, tmp_path: Path
) -> None:
    engine = runner(mix_folders["target"], mix_folders["half"], concurrency=3).engine
    prompts = random_prompts(5, 20, seed=9)
    lines: list[dict[str, Any]] = [
        {"prompt_ids": prompt, "mode": mode, "max_tokens": length, "temperature": temperature, "seed": n}
        for n, (prompt, mode, length, temperature) in enumerate(
            zip(prompts, ("off", *MODES, None), (1, 2, 9, 14, 200), (0.0, 1.0, 0.7, 0.0, 1.3), strict=True)
        )
    ]
    writer = TraceWriter(tmp_path / "t.spark.jsonl", force=False, argv=[])
    writer.event({"event": "ready", "info": engine.info})
    modes = ("static", "off", "cap-accept", "compact")
    events = [e for n, line in enumerate(lines) for e in engine.submit(to_request(line, n))]
    turn = 0
    while engine.has_work:
        events += engine.set_mode(modes[turn % 4]) + engine.step()
        turn += 1
        if turn == 20:
            events += engine.cancel("r4")
    for event in events:
        assert writer.event(event) is None
    writer.close()
    report = verify(tmp_path / "t.spark.jsonl")
    assert report.ok, report.to_text()
    assert [turn.is_complete for turn in report.turns] == [True] * 5
    assert sum(turn.num_steps for turn in report.turns) > 20
