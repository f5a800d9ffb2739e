"""Step costs are measured within the budget, beside running requests, once; a bad stored table is measured again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases.harness import Runner, open_runner, to_request
from engine.conftest import NAN_TOKEN
from sparkchat.engine import cost_probe
from sparkchat.engine.captured import costs
from sparkchat.engine.cost_probe import measure
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.step_plan import REASON_NO_TABLE
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.params import CostTable

BLOCK = 5


class SlowMachine:
    """A clock that only steps move, by what a plain step, a verified row and a cached token take."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        plain: float,
        row: float,
        context: float = 0.0,
        context_row: float = 0.0,
    ) -> None:
        self.now, self.lengths = 1000.0, []
        self._plain, self._row, self._context, self._context_row = plain, row, context, context_row
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(cost_probe, "time", clock)
        monkeypatch.setattr(cost_probe, "decode_step", self._step)

    def milliseconds(self, length: int | None, tokens: int) -> float:
        rows = 0 if length is None else length + 1
        seconds = self._plain + self._row * rows + tokens * (self._context + self._context_row * max(1, rows))
        return 1e3 * seconds

    def _step(self, probe: Any, states: list[Any], mode: str, choose: Any) -> None:
        (chosen, *_) = choose(states, [None] * len(states))
        length = None if mode == "off" else chosen.verify_len
        self.lengths.append(length)
        self.now += self.milliseconds(length, sum(state.kv_len for state in states)) / 1e3


