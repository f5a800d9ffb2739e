"""What ``bench`` compares, adds up and tells, without an engine."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import struct
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import pytest

from sparkchat.bench.arms import Arm, chosen_arms, possible_arms
from sparkchat.bench.bars import bars_of, told
from sparkchat.bench.chats import held_out_chats, meaningless_chats
from sparkchat.bench.counted import Counted, counted, most_together
from sparkchat.bench.equality import Equality, compare
from sparkchat.bench.measuring import MOST_TRIES, Tally, measure, merged
from sparkchat.bench.plot import throughput_svg
from sparkchat.bench.png import png_of
from sparkchat.bench.report import HEADER, plot_lines, rows_of, step_times, table_rows
from sparkchat.engine.step_totals import StepTotals
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance
from sparkchat.train.prompts import prompt_books

# Arms


def test_the_arms_are_what_the_pair_can_do() -> None:
    assert list(possible_arms(None, False, None)) == ["off"]
    assert list(possible_arms("mtp", False, 1)) == ["off", "mtp"]
    assert list(possible_arms("dspark", False, 3)) == ["off", "static", "static-1", "static-2"]
    full = possible_arms("dspark", True, 3)
    assert list(full)[:5] == ["off", "static", "compact", "compact-no-table", "cap-accept"]
    assert (full["compact-no-table"].mode, full["compact-no-table"].by_table) == ("compact", False)
    assert (full["static-2"].mode, full["static-2"].block_size) == ("static", 2)


def test_plain_decoding_is_always_among_the_chosen() -> None:
    possible = possible_arms("dspark", True, 3)
    names = [arm.name for arm in chosen_arms(None, possible)]
    assert names == ["off", "static", "compact", "compact-no-table", "cap-accept"]
    assert [arm.name for arm in chosen_arms(["static-1", "static-1"], possible)] == ["off", "static-1"]
    with pytest.raises(UsageError, match="did you mean 'compact'"):
        chosen_arms(["compcat"], possible)
    with pytest.raises(UsageError, match="mtp"):
        chosen_arms(["mtp"], possible)


# Prompts


def test_the_chats_are_held_out_and_the_same_every_time() -> None:
    chats = held_out_chats(40)
    assert chats == held_out_chats(40)
    assert chats[:10] == held_out_chats(10)
    training, held_out = prompt_books()
    systems = {system for _, system in chats if system is not None}
    assert 1 <= len(systems) <= len(held_out.system_prompts)
    assert not systems & set(training.system_prompts)
    assert len({ids for ids, _ in meaningless_chats(20, 512)}) == 20
    assert all(0 <= i < 512 for ids, _ in meaningless_chats(20, 512) for i in ids)


# Running


class FakeRun:
    """Answers at once. ``tokens`` gives those of a request by arm and prompt number."""

    def __init__(self, tokens: Callable[[str, int], list[int]], dtype: str = "bfloat16", margin: float = 1.0) -> None:
        self.info = {"dtype": dtype, "chat_template": "checkpoint"}
        self.tokens, self.margin = tokens, margin
        self.asked: list[GenerateRequest] = []
        self.table: list[bool] = []
        self.error: str | None = None
        self.now, self.made = 0.0, 0
        self.captures: list[int] = []
        """Steps captured before the first step of a round, in its middle, and behind its last; then none."""

    def num_graphs(self) -> int:
        return self.made

    def ask(self, command: dict[str, Any], wanted: str, take: Callable[[Any], None]) -> dict[str, Any]:
        assert (command["op"], wanted) == ("plan_by_table", "info")
        self.table.append(command["on"])
        return {"event": "info"}

    def answer(
        self, requests: Sequence[GenerateRequest], take: Callable[[Any], None], *, until_first: bool = False
    ) -> list[dict[str, Any]]:
        self.asked += requests
        results = []
        for request in requests:
            if request.logprobs is not None:
                top = [{"id": 1, "logprob": -0.5}, {"id": 9, "logprob": -0.5 - self.margin}]
                take({"event": "delta", "logprobs": [{"id": 1, "logprob": -0.5, "top": top}]})
            take({"event": "delta", "id": request.id})
            name = request.id.rsplit("-", 1)[0]
            ids = self.tokens(name, int(str(request.prompt or "0")[-1]))
            results.append(result(ids, self.error))
        if until_first:
            self.take_steps(len(requests), take)
        return results

    def take_steps(self, count: int, take: Callable[[Any], None]) -> None:
        """One step of one request, as long as the others come in; four of all, of which three begin at the end of
        another; one where an answer has ended. Half a second each."""
        for number, requests in enumerate((count - 1, count, count, count, count, count - 1)):
            if number in (1, 3, 5) and self.captures:
                self.made += self.captures.pop(0)
            self.now += 0.5
            take(batch_step(self.now, requests, 2 * requests, num_graphs=self.made))


def batch_step(at: float, requests: int, tokens: int = 0, **changes: Any) -> dict[str, Any]:
    step = {
        "event": "batch_step",
        "t_ns": round(at * 1e9),
        "requests": requests,
        "tokens": tokens,
        "proposed": 3 * requests,
        "verified": 2 * requests,
        "accepted": tokens - requests,
        "limited": 0,
        "expected": None,
        "step_ms": 500.0,
        "predicted_step_ms": 450.0,
        "num_graphs": 0,
    }
    return {**step, **changes}


def result(ids: list[int], error: str | None = None) -> dict[str, Any]:
    return {
        "prompt_token_ids": [7, 8],
        "token_ids": ids,
        "finish_reason": "length" if error is None else "error",
        "error": error,
    }


CHATS: list[Any] = [(f"prompt {n}", None) for n in range(4)]
ARMS = [Arm("off", "off"), Arm("static", "static"), Arm("compact-no-table", "compact", by_table=False)]


def rounds_of(run: FakeRun, arms: list[Arm], chats: list[Any], concurrency: int, **sampling: Any) -> dict[str, Tally]:
    """Each chat once."""
    found: dict[str, list[Tally]] = {arm.name: [] for arm in arms}
    taken: list[float] = []

    def take(arm: Arm, tally: Tally, seconds: float) -> None:
        found[arm.name].append(tally)
        taken.append(seconds)

    num_rounds = len(chats) // concurrency
    measure(run, arms, chats, concurrency, SamplingParams(**sampling), lambda: num_rounds, take)  # type: ignore[arg-type]
    assert min(taken) > 0.0
    return {name: merged(tallies) for name, tallies in found.items()}


def test_a_first_round_that_captured_steps_is_thrown_away() -> None:
    for captures in ([2, 0, 0], [0, 2, 0]):
        run = FakeRun(lambda name, number: [1, 2, 3])
        run.captures = [*captures, 0, 3, 0]
        tally = rounds_of(run, ARMS[:1], CHATS[:2], 2, temperature=0.7, max_tokens=3)["off"]
        assert len(run.asked) == 4
        # The second counts, but for the step beside which something was captured.
        assert (tally.rounds, tally.thrown_away, tally.sums.tokens, tally.sums.seconds) == (1, 1, 2 * 4, 1.0)
        found = tally.to_json(1)
        assert (found["rounds_thrown_away"], found["captures"], found["steps_left_out"]) == (1, 5, 1)
        assert found["seconds_thrown_away"] > 0.0
    late = FakeRun(lambda name, number: [1, 2, 3])
    late.captures = [0, 0, 9]
    assert rounds_of(late, ARMS[:1], CHATS[:2], 2)["off"].thrown_away == 0


def test_the_last_try_counts_whatever_it_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(lambda name, number: [1, 2, 3])

    def steps(count: int, take: Callable[[Any], None]) -> None:
        for number in range(3):
            run.made += 1
            take(batch_step(float(number), count, count, num_graphs=run.made))

    monkeypatch.setattr(run, "take_steps", steps)
    tally = rounds_of(run, ARMS[:1], CHATS[:1], 1, max_tokens=3)["off"]
    assert (tally.rounds, tally.thrown_away, tally.captures) == (1, MOST_TRIES - 1, 3 * MOST_TRIES)
    assert (tally.tokens_per_second, tally.sums.left_out) == (None, 2)


def test_arms_take_turns_over_the_same_prompts() -> None:
    run = FakeRun(lambda name, number: [1, 2, 3, 4, 5, 6])
    tallies = rounds_of(run, ARMS, CHATS, 2, temperature=0.7, max_tokens=6, seed=5)
    order = [r.id.rsplit("-", 1)[0] for r in run.asked]
    assert order == ["off"] * 2 + ["static"] * 2 + ["compact-no-table"] * 2 + [
        *["static"] * 2, *["compact-no-table"] * 2, *["off"] * 2,
    ]  # fmt: skip
    assert run.table == [True, True, False, True, False, True]
    assert [r.prompt for r in run.asked[:6]] == ["prompt 0", "prompt 1"] * 3
    # A chosen seed would have every request planned alone.
    assert {r.sampling.seed for r in run.asked} == {None}
    assert not any(r.steps for r in run.asked)
    found = tallies["static"].to_json(kv_bytes_per_token=100)
    # Two rounds of three steps of two requests.
    assert (found["rounds"], found["together"], found["seconds"]) == (2, 2, 3.0)
    assert (found["tokens"], found["num_steps"], found["expected_tokens"]) == (24, 12, None)
    assert found["tokens_per_second"] == found["drawn_tokens_per_second"] == 8.0
    assert found["tokens_per_second_per_user"] == 4.0
    assert found["acceptance_length"] == found["drawn_acceptance_length"] == found["mean_verify_len"] == 2.0
    assert found["utilisation"] == pytest.approx(24 / (24 + 12))
    assert (found["trimmed_rows"], found["trimmed_bytes"]) == (12, 1200)
    assert (found["mean_step_ms"], found["step_time_error"]) == (500.0, pytest.approx(-0.1))


def test_rounds_go_on_over_the_prompts_until_they_are_enough() -> None:
    run, rounds = FakeRun(plain_tokens), [1, 2, 3, 3]
    measure(
        run, ARMS[:1], CHATS, 3, SamplingParams(), lambda: rounds.pop(0), lambda *_: None  # type: ignore[arg-type]
    )  # fmt: skip
    assert [r.prompt for r in run.asked] == [f"prompt {n % 4}" for n in range(9)]
    assert rounds == []


# What counts


def test_only_steps_of_all_count_and_none_that_an_end_cuts() -> None:
    steps = [
        batch_step(0.0, 1, 9),
        batch_step(1.0, 3, 9),
        batch_step(2.0, 3, 9),
        batch_step(5.0, 3, 6, predicted_step_ms=None, num_graphs=0),
        batch_step(9.0, 3, 9, num_graphs=1),
        batch_step(10.0, 3, 7, num_graphs=1, limited=1),
        batch_step(11.0, 2, 9, num_graphs=1),
        batch_step(12.0, 3, 9, num_graphs=1),
    ]
    found = counted(steps, 3)
    assert (found.seconds, found.steps, found.answer_steps, found.tokens) == (4.0, 2, 6, 15)
    assert (found.proposed, found.verified, found.accepted) == (18, 12, 9)
    assert (found.predicted_steps, found.predicted_ms, found.measured_ms, found.left_out) == (1, 450.0, 500.0, 1)
    assert (found.expected_tokens, found.yielded) == (None, 15)
    assert most_together(steps) == 3
    # An answer of few tokens has no step that is not cut, or none before it.
    assert counted([batch_step(1.0, 1, 2, limited=1), batch_step(3.0, 1, 2, limited=1)], 1).seconds == 2.0
    alone = counted([batch_step(1.0, 1, 2, limited=1)], 1)
    assert (alone.seconds, alone.tokens) == (0.5, 2)
    assert counted([], 0) == Counted()


PROFILE = SimulatedAcceptance("chat", BUILT_IN["chat"])


def drawn_step(draw: random.Random, trim: Callable[[list[float]], int]) -> tuple[int, list[float]]:
    """(tokens, what is expected) of a step that verifies ``trim`` of its drafts, by the engine's own sums."""
    chances = [(u * (2.0 - u)) ** a for u, a in ((draw.random(), a) for a in PROFILE.exponents)]
    totals, length = StepTotals(), trim(chances)
    totals.add_chances(PROFILE, [math.log(c / (1.0 - c)) for c in chances], length)
    passed = sum(1 for _ in itertools.takewhile(lambda c: draw.random() < c, chances[:length]))
    return 1 + passed, [totals.expected, totals.of_block, totals.of_profile]


