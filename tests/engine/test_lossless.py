"""The output law is the target's: by exact enumeration for the planner, by chi-square through the real functions.

Every way of losing it that is known from practice is also tried, to show that these tests would notice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases.harness import chi_square_p
from engine.chains import VOCAB, WIDTH, Chain, cliffed_cost, global_search, measured_cost, worst_distance
from sparkchat.engine import rng
from sparkchat.engine.acceptance import Proposal, accept
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.lagged_plan import admit, choose_budget
from sparkchat.engine.planner import plan
from sparkchat.engine.sampling import draw, probabilities
from sparkchat.params import CostTable

# Exact enumeration: chains of two drafts over three tokens.


def early_stop(survival: list[list[float]], cost: CostLookup) -> Sequence[int]:
    return plan(survival, [WIDTH] * len(survival), cost.at(len(survival), 30)).verify_lens


def stale_survivals(requests: int, seed: int) -> list[list[float]]:
    """Those of other blocks two steps before: of any value, and of no draft of this step."""
    source = random.Random(seed)
    alive = []
    for _ in range(requests):
        chain = Chain(source)
        alive.append(chain.survival((source.randrange(VOCAB), source.randrange(VOCAB))))
    return alive


class Lagged:
    """The asynchronous form: budgets by stale confidences, whoever is likeliest now gets them."""

    def __init__(self) -> None:
        self.seed, self.budgets = 0, set[int]()

    def __call__(self, survival: list[list[float]], cost: CostLookup) -> Sequence[int]:
        requests = len(survival)
        if cost is not self.__dict__.get("cost"):  # another case: one past for all blocks of this step
            self.cost, self.seed = cost, self.seed + 1
            stale = stale_survivals(requests, self.seed)
            self.budget = choose_budget(stale, cost.at(requests, 40)).drafts
            self.budgets.add(self.budget)
        return admit(survival, [WIDTH] * requests, self.budget)


def budget_of_now(survival: list[list[float]], cost: CostLookup) -> Sequence[int]:
    """The mistake of a form without the lag: the budget by this step's own confidences."""
    requests = len(survival)
    return admit(survival, [WIDTH] * requests, choose_budget(survival, cost.at(requests)).drafts)


def with_floors(survival: list[list[float]], cost: CostLookup) -> Sequence[int]:
    """The second request found no room for long, so that its first draft is verified."""
    requests = len(survival)
    return plan(survival, [WIDTH] * requests, cost.at(requests), floors=[0, 1][-requests:]).verify_lens


@pytest.mark.parametrize(("requests", "cases"), [(1, 400), (2, 60)])
def test_the_early_stop_is_lossless_over_cliffed_costs(requests, cases):
    assert worst_distance(requests, cases, early_stop) < 1e-12


@pytest.mark.parametrize(("requests", "cases"), [(1, 200), (2, 15)])
@pytest.mark.parametrize("choose", [early_stop, with_floors])
def test_the_early_stop_is_lossless_over_tables_by_requests(requests, cases, choose):
    assert worst_distance(requests, cases, choose, measured_cost) < 1e-12


@pytest.mark.parametrize(("requests", "cases"), [(1, 300), (2, 25)])
@pytest.mark.parametrize("costs", [cliffed_cost, measured_cost])
def test_the_lagged_budget_is_lossless_over_cliffed_costs(requests, cases, costs):
    lagged = Lagged()
    assert worst_distance(requests, cases, lagged, costs) < 1e-12
    assert len(lagged.budgets) > requests  # cliffs are jumped, and budgets of many sizes come up


@pytest.mark.parametrize(("requests", "cases"), [(1, 400), (2, 60)])
def test_a_budget_by_this_steps_confidences_is_not_lossless(requests, cases):
    assert worst_distance(requests, cases, budget_of_now, enough=0.01) > 0.01


def test_the_early_stop_does_verify_in_these_cases():
    source, lens = random.Random(14), set()
    for _ in range(400):
        chain, cost = Chain(source), cliffed_cost(source, 1)
        lens |= {early_stop([chain.survival(block)], cost)[0] for block in itertools.product(range(3), repeat=2)}
    assert lens == {0, 1, 2}