def test_a_table_of_every_length_on_a_quick_machine(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowMachine(monkeypatch, 0.005, 0.0005)
    table = measure(tiny.engine.pair, [1], tiny.engine.pair.block_size)
    assert table.rows == (1, 2, 3, 4, 5, 6)
    assert table.step_ms == pytest.approx([5.5, 6, 6.5, 7, 7.5, 8])
    assert table.plain_ms == pytest.approx(5)
    assert table.source == "measured"
    turns = cost_probe.REPEATS + 1
    # Those that bound the others are timed behind a long context as well.
    assert [machine.lengths.count(n) for n in (None, *range(6))] == [turns, 2 * turns, *[turns] * 4, 2 * turns]
    assert machine.now - 1000 <= 2.0


def test_a_slow_machine_keeps_to_two_seconds_and_still_fills_the_table(
    tiny: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SlowMachine(monkeypatch, 0.4, 0.05)
    table = measure(tiny.engine.pair, [1], tiny.engine.pair.block_size)
    assert machine.now - 1000 <= 2.0 + 0.7
    assert table.context is None
    assert machine.lengths[:3] == [None, 0, BLOCK]
    assert len(machine.lengths) < 7
    assert table.rows == (1, 2, 3, 4, 5, 6)
    assert table.step_ms == pytest.approx([450, 500, 550, 600, 650, 700])


def test_the_slowest_machine_times_the_bounds_once(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowMachine(monkeypatch, 30.0, 1.0)
    table = measure(tiny.engine.pair, [1, 4], tiny.engine.pair.block_size)
    assert machine.lengths == [None, 0, BLOCK] * 2
    assert [batch.rows for batch in table.batches] == [(1, 2, 3, 4, 5, 6), (4, 8, 12, 16, 20, 24)]
    assert table.plain_ms == pytest.approx(30_000)


def test_sliding_windows_are_measured_behind_a_long_context(
    mix_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings hold what was written: nothing of the context can be left out."""
    SlowMachine(monkeypatch, 0.01, 0.001, context=1e-5)
    opened = open_runner(mix_folders["window"], mix_folders["half"], context=600)
    table = measure(opened.engine.pair, [1], BLOCK)
    assert table.context is not None and table.context.ms_per_token == pytest.approx(0.01)


def test_a_tuned_table_knows_what_context_adds(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowMachine(monkeypatch, 0.01, 0.001, context=1e-5, context_row=1e-6)
    table = measure(tiny.engine.pair, [1, 2], BLOCK, 60.0, 5)
    assert table.context is not None
    assert table.context.tokens == cost_probe.PROMPT_TOKENS
    assert table.context.ms_per_token == pytest.approx(0.01)
    assert table.context.ms_per_token_row == pytest.approx(0.001)
    assert [batch.requests for batch in table.batches] == [1, 2]
    lookup = CostLookup(table)
    for tokens in (64, 300, 510):
        measured = [machine.milliseconds(length, tokens) for length in range(BLOCK + 1)]
        assert [lookup.at(1, tokens).step_ms(n) for n in range(1, BLOCK + 2)] == pytest.approx(measured, rel=0.02)


def test_what_context_adds_is_known_of_one_request_and_of_the_most(
    tiny: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SlowMachine(monkeypatch, 0.01, 0.001, context=1e-5, context_row=1e-6)
    table = measure(tiny.engine.pair, [1, 2, 4], BLOCK, 60.0, 5)
    assert [batch.context is not None for batch in table.batches] == [True, False, True]
    lookup = CostLookup(table)
    for requests in (1, 2, 3, 4):
        found = lookup.at(requests, 400).step_ms(requests * (BLOCK + 1)) - lookup.at(requests, 100).step_ms(
            requests * (BLOCK + 1)
        )
        wanted = machine.milliseconds(BLOCK, 400) - machine.milliseconds(BLOCK, 100)
        assert found == pytest.approx(wanted, rel=0.01)


def test_a_machine_that_slows_down_does_not_make_context_dear(tiny: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half as long again at the end; what is compared takes turns, so that context does not pay for it."""
    machine = SlowMachine(monkeypatch, 0.01, 0.001, context=2e-6)
    at_first = machine.milliseconds
    monkeypatch.setattr(machine, "milliseconds", lambda *what: at_first(*what) * (1 + (machine.now - 1000) / 4))
    table = measure(tiny.engine.pair, [1], BLOCK, 2.0, 16)
    assert machine.now - 1000 > 1.5
    assert table.context is not None
    assert table.context.ms_per_token == pytest.approx(0.002 * 1.25, rel=0.2)


def test_a_tuned_table_counts_for_as_many_requests_as_it_covers(
    tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(cost_probe, "TUNE_SECONDS", 0.0)
    cache = str(tmp_path / "cache")
    engine, _ = without_table(tiny_pair, mode="static", cache_dir=cache, concurrency=3)
    info, answer = engine.tune_cost()
    assert (info["event"], answer["event"]) == ("info", "cost_table")
    assert Path(answer["file"]).parent == tmp_path / "cache" / "cost_tables"
    table = info["info"]["cost_table"]
    assert [batch["requests"] for batch in table["batches"]] == [1, 2, 3]
    assert table["context"] is None  # 128 tokens are no long context
    for concurrency in (1, 2, 3):
        found = without_table(tiny_pair, mode="static", cache_dir=cache, concurrency=concurrency)[0].info["cost_table"]
        assert (found["source"], found["id"]) == ("cached", table["id"])
    more, events = without_table(tiny_pair, mode="compact", cache_dir=cache, concurrency=4)
    assert "cost_table" in stages(events)
    assert [batch["requests"] for batch in more.info["cost_table"]["batches"]] == [1, 4]
    # The quick table does not take the tuned one's place.
    assert without_table(tiny_pair, cache_dir=cache)[0].info["cost_table"]["id"] == table["id"]


def test_captured_steps_are_timed_as_they_are_replayed(
    tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "REPEATS", 1)
    engine, _ = without_table(tiny_pair, mode="static", graphs=True, concurrency=3, cache_dir=str(tmp_path))
    info, answer = engine.tune_cost()
    batches = info["info"]["cost_table"]["batches"]
    assert [(batch["requests"], batch["rows"]) for batch in batches] == [
        (1, [1, 2, 3, 4, 5, 6]),
        (2, list(range(2, 13))),
        (3, list(range(3, 19))),
    ]
    assert all(ms > 0 for batch in batches for ms in (*batch["step_ms"], batch["plain_ms"]))
    assert answer["file"] is not None
    line = {"prompt_ids": [301, 302], "max_tokens": 12, "ignore_eos": True}
    plain, compact = engine.generate(
        [to_request({**line, "mode": mode}, n) for n, mode in enumerate(("off", "compact"))]
    )
    assert plain["token_ids"] == compact["token_ids"]
    # The reference loop's costs are others, and so is their table.
    assert without_table(tiny_pair, mode="static", cache_dir=str(tmp_path))[0].info["cost_table"] is None


def test_captured_steps_are_measured_of_doubling_numbers_of_requests(tiny_pair: Any) -> None:
    asked: list[list[int]] = []
    engine, _ = without_table(tiny_pair, mode="static", concurrency=6)

    def measure_steps(counts: list[int]) -> CostTable:
        asked.append(list(counts))
        return CostTable((1,), (1.0,))

    engine.pair.measure_steps = measure_steps
    engine.set_mode("compact")
    assert asked == [[1, 2, 4, 6]]


def test_costs_are_not_tuned_beside_answers_or_for_nothing(tiny_pair: Any, headless_drafter: Path) -> None:
    engine, _ = without_table(tiny_pair, mode="static")
    engine.submit(to_request({"prompt_ids": [301], "max_tokens": 4}, 0))
    with pytest.raises(UsageError, match="while requests run"):
        engine.tune_cost()
    headless = SimpleNamespace(target=tiny_pair.target, drafter=headless_drafter)
    with pytest.raises(UsageError, match="no confidence head"):
        without_table(headless, mode="static")[0].tune_cost()


def test_plans_can_be_made_without_the_table_for_a_while(tiny: Runner) -> None:
    line = {"prompt_ids": [301, 302], "max_tokens": 20, "ignore_eos": True, "mode": "compact"}
    engine = tiny.engine
    told = [engine.plan_by_table(on)[0]["info"]["cost_table"] for on in (False, False)]
    assert told == [None, None]
    (without,) = tiny.watch([line])
    assert {step["fallback"] for step in without.steps[:-1]} == {REASON_NO_TABLE}
    assert engine.plan_by_table(True)[0]["info"]["cost_table"] is not None
    (planned,) = tiny.watch([line])
    assert {step["fallback"] for step in planned.steps[:-1]} == {None}
    assert planned.ids == without.ids


def test_the_real_clock_is_kept_too(tiny: Runner) -> None:
    table = measure(tiny.engine.pair, [1, 3], tiny.engine.pair.block_size)
    assert [batch.requests for batch in table.batches] == [1, 3]
    assert table.batches[1].rows == (3, 6, 9, 12, 15, 18)
    assert all(ms > 0 for batch in table.batches for ms in (*batch.step_ms, batch.plain_ms))


@pytest.mark.parametrize("context", [2, 3, 9])
def test_a_context_smaller_than_the_probe(context: int, tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_runner(tiny_pair.target, tiny_pair.drafter, context=context, concurrency=2)
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    assert measure(opened.engine.pair, [1, 2], opened.engine.pair.block_size).batches[-1].rows[-1] == 12
    assert len(opened.ids([{"prompt_ids": [301], "mode": "static", "ignore_eos": True}])[0]) == context - 1


def without_table(pair: Any, **spec: Any) -> Any:
    from sparkchat.engine.engine import Engine
    from sparkchat.params import LoadSpec

    events: list[dict[str, Any]] = []
    spec = {"device": "cpu", "context": 128, "threads": 1, **spec}
    engine = Engine(
        LoadSpec(name="fixture", model_path=str(pair.target), drafter_path=str(pair.drafter), **spec), events.append
    )
    return engine, events


def stages(events: list[dict[str, Any]]) -> list[str]:
    return [e["stage"] for e in events if e["event"] == "loading"]


def test_a_measured_table_is_kept_and_found_again(
    tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    cache = str(tmp_path / "cache")
    first, events = without_table(tiny_pair, mode="compact", cache_dir=cache)
    assert "cost_table" in stages(events)
    table = first.info["cost_table"]
    assert (table["source"], table["rows"]) == ("measured", [1, 2, 3, 4, 5, 6])
    # The next start finds it in every mode, and measures nothing.
    second, events = without_table(tiny_pair, mode="static", cache_dir=cache)
    assert "cost_table" not in stages(events)
    assert second.info["cost_table"] == {**table, "source": "cached"}
    # Another batch size, or other weights, is another table.
    assert without_table(tiny_pair, mode="static", cache_dir=cache, concurrency=2)[0].info["cost_table"] is None
    weights = tiny_pair.drafter / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert without_table(tiny_pair, mode="static", cache_dir=cache)[0].info["cost_table"] is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": "other"}', b'{"schema": "sparkchat.cost_table/1"}', b"\xff\xfe",
     b'{"schema": "sparkchat.cost_table/1", "rows": [2, 1], "step_ms": [1, 1], "plain_ms": null}',
     b'{"schema": "sparkchat.cost_table/1", "rows": [1], "step_ms": ["x"], "plain_ms": null}'],
)  # fmt: skip
def test_a_damaged_table_is_measured_again_and_replaced(
    content: bytes, tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    cache = str(tmp_path / "cache")
    without_table(tiny_pair, mode="compact", cache_dir=cache)
    (path,) = (tmp_path / "cache" / "cost_tables").iterdir()
    path.write_bytes(content)
    engine, events = without_table(tiny_pair, mode="compact", cache_dir=cache)
    (notice,) = [e["message"] for e in events if e["event"] == "notice"]
    assert str(path) in notice
    assert "replaced by the next measurement" in notice
    assert "tune" not in notice
    assert engine.info["cost_table"]["source"] == "measured"
    assert without_table(tiny_pair, cache_dir=cache)[0].info["cost_table"]["source"] == "cached"


def test_a_cache_folder_that_cannot_be_written_is_a_notice(
    tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    (tmp_path / "file").write_text("in the way")
    engine, events = without_table(tiny_pair, mode="compact", cache_dir=str(tmp_path / "file"))
    assert engine.info["cost_table"]["source"] == "measured"
    assert any("cannot be" in e["message"] for e in events if e["event"] == "notice")


def test_the_first_mode_that_plans_measures_in_the_middle_of_an_answer(
    tiny_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when every cache row is taken, by the answer itself and an idle session."""
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    line = {"prompt_ids": [301, 302], "max_tokens": 24, "ignore_eos": True}
    engine, _ = without_table(tiny_pair, mode="static")
    (plain,) = engine.generate([to_request({**line, "mode": "off", "session": "idle"}, 0)])
    assert engine.info["cost_table"] is None
    engine.submit(to_request({**line, "session": "busy"}, 1))
    events = [e for _ in range(6) for e in engine.step()]
    switched = engine.set_mode("compact")
    assert [e["event"] for e in switched] == ["info", "mode_change"]
    assert switched[0]["info"]["cost_table"]["source"] == "measured"
    assert engine.set_mode("static")[0]["event"] == "mode_change"
    assert [e["event"] for e in engine.set_mode("compact")] == ["mode_change"]
    while engine.has_work:
        events += engine.step()
    assert events[-1]["result"]["token_ids"] == plain["token_ids"]
    assert {e["mode_requested"] for e in events if e["event"] == "step"} == {"static", "compact"}


def test_a_request_in_a_planning_mode_measures_first(tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    engine, _ = without_table(tiny_pair)
    line = {"prompt_ids": [301], "mode": "cap-accept", "max_tokens": 9, "ignore_eos": True}
    assert [e["event"] for e in engine.submit(to_request(line, 0))] == ["info"]
    events = []
    while engine.has_work:
        events += engine.step()
    assert all(e["fallback"] is None and e["budget"] is not None for e in events if e["event"] == "step")


def test_a_damaged_pair_is_named_instead_of_measured(
    damaged_target: Path, tiny_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the probe would wait for a first token that never comes."""
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(cost_probe, "PROMPT_TOKENS", 512)  # long enough to hold the damaged token
    pair = SimpleNamespace(target=damaged_target, drafter=tiny_pair.drafter)
    with pytest.raises(DamagedFile, match="not numbers"):
        without_table(pair, mode="compact", context=600)
    engine, _ = without_table(pair, mode="static", context=600)
    (refused,) = engine.submit(to_request({"prompt_ids": [301], "mode": "compact"}, 0))
    assert refused["result"]["finish_reason"] == "error"
    assert "not numbers" in refused["result"]["error"]
    with pytest.raises(DamagedFile):
        engine.set_mode("compact")
    assert engine.mode == "static"
    (good,) = engine.generate([to_request({"prompt_ids": [301], "max_tokens": 4, "ignore_eos": True}, 1)])
    assert (good["error"], NAN_TOKEN in good["token_ids"]) == (None, False)


def test_fewer_temperatures_than_the_block_do_not_stop_the_probe(
    tiny_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET_SECONDS", 0.0)
    engine, _ = without_table(tiny_pair, mode="compact", block_size=3, temperatures=(1.0, 1.1, 1.2))
    assert engine.info["cost_table"]["rows"][-1] == 3 + 1
    wider = to_request({"prompt_ids": [301], "mode": "compact", "block_size": 4}, 0)
    (refused,) = engine.submit(wider)
    assert "temperatures" in refused["result"]["error"]