def first_doubt(chances: list[float]) -> int:
    """Drafts before their survival falls below 0.4."""
    return sum(alive > 0.4 for alive in itertools.accumulate(chances, mul))


def runs_of(trim: Callable[[list[float]], int], num_runs: int, num_steps: int) -> list[Counted]:
    draw = random.Random(5)
    runs = []
    for _ in range(num_runs):
        steps = [drawn_step(draw, trim) for _ in range(num_steps)]
        events = [batch_step(float(i), 1, tokens, expected=sums) for i, (tokens, sums) in enumerate(steps)]
        runs.append(counted(events, 1))
    return runs


def spread(values: list[float]) -> float:
    return statistics.stdev(values)


def test_expected_tokens_are_right_and_free_of_luck() -> None:
    whole = runs_of(lambda chances: 7, 20, 61)
    for run in whole:  # of whole blocks the closed form remains
        assert run.yielded / run.answer_steps == pytest.approx(PROFILE.acceptance_length, rel=1e-12)
    assert spread([run.tokens / 60 for run in whole]) > 0.2
    assert {run.yielded for run in runs_of(lambda chances: 0, 2, 31)} == {30.0}
    # Plans that look at confidences: as brute force over many steps says, with a third of its spread.
    trimmed = runs_of(first_doubt, 70, 61)
    brute = [run.tokens / run.answer_steps for run in trimmed]
    found = [run.yielded / run.answer_steps for run in trimmed]
    standard_error = spread(brute) / len(brute) ** 0.5
    assert abs(statistics.mean(found) - statistics.mean(brute)) < 4 * standard_error
    assert spread(found) < 0.35 * spread(brute)


