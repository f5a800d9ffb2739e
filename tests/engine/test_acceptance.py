"""The acceptance rule in closed form: exact rates and residuals, row layout, caps, greedy, reduced vocabulary."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from sparkchat.engine.acceptance import Acceptance, Proposal, accept

P = torch.tensor([0.2, 0.5, 0.3])
Q = torch.tensor([0.45, 0.35, 0.2])
TOP = 1.0 - 2.0**-53


def one_draft(
    token: int, q: Tensor = Q, num: int = 1, draft_to_target: Tensor | None = None, index: int | None = None
) -> Proposal:
    index = token if index is None else index
    return Proposal(
        ids=torch.full((num, 1), token),
        lens=torch.ones(num, dtype=torch.int64),
        probs=q.expand(num, 1, -1),
        draft_index=torch.full((num, 1), index),
        draft_to_target=draft_to_target,
    )


def grid(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def law_after(token: int, p: Tensor, q: Tensor, n: int = 2000, **options: object) -> tuple[float, Tensor]:
    """Acceptance rate of one draft, and the law of the token after a rejection, by integrating over u."""
    rows = p.expand(2 * n, -1)
    starts = list(range(0, 2 * n, 2))
    proposal = one_draft(token, q, n, **options)  # type: ignore[arg-type]
    tested = accept(rows, starts, [1] * n, proposal, grid(n)[:, None], torch.zeros(n))
    rate = tested.accepted_len.double().mean().item()
    refused = accept(rows, starts, [1] * n, proposal, torch.full((n, 1), TOP, dtype=torch.float64), grid(n))
    law = torch.bincount(refused.next_ids[refused.accepted_len == 0], minlength=len(p)).double() / n
    return rate, law


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_draft_is_accepted_at_the_ratio_and_replaced_by_the_residual(token):
    rate, law = law_after(token, P, Q)
    assert rate == pytest.approx(min(1.0, P[token].item() / Q[token].item()), abs=1e-3)
    if token == 0:
        assert law.tolist() == pytest.approx([0.0, 0.6, 0.4], abs=1e-3)  # (0, .15, .1) / .25


def test_output_law_of_one_draft_is_the_targets():
    for p, q in ((P, Q), (Q, P), (torch.tensor([0.0, 0.5, 0.5]), Q), (torch.tensor([1.0, 0.0, 0.0]), Q), (P, P)):
        out = torch.zeros(3, dtype=torch.float64)
        for token in range(3):
            rate, law = law_after(token, p, q)
            out[token] += q[token].double() * rate
            out += q[token].double() * (1 - rate) * law
        assert out.tolist() == pytest.approx(p.tolist(), abs=2e-3)


def test_the_test_is_strict_and_impossible_drafts_never_pass():
    rows = torch.stack((P, P))
    equal = one_draft(1, P)
    assert (
        accept(rows, [0], [1], equal, torch.tensor([[TOP]], dtype=torch.float64), torch.zeros(1)).accepted_len.item()
        == 1
    )
    # u*q == p is a rejection: p = q/2, u = 1/2.
    half = accept(
        torch.tensor([[0.25, 0.75]] * 2),
        [0],
        [1],
        one_draft(0, torch.tensor([0.5, 0.5])),
        torch.tensor([[0.5]]),
        torch.zeros(1),
    )
    assert half.accepted_len.item() == 0
    never_drawn = one_draft(1, torch.tensor([1.0, 0.0, 0.0]))
    assert accept(rows, [0], [1], never_drawn, torch.zeros(1, 1), torch.zeros(1)).accepted_len.item() == 0
    filtered_out = accept(
        torch.tensor([[0.0, 1.0, 0.0]] * 2), [0], [1], one_draft(0), torch.zeros(1, 1), torch.zeros(1)
    )
    assert (filtered_out.accepted_len.item(), filtered_out.next_ids.item()) == (0, 1)


def test_a_vanishing_residual_falls_back_to_the_target():
    u = torch.tensor([[TOP]], dtype=torch.float64)
    refused = accept(torch.stack((P, P)), [0], [1], one_draft(0, P * 1.0000002), u, torch.tensor([0.65]))
    assert refused.accepted_len.item() == 0
    assert refused.next_ids.item() == 1  # the middle of P


def test_the_bonus_is_a_plain_draw_also_when_more_was_drafted():
    n = 3000
    proposal = Proposal(
        ids=torch.tensor([[1, 0]]).expand(n, -1),
        lens=torch.full((n,), 2),
        probs=torch.stack((P, Q)).expand(n, -1, -1),
        draft_index=torch.tensor([[1, 0]]).expand(n, -1),
    )
    out = accept(P.expand(2 * n, -1), list(range(0, 2 * n, 2)), [1] * n, proposal, torch.zeros(n, 2), grid(n))
    assert out.accepted_len.eq(1).all()
    assert out.is_bonus.all()
    law = torch.bincount(out.next_ids, minlength=3).double() / n
    assert law.tolist() == pytest.approx(P.tolist(), abs=1e-3)


def test_draft_ids_and_target_ids_may_differ():
    to_target = torch.tensor([4, 1, 2])
    p = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15])
    out = torch.zeros(5, dtype=torch.float64)
    for index, token in enumerate(to_target.tolist()):
        rate, law = law_after(token, p, Q, draft_to_target=to_target, index=index)
        assert rate == pytest.approx(min(1.0, p[token].item() / Q[index].item()), abs=1e-3)
        out[token] += Q[index].double() * rate
        out += Q[index].double() * (1 - rate) * law
    assert out.tolist() == pytest.approx(p.tolist(), abs=2e-3)


def plain_accept(
    p: Tensor, start: int, length: int, ids: list[int], q: list[Tensor], u: list[float], u_next: float, cap: int
) -> tuple[int, int, int]:
    """(taken, full, next) of one request, by the words of the rule."""
    full = 0
    while full < length and u[full] * q[full][ids[full]].item() < p[start + full][ids[full]].item():
        full += 1
    taken = min(full, cap)
    if full > taken:
        return taken, full, ids[taken]
    weights = p[start + taken].double()
    if taken < length:
        weights = (weights - q[taken].double()).clamp(min=0)
    running = 0.0
    for token, weight in enumerate(weights.tolist()):
        running += weight
        if u_next * weights.sum().item() < running:
            return taken, full, token
    raise AssertionError("no token")


def random_laws(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.softmax(torch.randn(*shape, generator=generator) * 2, dim=-1)


def test_ragged_batches_agree_with_one_request_at_a_time():
    generator, rng = torch.Generator().manual_seed(11), random.Random(11)
    for _ in range(150):
        requests, width, vocab = rng.randint(1, 5), rng.randint(1, 4), rng.choice([3, 6])
        drafted = [rng.randint(0, width) for _ in range(requests)]
        lens = [rng.randint(0, n) for n in drafted]
        caps = [rng.randint(0, width + 1) for _ in range(requests)]
        starts = [sum(n + 1 for n in lens[:r]) for r in range(requests)]
        p, q = random_laws(generator, sum(lens) + requests, vocab), random_laws(generator, requests, width, vocab)
        ids = torch.multinomial(q.reshape(-1, vocab), 1, generator=generator).reshape(requests, width)
        beyond = torch.arange(width) >= torch.tensor(drafted)[:, None]
        u = torch.rand(requests, width, generator=generator, dtype=torch.float64)
        u_next = torch.rand(requests, generator=generator, dtype=torch.float64)
        use_cap = rng.random() < 0.5
        proposal = Proposal(ids.masked_fill(beyond, -1), torch.tensor(drafted), q, ids.masked_fill(beyond, 0))
        out = accept(p, starts, lens, proposal, u, u_next, caps if use_cap else None)
        for r in range(requests):
            cap = caps[r] if use_cap else width
            want = plain_accept(
                p, starts[r], lens[r], ids[r].tolist(), list(q[r]), u[r].tolist(), u_next[r].item(), cap
            )
            assert (out.accepted_len[r], out.full_accepted_len[r], out.next_ids[r]) == want
            assert out.is_bonus[r] == (want[0] == min(lens[r], cap))
            assert out.next_is_draft[r] == (want[1] > want[0])
            for k in range(width):
                q_x, p_x = out.p_draft[r, k].item(), out.p_target[r, k].item()
                assert math.isnan(q_x) if k >= drafted[r] else q_x == q[r, k, ids[r, k]].item()
                assert math.isnan(p_x) if k >= lens[r] else p_x == p[starts[r] + k, ids[r, k]].item()


def test_numbers_for_the_next_token_may_be_given_per_place():
    rows, proposal = torch.stack((P, P)), one_draft(1, P)
    by_place = torch.tensor([[0.05, 0.95]], dtype=torch.float64)
    out = accept(rows, [0], [1], proposal, torch.zeros(1, 1), by_place)
    assert (out.accepted_len.item(), out.next_ids.item()) == (1, 2)
    out = accept(rows, [0], [0], proposal, torch.zeros(1, 1), by_place)
    assert (out.accepted_len.item(), out.next_ids.item()) == (0, 0)


def test_plain_rows_are_plain_draws():
    n = 2000
    out = accept(P.expand(n, -1), list(range(n)), [0] * n, None, torch.zeros(n, 0), grid(n))
    assert (torch.bincount(out.next_ids).double() / n).tolist() == pytest.approx(P.tolist(), abs=1e-3)
    assert out.accepted_len.eq(0).all()
    assert out.is_bonus.all()
    assert out.p_draft.shape == (n, 0)


# Greedy


def test_greedy_requests_need_no_laws():
    argmax = torch.tensor([5, 6, 7, 1, 2])
    proposal = Proposal(torch.tensor([[5, 6], [1, 9]]), torch.tensor([2, 2]), None, None)
    out = accept(
        None,
        [0, 3],
        [2, 1],
        proposal,
        torch.full((2, 2), TOP, dtype=torch.float64),
        torch.zeros(2),
        greedy=[True, True],
        target_argmax=argmax,
    )
    assert out.accepted_len.tolist() == [2, 1]
    assert out.next_ids.tolist() == [7, 2]
    assert out.is_bonus.tolist() == [True, True]
    assert out.p_draft[0].tolist() == [1.0, 1.0]
    plain = accept(
        None, [0, 1], [0, 0], None, torch.zeros(2, 0), torch.zeros(2), greedy=[True, True], target_argmax=argmax
    )
    assert plain.next_ids.tolist() == [5, 6]


def as_lists(out: Acceptance) -> list[list[float]]:
    return [out.accepted_len.tolist(), out.full_accepted_len.tolist(), out.next_ids.tolist(), out.is_bonus.tolist()]


def test_greedy_requests_decide_like_one_hot_laws_also_beside_sampled_ones():
    generator, rng = torch.Generator().manual_seed(12), random.Random(12)
    for _ in range(100):
        requests, width, vocab = rng.randint(1, 4), 3, 4
        greedy = [rng.random() < 0.6 for _ in range(requests)]
        lens = [rng.randint(0, width) for _ in range(requests)]
        starts = [sum(n + 1 for n in lens[:r]) for r in range(requests)]
        p, q = random_laws(generator, sum(lens) + requests, vocab), random_laws(generator, requests, width, vocab)
        for r in range(requests):
            if greedy[r]:
                rows = slice(starts[r], starts[r] + lens[r] + 1)
                p[rows] = torch.nn.functional.one_hot(p[rows].argmax(dim=-1), vocab).float()
                q[r] = torch.nn.functional.one_hot(q[r].argmax(dim=-1), vocab).float()
        ids = torch.multinomial(q.reshape(-1, vocab), 1, generator=generator).reshape(requests, width)
        u, u_next = torch.rand(requests, width, generator=generator), torch.rand(requests, generator=generator)
        cap = [rng.randint(0, width) for _ in range(requests)]
        argmax = p.argmax(dim=-1)
        dense = accept(p, starts, lens, Proposal(ids, torch.full((requests,), width), q, ids), u, u_next, cap)
        garbage = p.clone()
        for r in range(requests):
            if greedy[r]:
                garbage[starts[r] : starts[r] + lens[r] + 1] = math.nan
                q[r] = 0.0
        proposal = Proposal(ids, torch.full((requests,), width), q, ids)
        cheap = accept(garbage, starts, lens, proposal, u, u_next, cap, greedy=greedy, target_argmax=argmax)
        assert as_lists(cheap) == as_lists(dense)
