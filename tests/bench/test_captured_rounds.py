"""Rounds over captured steps, run eagerly: what is thrown away, left out and counted of an engine that captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.test_ahead import FakeClient, KeptStages
from fixtures.shapes import write_shapes
from sparkchat.bench.arms import Arm
from sparkchat.bench.chats import meaningless_chats
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.bench.measuring import Tally, measure, merged
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.engine import Engine
from sparkchat.params import CostTable, GenerateRequest, LoadSpec, SamplingParams
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance

ARMS = [Arm("off", "off"), Arm("static", "static"), Arm("compact", "compact"), Arm("cap-accept", "cap-accept")]


class CountedStages(KeptStages):
    @property
    def num_graphs(self) -> int:  # type: ignore[override]
        return len(self.keys)


class Client(FakeClient):
    """Steps where it is waited for."""

    def generate(self, request: GenerateRequest) -> None:
        self.send(*self.engine.submit(request))

    def poll(self, _timeout: float | None) -> list[Any]:
        if not self.events and self.engine.has_work:
            self.send(*self.engine.step())
        return super().poll(_timeout)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    folder: Path = write_shapes(tmp_path_factory.mktemp("shapes"))
    spec = LoadSpec(
        "shapes",
        str(folder),
        str(folder / "drafter"),
        device="cpu",
        dtype="float32",
        context=256,
        concurrency=6,
        dummy_weights=True,
        simulate_acceptance="chat",
        graphs=True,
    )
    engine = Engine(spec)
    engine._captured.stages = CountedStages()  # type: ignore[union-attr]
    engine.pair.cost = CostLookup(CostTable((6, 18, 48), (10.0, 12.0, 30.0)))
    run = EngineRun(Client(engine), {**engine.info, "graphs": True})  # type: ignore[arg-type]
    run.send({"op": "measure_together", "on": True})
    return run


def test_rounds_over_captured_steps(run: EngineRun) -> None:
    found: dict[str, list[Tally]] = {arm.name: [] for arm in ARMS}
    chats = meaningless_chats(18, 512)
    sampling = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)
    measure(run, ARMS, chats, 6, sampling, lambda: 3, lambda arm, tally, _: found[arm.name].append(tally))
    assert [tally.thrown_away for tally in found["off"]] == [1, 0, 0], "its first steps are captured"
    whole = {name: merged(tallies) for name, tallies in found.items()}
    for name, tally in whole.items():
        assert (tally.rounds, tally.together) == (3, 6)
        assert tally.sums.steps >= 3 * 3
        assert tally.sums.answer_steps == 6 * tally.sums.steps
        assert (tally.step_time_error is not None) == (name == "compact")
    assert whole["off"].sums.expected_tokens == whole["off"].sums.tokens == 6 * 3 * 34
    exact = SimulatedAcceptance("chat", BUILT_IN["chat"]).acceptance_length
    lengths = {name: tally.to_json(1)["acceptance_length"] for name, tally in whole.items()}
    assert lengths["static"] == pytest.approx(exact)
    assert 1.5 < lengths["compact"] < exact and 1.5 < lengths["cap-accept"] < exact
    assert whole["static"].sums.verified == 7 * whole["static"].sums.answer_steps
    # Who is cancelled is gone, and nothing of it is in the rounds behind.
    assert not run._client.engine.has_work  # type: ignore[attr-defined]