def test_steps_that_draft_and_steps_that_pause_stand_side_by_side() -> None:
    parts = [
        batch_step(0.0, 2),
        batch_step(1.0, 2, 5, expected=[1.5, 3.0, 2.4]),
        batch_step(2.0, 2, 2, expected=[0.0, 0.0, 0.0]),
    ]
    found = counted(parts, 2)
    # Chances were 1.25 times as good as they are.
    assert found.yielded == pytest.approx(4 + 1.5 / 1.25)
    assert found.tokens_per_second == pytest.approx(5.2 / 2.0)
    told = Tally([found], 2).to_json(1)
    assert (told["expected_tokens"], told["drawn_tokens_per_second"]) == (pytest.approx(5.2), 3.5)
    assert told["acceptance_length"] == pytest.approx(1.3)


def test_an_answer_that_fails_ends_the_bench() -> None:
    run = FakeRun(lambda name, number: [])
    run.error = "the model's logits are not numbers"
    with pytest.raises(SparkchatError, match=r"arm off failed.*not numbers"):
        rounds_of(run, ARMS, CHATS, 2)


def test_nothing_done_is_not_measured() -> None:
    found = Tally().to_json(10)
    assert found["tokens_per_second"] is found["acceptance_length"] is found["utilisation"] is None


# Equality