@pytest.mark.parametrize(("requests", "cases"), [(1, 400), (2, 60)])
def test_the_global_search_is_not_lossless_over_cliffed_costs(requests, cases):
    assert worst_distance(requests, cases, global_search, enough=0.01) > 0.01


def test_the_papers_example_by_enumeration():
    """p = (.7, .3), q = (.5, .5); a second confidence that betrays the first draft."""
    cost = CostLookup(CostTable((1, 2, 3), (1 / 1.0, 1 / 0.5, 1 / 0.45)))
    p, q, rest = (0.7, 0.3), (0.5, 0.5), (1.0, 0.0)
    for choose, want in ((early_stop, (0.7, 0.3)), (global_search, (0.85, 0.15))):
        out = [0.0, 0.0]
        for first, c2 in ((0, 0.9), (1, 0.0)):
            length = choose([[0.8, 0.8 * c2]], cost)[0]
            rate = min(1.0, p[first] / q[first]) if length else 0.0
            other = rest if length else p
            out[first] += q[first] * rate
            for token in range(2):
                out[token] += q[first] * (1 - rate) * other[token]
        assert out == pytest.approx(want)


# Chi-square through the real functions: a bigram target and drafter, many requests in one batch.

TARGET = torch.tensor(
    [[0.20, 0.50, 0.30, 1e-4, 0.05], [0.05, 0.15, 0.30, 0.45, 0.05], [0.6, 0.1, 0.1, 0.1, 0.1],
     [0.02, 0.9, 0.02, 0.03, 0.03], [0.3, 0.3, 0.2, 0.15, 0.05]]
).log()  # fmt: skip
DRAFTER = torch.tensor(
    [[0.45, 0.35, 0.10, 0.05, 0.05], [0.25, 0.15, 0.1, 0.3, 0.2], [0.3, 0.1, 0.2, 0.3, 0.1],
     [0.3, 0.4, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.3, 0.1]]
).log()  # fmt: skip
N, G = 20000, 3
SETTINGS = [
    (0.7, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.5, 3, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.5, 0, 1.0, 0.1),
    (0.7, 3, 0.8, 0.1),
]


