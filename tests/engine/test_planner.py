"""Algorithm 1: the paper's example, its definition, and the property that makes it lossless."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.planner import Plan, plan
from sparkchat.params import CostTable


def lookup(*step_ms: float) -> CostLookup:
    return CostLookup(CostTable(tuple(range(1, len(step_ms) + 1)), tuple(step_ms)))


def random_cost(rng: random.Random, rows: int) -> CostLookup:
    """Rising times with cliffs and plateaus."""
    total, steps = rng.uniform(0.5, 3.0), []
    for _ in range(rows):
        steps.append(total)
        total += rng.choice([0.0, 0.001, 0.05, 0.3, 2.0])
    return lookup(*steps)


def random_survival(rng: random.Random, width: int) -> list[float]:
    alive, row = 1.0, []
    for _ in range(width):
        alive *= rng.choice([1.0, 1.0, 0.9, 0.5, 0.0, rng.random(), rng.random()])
        row.append(alive)
    return row


def thetas(
    survival: Sequence[Sequence[float]], limits: Sequence[int], cost: CostLookup
) -> list[tuple[float, list[int]]]:
    """Predicted tokens per ms and lengths after each admission in order, from the definition."""
    order = sorted(
        ((a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row[: limits[r]], 1) if a > 0),
        key=lambda c: (-c[0], c[1], c[2]),
    )
    lens, tokens = [0] * len(limits), float(len(limits))
    path = [(tokens / cost.step_ms(len(limits)), list(lens))]
    for count, (a, j, r) in enumerate(order, 1):
        lens[r], tokens = j, tokens + a
        path.append((tokens / cost.step_ms(len(limits) + count), list(lens)))
    return path


def global_search(survival: Sequence[Sequence[float]], limits: Sequence[int], cost: CostLookup) -> tuple[int, ...]:
    """The best point of the whole path: what must NOT be used on confidences of the same step."""
    path = thetas(survival, limits, cost)
    return tuple(max(path, key=lambda point: point[0])[1])


def test_the_papers_example_verifies_nothing_whatever_the_second_confidence():
    cost = lookup(1000 / 1.0, 1000 / 0.5, 1000 / 0.45)
    for c2, best in ((0.9, (2,)), (0.0, (0,))):
        survival = [[0.8, 0.8 * c2]]
        assert plan(survival, [2], cost).verify_lens == (0,)
        assert global_search(survival, [2], cost) == best  # reads x1 through c2
    chosen = plan([[0.8, 0.72]], [2], cost)
    assert chosen.predicted_theta == pytest.approx(1.0)
    assert chosen.predicted_ms == 1000.0
    path = [theta * 1000 for theta, _ in thetas([[0.8, 0.72]], [2], cost)]
    assert path == pytest.approx([1.0, 0.9, 1.134])


def test_admission_stops_at_the_first_loss():
    rng = random.Random(5)
    for _ in range(500):
        requests, width = rng.randint(1, 4), rng.randint(1, 5)
        survival = [random_survival(rng, width) for _ in range(requests)]
        limits = [rng.randint(0, width) for _ in range(requests)]
        cost = random_cost(rng, requests * (width + 1))
        path = thetas(survival, limits, cost)
        best = 0
        while best + 1 < len(path) and path[best + 1][0] > path[best][0]:
            best += 1
        chosen = plan(survival, limits, cost)
        assert chosen.verify_lens == tuple(path[best][1])
        assert chosen.budget == sum(chosen.verify_lens)
        assert chosen.predicted_ms == cost.step_ms(requests + chosen.budget)
        assert chosen.predicted_theta == pytest.approx(1000 * path[best][0])
        assert all(n <= limit for n, limit in zip(chosen.verify_lens, limits, strict=True))
        assert path[best][0] <= max(theta for theta, _ in path)


Chooser = Callable[[list[list[float]], list[int], CostLookup], tuple[int, ...]]


def count_anticipations(choose: Chooser) -> int:
    """How often "draft k is verified" changes with confidences after k, which depend on draft k."""
    rng, changes = random.Random(6), 0
    for _ in range(800):
        requests, width = rng.randint(1, 3), rng.randint(1, 4)
        survival = [random_survival(rng, width) for _ in range(requests)]
        cost, limits = random_cost(rng, requests * (width + 1)), [width] * requests
        request, k = rng.randrange(requests), rng.randint(1, width)
        other = [list(row) for row in survival]
        for j in range(k, width):
            other[request][j] = other[request][j - 1] * rng.choice([1.0, 0.0, rng.random()])
        before, after = choose(survival, limits, cost), choose(other, limits, cost)
        changes += (before[request] >= k) != (after[request] >= k)
    return changes


def test_a_draft_is_admitted_without_looking_past_it():
    assert count_anticipations(lambda *args: plan(*args).verify_lens) == 0


def test_the_global_search_looks_past_it():
    assert count_anticipations(global_search) > 3


def test_equal_survivals_go_by_position_then_request():
    # Saturated confidences: every survival is 1. Three more rows pay, the fourth does not.
    cost = lookup(1, 1, 1, 1, 1, 100, 100, 100)
    assert plan([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [3, 3], cost).verify_lens == (2, 1)
    assert plan([[1.0, 0.5], [1.0, 1.0]], [2, 2], cost).verify_lens == (1, 2)


def test_an_admission_that_gains_nothing_is_not_made():
    assert plan([[0.5]], [1], lookup(8.0, 12.0)).verify_lens == (0,)  # 1/8 = 1.5/12


def test_without_a_cost_table_everything_is_verified():
    assert plan([[0.1, 0.01], [0.0]], [2, 1], None) == Plan((2, 1), 3, None, None)
    assert plan([[], []], [5, -1], None).verify_lens == (5, 0)


def test_flat_costs_verify_everything_that_can_survive():
    assert plan([[0.9, 0.5, 0.0], [0.3]], [3, 1], lookup(7.0)).verify_lens == (2, 1)


def test_impossible_drafts_and_zero_limits_are_never_verified():
    assert plan([[0.0, 0.0], [1.0, 1.0]], [2, 0], lookup(1.0)).verify_lens == (0, 0)
    assert plan([], [], None) == Plan((), 0, None, None)


def test_other_rows_of_the_step_count_as_cost_and_their_tokens_as_gain():
    cost = lookup(10.0, 10.0, 10.0, 16.0)
    assert plan([[0.5]], [1], cost).verify_lens == (1,)
    assert plan([[0.5]], [1], cost, extra_rows=2).verify_lens == (0,)
    # Beside two plain requests the extra row costs 60 % more time for a sixth more tokens: still no.
    assert plan([[0.5]], [1], cost, extra_rows=2, extra_tokens=2.0).predicted_theta == pytest.approx(300.0)


def test_floors_are_admitted_first_and_their_rows_count():
    cost = lookup(10.0, 10.0, 16.0, 16.5)
    assert plan([[0.9], [0.1]], [1, 1], lookup(10.0, 10.0, 16.0)).verify_lens == (0, 0)
    floored = plan([[0.9], [0.1]], [1, 1], cost, floors=[0, 1])
    assert floored.verify_lens == (1, 1)  # with the row paid for, the next one is cheap
    assert floored.predicted_ms == 16.5
    assert floored.predicted_theta == pytest.approx(1000 * 3.0 / 16.5)
    assert plan([[0.9], [0.1]], [1, 0], cost, floors=[0, 1]).verify_lens[1] == 0  # never beyond the limit


def test_a_floor_costs_the_others_only_what_its_row_costs():
    rng = random.Random(15)
    for _ in range(200):
        requests = rng.randint(2, 4)
        survival = [random_survival(rng, 3) for _ in range(requests)]
        cost, floors = random_cost(rng, 4 * requests), [rng.randint(0, 1) for _ in range(requests)]
        chosen = plan(survival, [3] * requests, cost, floors=floors)
        assert all(n >= floor for n, floor in zip(chosen.verify_lens, floors, strict=True))
        tokens = requests + sum(sum(row[:n]) for row, n in zip(survival, chosen.verify_lens, strict=True))
        assert chosen.predicted_ms == cost.step_ms(requests + chosen.budget)
        assert chosen.predicted_theta == pytest.approx(1000 * tokens / chosen.predicted_ms)


def test_load_shrinks_lengths_when_rows_cost():
    cost = CostLookup(CostTable(tuple(range(1, 65)), tuple(10.0 + 0.02 * n * n for n in range(1, 65))))
    row = [0.9**k for k in range(1, 8)]
    lens = [plan([row] * requests, [7] * requests, cost).budget / requests for requests in (1, 4, 8)]
    assert lens[0] > lens[1] > lens[2]


@pytest.mark.parametrize("row", [[math.nan], [1.1], [-0.1], [0.5, 0.6]])
def test_survivals_that_are_none_are_refused(row):
    with pytest.raises(ValueError, match="survival"):
        plan([row], [2], lookup(1.0))


def test_lengths_must_match():
    with pytest.raises(ValueError, match="limits"):
        plan([[0.5]], [1, 1], None)