def plain_tokens(name: str, number: int) -> list[int]:
    return [1] * 6


def test_equal_answers_are_equal() -> None:
    found = compare(FakeRun(plain_tokens), ARMS, CHATS, 2)  # type: ignore[arg-type]
    assert found == {"static": Equality(4), "compact-no-table": Equality(4)}
    assert all(equality.is_equal for equality in found.values())


def parting(name: str, number: int) -> list[int]:
    return [1, 1, 9, 9, 9, 9] if name == "static" and number == 2 else [1] * 6


def test_another_token_is_a_difference_and_says_where() -> None:
    found = compare(FakeRun(parting, margin=2.0), ARMS, CHATS, 2)  # type: ignore[arg-type]
    assert found["compact-no-table"].is_equal
    assert not found["static"].is_equal
    assert found["static"].difference == "answer 3 parts at token 2: 9 for 1, which is less likely by 2.00 in logits"


def test_two_tokens_that_rounding_cannot_tell_apart_are_no_difference() -> None:
    run = FakeRun(parting, margin=0.2)
    found = compare(run, ARMS, CHATS, 4)  # type: ignore[arg-type]
    assert (found["static"].is_equal, found["static"].near_ties) == (True, 1)
    (asked,) = [request for request in run.asked if request.logprobs is not None]
    assert asked.prompt_ids == (7, 8, 1, 1)