def bigram_law(table: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    return probabilities(table, *([value] * len(table) for value in setting))


def propose(q: Tensor, seed0: int, step: int, previous: Tensor, draft_to_target: Tensor | None = None) -> Proposal:
    """Blocks of G drafts from ``q [V, Vd]`` rows, one request per entry of ``previous``."""
    u = rng.uniforms(range(seed0, seed0 + len(previous)), [step] * len(previous), 0, G, rng.DRAFT)
    laws, index, ids = [], [], []
    for k in range(G):
        laws.append(q[previous])
        index.append(draw(laws[-1], u[:, k]))
        previous = index[-1] if draft_to_target is None else draft_to_target[index[-1]]
        ids.append(previous)
    lens = torch.full((len(previous),), G)
    return Proposal(torch.stack(ids, 1), lens, torch.stack(laws, 1), torch.stack(index, 1), None, draft_to_target)


def lens_of_plan(q: Tensor, p: Tensor, proposal: Proposal) -> list[int]:
    """The real planner on exact confidences, two requests a step."""
    overlap = torch.minimum(p, q).sum(dim=-1)
    before = torch.cat((torch.zeros(len(proposal.ids), 1, dtype=torch.int64), proposal.ids[:, :-1]), dim=1)
    alive = overlap[before].double().clamp(max=1.0).cumprod(dim=1).tolist()
    cost = CostLookup(CostTable((1, 2, 3, 4, 5, 6, 7, 8), (10.0, 10.0, 10.8, 11.5, 12.3, 13.2, 13.9, 15.0)))
    lens: list[int] = []
    for first in range(0, len(alive), 2):
        lens += plan(alive[first : first + 2], [G, G], cost).verify_lens
    return lens


def first_tokens(
    p: Tensor,
    q: Tensor,
    choose_lens: Callable[[Proposal], list[int]],
    *,
    caps: Callable[[Proposal], list[int]] | None = None,
    tamper: Callable[[Proposal], Proposal] = lambda proposal: proposal,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """First two tokens [N, 2] after token 0, by speculative rounds; and the accepted lengths of the first round."""
    out = torch.full((N, 2 + G + 1), -1, dtype=torch.int64)
    filled, previous = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.int64)
    lengths = None
    for step in range(2):  # every round commits a token at least
        drawn = propose(q, 0, step, previous, draft_to_target)
        lens, cap = choose_lens(drawn), None if caps is None else caps(drawn)
        proposal = tamper(drawn)
        before = torch.cat((previous[:, None], proposal.ids), dim=1)
        rows = torch.cat([before[r, : n + 1] for r, n in enumerate(lens)])
        starts = [0, *itertools.accumulate(n + 1 for n in lens)][:-1]
        u = rng.uniforms(range(N), [step] * N, 0, G, rng.ACCEPT)
        u_next = rng.uniforms(range(N), [step] * N, 0, 1, rng.NEXT)[:, 0]
        done = accept(p[rows], starts, lens, proposal, u, u_next, cap)
        lengths = done.accepted_len if lengths is None else lengths
        for k in range(G):
            here = (done.accepted_len > k) & (filled + k < 2)
            out[here, filled[here] + k] = proposal.ids[here, k]
        at = filled + done.accepted_len
        out[torch.arange(N), at] = torch.where(at < 2, done.next_ids, -1)
        filled, previous = torch.clamp(at + 1, max=2), done.next_ids
    return out[:, :2], lengths


def pair_p_value(tokens: Tensor, p: Tensor) -> float:
    """p-value of the pairs against the closed form; also fails on any impossible pair."""
    size = p.shape[1]
    law = (p[0][:, None].double() * p.double()).flatten()
    counts = torch.bincount(tokens[:, 0] * size + tokens[:, 1], minlength=size * size).double()
    small = (law > 0) & (law * N < 5)  # cells too rare for the approximation count as one
    cells, wanted = counts[~small].tolist(), law[~small].tolist()
    if small.any():
        cells, wanted = [*cells, float(counts[small].sum())], [*wanted, float(law[small].sum())]
    return chi_square_p(cells, [w / sum(wanted) for w in wanted])


def fixed(length: int) -> Callable[[Proposal], list[int]]:
    return lambda proposal: [length] * len(proposal.ids)


def by_prefix(proposal: Proposal) -> list[int]:
    """A length that depends on earlier drafts only: draft 2 is verified when draft 1 is even, 3 when 2 is odd."""
    return [1 + (x1 % 2 == 0) * (1 + x2 % 2) for x1, x2 in proposal.ids[:, :2].tolist()]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("mode", ["static", "prefix", "planned"])
def test_two_tokens_follow_the_filtered_target(setting, mode):
    p, q = bigram_law(TARGET, setting), bigram_law(DRAFTER, setting)
    choose = {"static": fixed(G), "prefix": by_prefix, "planned": lambda proposal: lens_of_plan(q, p, proposal)}[mode]
    tokens, lengths = first_tokens(p, q, choose)
    assert pair_p_value(tokens, p) > 1e-4
    assert lengths.max() > 0


def test_planned_lengths_depend_on_the_drafts():
    p, q = bigram_law(TARGET, SETTINGS[2]), bigram_law(DRAFTER, SETTINGS[2])
    lens = lens_of_plan(q, p, propose(q, 0, 0, torch.zeros(2000, dtype=torch.int64)))
    assert len(set(lens)) > 1


def test_a_drafter_with_other_filters_is_only_slower():
    p, q = bigram_law(TARGET, (1.0, 3, 0.8, 0.0)), bigram_law(DRAFTER, (1.0, 0, 1.0, 0.0))
    tokens, _ = first_tokens(p, q, fixed(G))
    assert pair_p_value(tokens, p) > 1e-4


@pytest.mark.parametrize("length", [0, 1, 2])
def test_every_truncation_is_lossless(length):
    p, q = bigram_law(TARGET, SETTINGS[0]), bigram_law(DRAFTER, SETTINGS[0])
    assert pair_p_value(first_tokens(p, q, fixed(length))[0], p) > 1e-4


@pytest.mark.parametrize("caps", [fixed(0), fixed(1), by_prefix], ids=["0", "1", "prefix"])
def test_verify_all_then_cap_is_lossless(caps):
    p, q = bigram_law(TARGET, SETTINGS[2]), bigram_law(DRAFTER, SETTINGS[2])
    tokens, lengths = first_tokens(p, q, fixed(G), caps=caps)
    assert pair_p_value(tokens, p) > 1e-4
    if caps is not by_prefix:
        assert lengths.max() <= caps(propose(q, 0, 0, torch.zeros(2, dtype=torch.int64)))[0]


def test_a_reduced_draft_vocabulary_is_lossless():
    to_target = torch.tensor([4, 1, 2])
    p = bigram_law(TARGET, SETTINGS[2])
    q = bigram_law(DRAFTER[:, to_target], SETTINGS[2])
    tokens, lengths = first_tokens(p, q, fixed(G), draft_to_target=to_target)
    assert pair_p_value(tokens, p) > 1e-4
    assert lengths.max() == G


# Known ways to lose it: each must be noticed.


def test_greedy_drafts_under_a_softmax_ratio_are_noticed():
    def take_argmax(proposal: Proposal) -> Proposal:
        ids, previous = [], torch.zeros(N, dtype=torch.int64)
        for _ in range(G):
            previous = q[previous].argmax(dim=-1)
            ids.append(previous)
        chain = torch.stack(ids, dim=1)
        laws = q[torch.cat((torch.zeros(N, 1, dtype=torch.int64), chain[:, :-1]), dim=1)]
        return replace(proposal, ids=chain, draft_index=chain, probs=laws)

    p, q = bigram_law(TARGET, SETTINGS[2]), bigram_law(DRAFTER, SETTINGS[2])
    assert pair_p_value(first_tokens(p, q, fixed(G), tamper=take_argmax)[0], p) < 1e-6


def test_a_ratio_against_another_law_than_was_drawn_from_is_noticed():
    p, q, other = (bigram_law(table, (t, 0, 1.0, 0.0)) for table, t in ((TARGET, 1.0), (DRAFTER, 1.0), (DRAFTER, 1.2)))

    def swap(proposal: Proposal) -> Proposal:
        before = torch.cat((torch.zeros(N, 1, dtype=torch.int64), proposal.ids[:, :-1]), dim=1)
        return replace(proposal, probs=other[before])

    assert pair_p_value(first_tokens(p, q, fixed(G), tamper=swap)[0], p) < 1e-4


def test_a_length_that_looks_at_its_own_draft_is_noticed():
    p, q = bigram_law(TARGET, SETTINGS[2]), bigram_law(DRAFTER, SETTINGS[2])
    peek = lambda proposal: [G if x1 == 1 else 0 for x1 in proposal.ids[:, 0].tolist()]  # noqa: E731
    assert pair_p_value(first_tokens(p, q, peek)[0], p) < 1e-6


def dtype_trap(laws_drawn_from: Tensor) -> float:
    """p-value of token 0 for drafter logits (100, 99.5) at T = 0.7 and an even target."""
    q = probabilities(torch.tensor([[100.0, 99.5]], dtype=torch.bfloat16).float(), [0.7], [0], [1.0], [0.0])
    drawn = draw(laws_drawn_from.expand(N, -1), rng.uniforms(range(N), [0] * N, 0, 1, rng.DRAFT)[:, 0])
    proposal = Proposal(drawn[:, None], torch.ones(N, dtype=torch.int64), q.expand(N, 1, -1), drawn[:, None])
    u, u_next = (rng.uniforms(range(N), [0] * N, 0, 1, kind) for kind in (rng.ACCEPT, rng.NEXT))
    done = accept(torch.full((2 * N, 2), 0.5), range(0, 2 * N, 2), [1] * N, proposal, u, u_next[:, 0])
    first = torch.where(done.accepted_len == 1, drawn, done.next_ids)
    return chi_square_p(torch.bincount(first, minlength=2).tolist(), [0.5, 0.5])


def test_laws_stay_float32_from_drawing_to_accepting():
    logits = torch.tensor([[100.0, 99.5]], dtype=torch.bfloat16)
    assert dtype_trap(probabilities(logits.float(), [0.7], [0], [1.0], [0.0])) > 1e-4
    assert dtype_trap(torch.softmax(logits / 0.7, dim=-1).float()) < 1e-6  # the division rounds to 143 and 142
