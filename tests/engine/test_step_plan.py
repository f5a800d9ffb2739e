"""What a request does in a step is decided from what is known before the draft in question is looked at."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.lagged_lengths import choose_lagged
from sparkchat.engine.outlook import Outlook
from sparkchat.engine.request import RequestState
from sparkchat.engine.step_plan import (
    REASON_DOES_NOT_PAY,
    REASON_NO_CONFIDENCE,
    REASON_NO_TABLE,
    StepIntent,
    choose_lengths,
    intend,
    standing_mode,
)
from sparkchat.params import BatchCosts, ContextCosts, CostTable, GenerateRequest, SamplingParams

BLOCK = 5
MODES = ("off", "static", "compact", "cap-accept")


def pair(confidence: bool | None = True, cost: CostLookup | None = None) -> Any:
    drafter = None if confidence is None else SimpleNamespace(has_confidence=confidence)
    reason = None if drafter else "there is no drafter"
    return SimpleNamespace(drafter=drafter, cost=cost, refinement=None, reason_off=reason, outlook=Outlook())


def cost(rng: random.Random) -> CostLookup:
    """Steps of jagged height, with cliffs."""
    times, ms = [], 1.0
    for _ in range(40):
        ms += rng.choice([0.0, 0.01, 0.05, 0.6])
        times.append(ms)
    return CostLookup(CostTable(tuple(range(1, 41)), tuple(times)))


def state(seed: int | None = None, temperature: float = 1.0, **changes: Any) -> RequestState:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=changes.pop("max_tokens", None))
    request = GenerateRequest(id="r", prompt_ids=(1, 2, 3), sampling=sampling)
    return RequestState(request, (1, 2, 3), BLOCK, 100, seed or 0, output=None, history=None, **changes)


def survival(rng: random.Random) -> list[float]:
    alive, values = 1.0, []
    for _ in range(BLOCK):
        alive *= rng.choice([0.0, 0.3, 0.8, 0.95, 1.0])
        values.append(alive)
    return values


def planned(mode: str = "compact") -> StepIntent:
    return StepIntent(mode, mode, BLOCK, BLOCK, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_modes_by_what_the_pair_can_do(mode: Any) -> None:
    assert standing_mode(mode, pair()) == (mode, None)
    without = "off" if mode == "off" else "static"
    reason = REASON_NO_CONFIDENCE if mode in ("compact", "cap-accept") else None
    assert standing_mode(mode, pair(confidence=False)) == (without, reason)
    assert standing_mode(mode, pair(None)) == ("off", None if mode == "off" else "there is no drafter")


def test_intents() -> None:
    table = cost(random.Random(0))
    for mode, drafts in (("off", 0), ("static", BLOCK), ("compact", BLOCK), ("cap-accept", BLOCK)):
        intent = intend(state(), mode, pair(cost=table))  # type: ignore[arg-type]
        assert (intent.mode, intent.mode_requested, intent.draft_len, intent.fallback) == (mode, mode, drafts, None)
    assert intend(state(), "compact", pair()).fallback == REASON_NO_TABLE
    assert intend(state(mode_override="off"), "static", pair()).mode == "off"


def test_a_closed_gate_stops_drafting_in_compact_alone() -> None:
    closed = state()
    closed.gate.pause_left = 3
    intent = intend(closed, "compact", pair(cost=cost(random.Random(0))))
    assert (intent.mode, intent.draft_len, intent.fallback) == ("off", 0, REASON_DOES_NOT_PAY)
    assert intend(closed, "static", pair()).draft_len == BLOCK
    assert intend(closed, "cap-accept", pair()).draft_len == BLOCK


@pytest.mark.parametrize(("left", "limit"), [(1, 0), (2, 1), (4, 3), (6, 5), (50, 5)])
def test_no_more_drafts_are_worth_verifying_than_may_be_delivered(left: int, limit: int) -> None:
    last = state(max_tokens=60)
    last.delivered = [0] * (60 - left)
    table = cost(random.Random(0))
    assert intend(last, "compact", pair(cost=table)).limit == limit
    assert intend(last, "compact", pair(cost=table)).draft_len == (BLOCK if limit else 0)
    assert intend(last, "static", pair()).draft_len == BLOCK  # static always proposes the whole block


def test_the_context_limits_as_max_tokens_does() -> None:
    last = state()
    last.delivered = [0] * 94  # 3 + 94 of 100
    assert intend(last, "compact", pair(cost=cost(random.Random(0)))).limit == 2


def test_whether_draft_k_is_verified_does_not_depend_on_what_follows_it() -> None:
    """For every request of a batch: {length >= k} is settled by its survivals up to k."""
    rng = random.Random(1)
    for _ in range(300):
        table = pair(cost=cost(rng))
        states = [state(seed=rng.choice([None, 7])) for _ in range(rng.randint(1, 4))]
        intents = [planned(rng.choice(["compact", "cap-accept", "static"])) for _ in states]
        alive = [survival(rng) for _ in states]
        lengths = choose_lengths(states, intents, alive, table)
        r, k = rng.randrange(len(states)), rng.randint(1, BLOCK)
        changed = [list(row) for row in alive]
        for j in range(k, BLOCK):
            changed[r][j] = changed[r][j - 1] * rng.choice([0.0, 0.5, 1.0])
        again = choose_lengths(states, intents, changed, table)
        for before, after, intent in zip([lengths[r]], [again[r]], [intents[r]], strict=True):
            if intent.mode == "static":
                assert before.verify_len == after.verify_len == BLOCK
                continue
            one = before.cap if intent.mode == "cap-accept" else before.verify_len
            two = after.cap if intent.mode == "cap-accept" else after.verify_len
            assert (one >= k) == (two >= k)


def test_a_sampled_request_with_a_seed_of_its_own_is_planned_as_if_alone() -> None:
    rng = random.Random(2)
    seen = set()
    for _ in range(200):
        table = pair(cost=cost(rng))
        mine, alive = state(seed=3), survival(rng)
        (alone,) = choose_lengths([mine], [planned()], [alive], table)
        mates = [state(seed=rng.choice([None, 5])) for _ in range(3)]
        intents = [planned(), planned("static"), planned(), planned("cap-accept")]
        among = choose_lengths([mine, *mates], intents, [alive, *(survival(rng) for _ in mates)], table)
        assert among[0] == alone
        seen.add(alone.verify_len)
    assert len(seen) > 2


def test_requests_without_a_seed_share_one_plan() -> None:
    lookup = CostLookup(CostTable((1, 2, 3, 4, 5, 6), (1.0, 1.05, 1.1, 5.0, 5.0, 50.0)))
    states = [state(), state(temperature=0.0, seed=1), state(seed=9)]
    intents = [planned() for _ in states]
    alive = [[0.9] * BLOCK for _ in states]
    first, second, own = choose_lengths(states, intents, alive, pair(cost=lookup))
    # Alone two more rows are cheap; on top of those the two that share find none.
    assert own.verify_len == 2
    assert (first.verify_len, second.verify_len) == (0, 0)
    assert first.budget == second.budget == 0
    assert first.predicted_theta == second.predicted_theta != own.predicted_theta


def test_static_rows_count_and_are_not_planned() -> None:
    lookup = CostLookup(CostTable((6, 7, 8), (1.0, 1.01, 9.0)))
    lengths = choose_lengths(
        [state(), state()], [planned("static"), planned()], [[0.5] * 5, [0.9] * 5], pair(cost=lookup)
    )
    # Six static rows and one anchor fill the cheap part: the next row costs nine times as much.
    assert [c.verify_len for c in lengths] == [BLOCK, 0]
    assert (lengths[0].budget, lengths[0].predicted_ms, lengths[0].cap) == (None, None, None)
    assert lengths[1].predicted_ms == pytest.approx(1.01)


def test_cap_accept_verifies_everything_and_caps_what_is_committed() -> None:
    lookup = CostLookup(CostTable((1, 2, 3), (1.0, 1.01, 9.0)))
    (chosen,) = choose_lengths([state()], [planned("cap-accept")], [[0.9] * 5], pair(cost=lookup))
    assert (chosen.verify_len, chosen.cap) == (BLOCK, 1)


def test_a_cap_of_the_users_own_needs_no_table_and_is_not_planned() -> None:
    capped = state(accept_cap=2)
    for table in (None, CostLookup(CostTable((1, 2, 3), (1.0, 1.01, 9.0)))):
        intent = intend(capped, "cap-accept", pair(cost=table))
        assert intent.fallback is None
        (chosen,) = choose_lengths([capped], [intent], [[0.9] * 5], pair(cost=table))
        assert (chosen.verify_len, chosen.cap, chosen.budget) == (BLOCK, 2, None)
    capped.delivered = [0] * 95  # two more tokens may be delivered
    intent = intend(capped, "cap-accept", pair())
    assert choose_lengths([capped], [intent], [[0.9] * 5], pair())[0].cap == 1


def test_costs_are_those_of_the_batch_and_its_context() -> None:
    batches = (
        BatchCosts(1, (1, 2, 3, 4, 5, 6), (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 0.9),
        BatchCosts(4, (4, 8, 24), (2.0, 2.4, 4.0), 1.6),
    )
    table = CostTable(batches[0].rows, batches[0].step_ms, "measured", 0.9, batches, False, ContextCosts(40, 0.01))
    looked_up = pair(cost=CostLookup(table))
    states = [state() for _ in range(4)]
    for one in states:
        one.tokens = list(range(21))
    chosen = choose_lengths(states, [planned() for _ in states], [[0.9] * 5] * 4, looked_up)
    rows = 4 + chosen[0].budget
    assert chosen[0].predicted_ms == pytest.approx(looked_up.cost.at(4, 80).step_ms(rows))
    assert chosen[0].predicted_ms > looked_up.cost.at(4).step_ms(rows)
    assert chosen[0].plain_theta == pytest.approx(1000 * 4 / (1.6 + 40 * 0.01))
    seeded = [state(seed=n) for n in range(4)]
    alone = choose_lengths(seeded, [planned() for _ in states], [[0.9] * 5] * 4, looked_up)
    assert alone[0].plain_theta == pytest.approx(1000 / 0.9)


def test_a_starved_request_is_verified_beside_likelier_ones() -> None:
    lookup = CostLookup(CostTable((1, 2, 3, 4, 5), (1.0, 1.0, 1.0, 9.0, 9.0)))
    starved, other = state(), state()
    starved.gate.unverified = 24
    intents = [intend(s, "compact", pair(cost=lookup)) for s in (starved, other)]
    assert [intent.floor for intent in intents] == [1, 0]
    lengths = choose_lengths([starved, other], intents, [[0.2] * 5, [0.9] * 5], pair(cost=lookup))
    assert [c.verify_len for c in lengths] == [1, 0]
    lagged = choose_lagged([starved, other], intents, [[0.2] * 5, [0.9] * 5], pair(cost=lookup))
    assert lagged[0].verify_len >= 1


def test_without_a_table_nothing_is_trimmed() -> None:
    (chosen,) = choose_lengths([state()], [planned()], [[0.1] * 5], pair())
    assert (chosen.verify_len, chosen.predicted_ms, chosen.predicted_theta) == (BLOCK, None, None)


@pytest.mark.parametrize("choose", [choose_lengths, choose_lagged])
def test_requests_that_pause_are_told_how_long_the_step_takes(choose: Any) -> None:
    one, four = BatchCosts(1, (1, 6), (12.0, 15.0), 10.0), BatchCosts(4, (4, 24), (24.0, 60.0), 16.0)
    table = CostLookup(CostTable(one.rows, one.step_ms, "measured", 10.0, (one, four), False))
    states, ready = [state(mode_override="compact") for _ in range(4)], pair(cost=table)
    resting = StepIntent("off", "compact", 0, 0, REASON_DOES_NOT_PAY)
    found = choose(states, [resting] * 4, [[]] * 4, ready)
    assert {(c.verify_len, c.predicted_ms, c.predicted_theta) for c in found} == {(0, 16.0, None)}
    # One of them drafts: what the drafts of three would take is saved, and all are told the same.
    doubtful = [0.0] * BLOCK
    found = choose(states, [planned(), resting, resting, resting], [doubtful, [], [], []], ready)
    verified = found[0].verify_len
    assert {c.predicted_ms for c in found} == {table.at(4, 8, 1).step_ms(4 + verified)}
    assert table.at(4, 8, 1).step_ms(4) == pytest.approx(24.0 - 8.0 + 2.0)
    # Somebody who drafts without a plan: the table knows no such step.
    found = choose(states[:2], [planned("static"), resting], [doubtful, []], ready)
    assert found[1].predicted_ms is None
    assert choose(states[:2], [StepIntent("off", "off", 0, 0, None), resting], [[], []], ready)[0].predicted_ms is None