def test_in_float32_every_difference_counts() -> None:
    found = compare(FakeRun(parting, dtype="float32", margin=0.0), ARMS, CHATS, 4)  # type: ignore[arg-type]
    assert not found["static"].is_equal


def test_a_shorter_answer_is_a_difference() -> None:
    run = FakeRun(lambda name, number: [1] * (3 if name == "static" else 6), margin=0.0)
    assert compare(run, ARMS, CHATS, 4)["static"].difference == "answer 1 has 3 tokens for 6"  # type: ignore[arg-type]


# Telling


def tally(tokens: int, seconds: float) -> Tally:
    return Tally([Counted(seconds=seconds, steps=2, answer_steps=2, tokens=tokens)], together=2)


def test_no_speed_up_is_told_of_an_arm_that_says_something_else() -> None:
    tallies = {1: {"off": tally(10, 1.0), "static": tally(30, 1.0), "compact": tally(20, 1.0)}}
    rows = rows_of(tallies, {"static": Equality(4, 0, "answer 1"), "compact": Equality(4, 1)}, 8)
    by_arm = {row["arm"]: row for row in rows}
    assert (by_arm["compact"]["speed_up"], by_arm["compact"]["speed_up_per_user"]) == (2.0, 2.0)
    assert by_arm["static"]["speed_up"] is by_arm["static"]["speed_up_per_user"] is None
    assert by_arm["static"]["tokens_per_second"] == 30.0
    cells = {row[1]: row for row in table_rows(rows, ["static"])}
    assert cells["static"][3] == cells["static"][5] == "refused"
    assert cells["compact"][3] == "2.00"
    assert {len(row) for row in cells.values()} == {len(HEADER)}


def rounds(*tokens: int) -> Tally:
    """A round of a second each."""
    told = {"predicted_steps": 1, "predicted_ms": 11.0, "measured_ms": 10.0}
    return Tally([Counted(seconds=1.0, tokens=n, **told) for n in tokens], together=4)  # type: ignore[arg-type]


def test_compact_is_told_beside_the_best_fixed_length() -> None:
    arms = {"off": rounds(10, 12), "static": rounds(15, 15), "static-2": rounds(20, 20), "compact": rounds(22, 20)}
    (bar,) = bars_of({4: {**arms, "cap-accept": rounds(90, 90)}})
    assert (bar["concurrency"], bar["best_fixed"]) == (4, "static-2")
    assert bar["fixed_arms"] == ["off", "static", "static-2"]
    assert bar["compact_to_best_fixed"]["ratio"] == pytest.approx(42 / 40)
    assert bar["compact_to_best_fixed"]["low"] == pytest.approx(1.0)
    assert bar["compact_to_best_fixed"]["high"] == pytest.approx(1.1)
    assert bar["compact_to_static"]["ratio"] == pytest.approx(42 / 30)
    assert bar["step_time_error"] == pytest.approx(0.1)
    (line,) = told([bar])
    assert line == (
        "4 together: compact is 1.050 (1.000 to 1.100) of the best fixed length, static-2 of 3; "
        "its steps were predicted 10.0% too long"
    )


def test_predicted_steps_are_told_by_number_of_requests() -> None:
    (found,) = step_times({4: {"off": tally(3, 1.0), "compact": rounds(1, 2)}})
    assert found == {
        "requests": 4,
        "concurrency": 4,
        "arm": "compact",
        "steps": 2,
        "predicted_ms": 11.0,
        "measured_ms": 10.0,
        "error": pytest.approx(0.1),
    }


def test_an_arm_that_says_something_else_sets_no_bar() -> None:
    arms = {"off": rounds(10), "static": rounds(30), "compact": rounds(12)}
    (bar,) = bars_of({1: arms}, refused=["static"])
    assert (bar["best_fixed"], bar["compact_to_static"]) == ("off", None)
    assert bars_of({1: arms}, refused=["compact"]) == []
    assert bars_of({1: {"off": rounds(10)}}) == []
    (alone,) = bars_of({1: {"compact": Tally()}})
    assert told([alone]) == ["1 together: compact has no fixed length beside it"]
    (still,) = bars_of({1: {"compact": Tally(), "off": Tally()}})
    assert still["compact_to_best_fixed"] is None


def test_fixed_stands_for_every_length() -> None:
    possible = possible_arms("dspark", True, 4)
    names = [arm.name for arm in chosen_arms(["fixed", "compact"], possible)]
    assert names == ["off", "static", "static-1", "static-2", "static-3", "compact"]
    with pytest.raises(UsageError, match="fixed"):
        chosen_arms(["fixed"], possible_arms(None, False, None))


def test_the_plot_is_a_line_for_each_arm() -> None:
    rows = [
        {"arm": arm, "concurrency": n, "tokens_per_second": 40.0 * n, "tokens_per_second_per_user": speed / n}
        for arm, speed in (("off", 40.0), ("<compact>", 80.0))
        for n in (1, 4, 16)
    ]
    lines = plot_lines([*rows, {**rows[0], "arm": "off", "concurrency": 99, "tokens_per_second": None}])
    assert lines["off"] == [(40.0, 40.0, 1), (10.0, 160.0, 4), (2.5, 640.0, 16)]
    svg = throughput_svg(lines, "a & b")
    root = ET.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 2
    assert len(root.findall(f"{space}circle")) == 6
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"a & b", "<compact>", "off", "16"} <= set(texts)
    for circle in root.findall(f"{space}circle"):
        assert 0 <= float(circle.get("cx") or -1) <= 760
        assert 0 <= float(circle.get("cy") or -1) <= 480
    assert throughput_svg({}, "nothing")  # no points, no line, no error


def test_the_plot_is_drawn_with_its_words() -> None:
    svg = throughput_svg({"off": [(40.0, 40.0, 1)]}, "a & b")
    png, reason = png_of(svg)
    assert (png, reason) == (b"", reason) if reason else png.startswith(b"\x89PNG\r\n\x1a\n")
    if reason is None:
        width, height = struct.unpack(">II", png[16:24])
        assert (width, height) == (1520, 960)
        assert png != png_of(throughput_svg({"off": [(40.0, 40.0, 1)]}, "c"))[0]


def test_why_there_is_no_png_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.bench.png._drawn", lambda *_: b"the same without words")
    assert "none of the fonts DejaVu Sans" in (png_of("<svg/>")[1] or "")
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert png_of("<svg/>") == (b"", "no PNG: resvg-py is not installed; the SVG shows the same")


def test_a_plot_that_cannot_be_drawn_costs_no_row() -> None:
    pytest.importorskip("resvg_py")
    png, reason = png_of("no plot")
    assert png == b""
    assert reason is not None
    assert reason.startswith("no PNG: ")
