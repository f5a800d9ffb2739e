"""Logits to laws to tokens, against plain references that sort and loop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases.harness import chi_square_p
from sparkchat.engine import sampling
from sparkchat.engine.rng import DRAFT, uniforms
from sparkchat.engine.sampling import TokenHistory, argmax_ids, check_logits, draw, probabilities, shape_logits
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.params import SamplingParams

INF = math.inf
NEUTRAL = SamplingParams()


def reference_law(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The definition in float64, token by token."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature < 1e-5:
        return [1.0 if i == ranked[0] else 0.0 for i in range(len(logits))]
    least = logits[ranked[top_k - 1]] if 0 < top_k < len(logits) else -INF
    kept = [i for i in ranked if logits[i] >= least]
    weight = {i: math.exp((logits[i] - logits[ranked[0]]) / temperature) for i in kept}
    total = sum(weight.values())
    nucleus, mass = [], 0.0
    for i in kept:
        if top_p < 1.0 and mass >= top_p - 1e-6:
            break
        nucleus.append(i)
        mass += weight[i] / total
    final = [i for i in nucleus if weight[i] >= min_p * (1 - 1e-6) * weight[ranked[0]]]
    total = sum(weight[i] for i in final)
    return [weight[i] / total if i in final else 0.0 for i in range(len(logits))]


def batched(logits: Tensor, *settings: Sequence[float]) -> Tensor:
    """The path that other devices take, on the CPU."""
    return sampling._laws_batched(logits, logits.amax(dim=-1), list(zip(*settings, strict=True)))


@pytest.fixture(params=[probabilities, batched], ids=["by_row", "batched"])
def laws(request):
    return request.param


def random_settings(rng: random.Random) -> tuple[float, int, float, float]:
    return (
        rng.choice([0.0, 0.05, 0.3, 0.7, 1.0, 1.0, 1.5, 3.0]),
        rng.choice([0, 0, 1, 2, 3, 7, 20, 10**6]),
        rng.choice([1.0, 1.0, 0.999, 0.95, 0.8, 0.5, 0.1, 1e-4]),
        rng.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
    )


def random_logits(rng: random.Random, vocab: int) -> list[float]:
    spread = rng.choice([0.0, 0.5, 3.0, 20.0])
    row = [rng.gauss(0.0, spread) for _ in range(vocab)]
    if rng.random() < 0.5:
        row = [round(value * 2) / 2 for value in row]  # ties
    if rng.random() < 0.3:
        row = [-INF if i and rng.random() < 0.6 else value for i, value in enumerate(row)]
    return torch.tensor(row).tolist()


def test_laws_agree_with_the_sorting_reference(laws):
    rng = random.Random(1)
    for _ in range(150):
        vocab, rows = rng.choice([1, 2, 3, 5, 17, 128, 300]), rng.choice([1, 4])
        logits = [random_logits(rng, vocab) for _ in range(rows)]
        settings = [random_settings(rng) for _ in range(rows)]
        got = laws(torch.tensor(logits), *zip(*settings, strict=True))
        for i in range(rows):
            want = torch.tensor(reference_law(logits[i], *settings[i]))
            assert torch.equal(got[i] > 0, want.float() > 0), (logits[i], settings[i])
            torch.testing.assert_close(got[i], want.float(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.999999])
def test_top_p_over_a_flat_vocabulary_goes_past_the_first_candidates(laws, top_p):
    logits = torch.tensor([(i * 7919 % 5000) * 1e-4 for i in range(5000)]).tolist()
    got = laws(torch.tensor([logits]), [1.0], [0], [top_p], [0.0])[0]
    want = torch.tensor(reference_law(logits, 1.0, 0, top_p, 0.0))
    assert abs(int((got > 0).sum()) - int((want > 0).sum())) <= 1  # the mass of 5000 roundings decides
    assert (got - want).abs().sum() < 1e-3


def test_a_top_p_of_zero_keeps_the_first_of_the_likeliest(laws):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    got = laws(logits, [1.0, 5.0], [0, 3], [0.0, 0.0], [0.0, 0.1])
    assert got.tolist() == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_a_top_p_of_zero_finds_the_likeliest_of_a_vocabulary_without_a_likely_token(laws):
    """Every one of them is less likely than what a first look over a row leaves out."""
    logits = torch.zeros(1, 20000)
    logits[0, 7000] = 1.0
    got = laws(logits, [100.0], [0], [0.0], [0.0])
    assert torch.equal(got, torch.zeros(1, 20000).index_fill_(1, torch.tensor([7000]), 1.0))


@pytest.mark.filterwarnings("error")
def test_a_bias_of_infinity_at_a_cold_temperature_warns_of_nothing(laws):
    logits = torch.tensor([[1.0, torch.finfo(torch.float32).max, -2.0, 0.5]])
    assert laws(logits, [0.5], [3], [0.9], [0.0]).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_boundaries_count_as_reached_despite_rounding(laws):
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert torch.equal(laws(logits, [1.0], [0], [0.8], [0.0])[0] > 0, torch.tensor([False, True, True]))
    assert torch.equal(laws(logits, [1.0], [0], [1.0], [0.6])[0] > 0, torch.tensor([False, True, True]))
    rng = random.Random(15)
    for _ in range(60):
        parts = sorted(rng.sample(range(1, 30), rng.randint(2, 6)), reverse=True)
        size = rng.randint(1, len(parts))
        share = sum(parts[:size]) / sum(parts)
        got = laws(torch.tensor([parts]).float().log(), [1.0], [0], [share], [0.0])[0]
        assert int((got > 0).sum()) == size, (parts, share)


def test_ties_keep_all_at_top_k_and_the_lowest_ids_at_top_p(laws):
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert (laws(logits, [1.0], [2], [1.0], [0.0])[0] > 0).tolist() == [True, True, True, True, False]
    equal = torch.zeros(1, 10)
    assert (laws(equal, [1.0], [0], [0.25], [0.0])[0] > 0).tolist() == [True] * 3 + [False] * 7
    assert laws(equal, [0.0], [0], [1.0], [0.0])[0].tolist() == [1.0] + [0.0] * 9


def test_top_p_works_on_what_top_k_leaves_renormalised(laws):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # 0.4 / 0.7 = 0.571 reaches 0.55 within the two of top-k; 0.4 alone would not have.
    assert laws(logits, [1.0], [2], [0.55], [0.0])[0].tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])


def test_temperature_comes_before_the_filters(laws):
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert int((laws(logits, [1.0], [0], [0.6], [0.0]) > 0).sum()) == 2
    assert int((laws(logits, [0.25], [0], [0.6], [0.0]) > 0).sum()) == 1


def test_extreme_logits_and_temperatures_stay_finite(laws):
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e-30, 0.0, -INF]])
    for temperature in (1e-5, 1e-3, 1.0, 100.0):
        got = laws(logits, [temperature] * 2, [0, 2], [1.0, 0.9], [0.0, 0.0])
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.sum(dim=-1), torch.ones(2))


def test_a_row_is_the_same_alone_and_in_company():
    torch.manual_seed(0)
    logits = torch.randn(6, 4096) * 4
    settings = (
        [1.0, 0.7, 0.7, 0.0, 1.3, 1.0],
        [0, 40, 0, 0, 5, 0],
        [1.0, 0.9, 0.9, 1.0, 1.0, 1.0],
        [0, 0, 0, 0, 0, 0.1],
    )
    together = probabilities(logits, *settings)
    for i in range(6):
        alone = probabilities(logits[i : i + 1], *([column[i]] for column in settings))
        assert torch.equal(alone[0], together[i])


def test_settings_may_be_tensors():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    got = probabilities(logits, torch.tensor([1.0]), torch.tensor([0]), torch.tensor([0.8]), torch.tensor([0.0]))
    assert got[0].tolist() == pytest.approx([0.0, 0.625, 0.375])


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_not_numbers_are_damage(bad):
    logits = torch.zeros(3, 8)
    check_logits(logits)
    logits[1, 5] = bad
    for attempt in (check_logits, lambda x: probabilities(x, [0.0, 1.0, 1.0], [0] * 3, [1.0] * 3, [0.0] * 3)):
        with pytest.raises(DamagedFile):
            attempt(logits)


def test_a_row_without_a_possible_token_is_damage():
    with pytest.raises(DamagedFile):
        check_logits(torch.full((1, 4), -INF))
    check_logits(torch.tensor([[-INF, 0.0]]))


def test_argmax_takes_the_lowest_id_among_equals():
    assert argmax_ids(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


# Drawing


@pytest.mark.parametrize("vocab", [1, 5, 128, 256, 1000, 1024])
def test_a_draw_never_returns_an_impossible_id(vocab):
    rng = random.Random(vocab)
    for _ in range(60):
        weights = torch.zeros(3, vocab)
        for row in range(3):
            for i in rng.sample(range(vocab), rng.choice([1, min(2, vocab), max(1, vocab // 3)])):
                weights[row, i] = rng.choice([1e-38, 1e-9, 0.3, 1.0, rng.random()])
        for u in (0.0, 1e-300, 0.25, 0.5, 1.0 - 2.0**-53):
            ids = draw(weights, torch.full((3,), u, dtype=torch.float64))
            assert (weights.gather(1, ids[:, None]) > 0).all()


def test_a_draw_on_the_edge_of_a_block_is_possible_too():
    generator = torch.Generator().manual_seed(16)
    weights = torch.zeros(1, 64 * 128)
    # The first half of every block is impossible, and the sizes make running sums round.
    weights[0].view(64, 128)[:, 64:] = torch.rand(64, 1, generator=generator).pow(30)
    running = weights[0].view(64, 128).sum(dim=1).double().cumsum(0)
    u = torch.cat([(running / running[-1]).clamp(max=1 - 2.0**-53), torch.rand(2000, generator=generator).double()])
    for shift in (0.0, 1e-16, -1e-16):
        ids = draw(weights.expand(len(u), -1), (u + shift).clamp(0.0, 1 - 2.0**-53))
        assert (weights[0, ids] > 0).all()


def test_a_search_below_zero_finds_the_first_possible_id():
    weights = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    assert sampling._search(weights, torch.tensor([[-1e-17]], dtype=torch.float64)).item() == 2


def test_a_draw_inverts_the_cumulative_law():
    law = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    wanted = {0.0: 0, 0.2499: 0, 0.25: 2, 0.7499: 2, 0.75: 3, 0.9999: 3}
    for u, token in wanted.items():
        assert draw(law, torch.tensor([u], dtype=torch.float64)).item() == token
        wide = torch.zeros(1, 1024)
        wide[0, [7, 300, 301, 1023]] = law[0]
        assert draw(wide, torch.tensor([u], dtype=torch.float64)).item() == [7, 300, 301, 1023][token]


@pytest.mark.parametrize("vocab", [6, 512])
def test_draws_follow_the_law(vocab):
    torch.manual_seed(vocab)
    law = probabilities(torch.randn(1, vocab) * 2, [1.0], [0], [1.0], [0.0])
    n = 40000
    ids = draw(law.expand(n, -1), uniforms(range(n), [0] * n, 0, 1, DRAFT)[:, 0])
    counts = torch.bincount(ids, minlength=vocab).double()
    rare = law[0].double() * n < 10  # small cells together
    cells, expected = [*counts[~rare].tolist(), float(counts[rare].sum())], law[0].double()
    assert chi_square_p(cells, [*expected[~rare].tolist(), float(expected[rare].sum())]) > 1e-4


def test_a_million_draws_stay_inside_the_filtered_set():
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -9.0]])
    law = probabilities(logits, [1.0], [5], [0.8], [0.1])
    assert 0 < int((law > 0).sum()) < 5
    for part in range(10):
        u = uniforms(range(100000), [part] * 100000, 0, 1, DRAFT)[:, 0]
        counts = torch.bincount(draw(law.expand(100000, -1), u), minlength=8)
        assert counts[law[0] == 0].sum() == 0


# Bias, penalties, minimum length


def naive_shape(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_ids: Sequence[int],
) -> list[float]:
    shaped = list(logits)
    for token, bias in params.logit_bias:
        shaped[token] += bias
    for token in set(prompt) | set(output):
        shaped[token] *= params.repetition_penalty if shaped[token] < 0 else 1.0 / params.repetition_penalty
    for token in set(output):
        shaped[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens and not params.ignore_eos:
        for token in eos_ids:
            shaped[token] = -INF
    return shaped


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 1.0, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.2]),
        logit_bias=tuple((rng.randrange(vocab), rng.choice([5.0, -5.0, -INF])) for _ in range(rng.choice([0, 0, 3]))),
        min_tokens=rng.choice([0, 0, 3, 9]),
        ignore_eos=rng.random() < 0.2,
    )


def test_every_row_is_shaped_as_if_its_drafts_had_been_delivered():
    rng = random.Random(2)
    for _ in range(200):
        vocab = 12
        params, eos_ids = random_params(rng, vocab), rng.sample(range(vocab), rng.choice([0, 1, 3]))
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(6))]
        output = [rng.randrange(vocab) for _ in range(rng.randrange(8))]
        drafts = [rng.randrange(vocab) for _ in range(rng.randrange(5))]
        logits = torch.tensor([random_logits(rng, vocab) for _ in range(len(drafts) + 1)])
        extra = [tuple(drafts[:i]) for i in range(len(drafts) + 1)]
        want = [
            naive_shape(logits[i].tolist(), prompt, output + drafts[:i], params, eos_ids) for i in range(len(extra))
        ]
        if any(max(row) == -INF for row in want):
            continue
        history = TokenHistory(prompt)
        history.extend(output)
        got = shape_logits(logits, history, params, num_output=len(output), extra=extra, eos_ids=eos_ids)
        assert got is logits  # in place
        torch.testing.assert_close(got, torch.tensor(want))
        assert history.num_output == len(output)  # drafts leave no trace
        assert sorted(history.seen_ids.tolist()) == sorted(set(prompt) | set(output))


def test_the_draft_vocabulary_is_shaped_like_the_targets():
    rng = random.Random(3)
    for _ in range(100):
        vocab, kept = 12, sorted(rng.sample(range(12), 7))
        index_of = torch.full((vocab,), -1)
        index_of[torch.tensor(kept)] = torch.arange(len(kept))
        params, history = random_params(rng, vocab), TokenHistory([rng.randrange(vocab) for _ in range(4)])
        history.extend(rng.randrange(vocab) for _ in range(5))
        full = torch.randn(3, vocab)
        extra, eos_ids = [(), (2, 2), (3, 5, 2)], [1, 4]
        small = full[:, kept].clone()
        try:
            shape_logits(full, history, params, num_output=5, extra=extra, eos_ids=eos_ids)
            shape_logits(small, history, params, num_output=5, extra=extra, eos_ids=eos_ids, index_of=index_of)
        except UsageError:
            continue
        torch.testing.assert_close(small, full[:, kept])


def test_neutral_settings_change_nothing():
    logits = torch.randn(2, 9)
    before = logits.clone()
    shape_logits(logits, TokenHistory([1, 2]), NEUTRAL, num_output=0, extra=[(), (3,)], eos_ids=[0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_output", [0, 1, 2, 3, 4])
def test_minimum_length_counts_the_drafts_before_a_row(num_output):
    logits = torch.zeros(3, 4)
    params, extra = SamplingParams(min_tokens=4), [(), (2,), (2, 2)]
    shape_logits(logits, TokenHistory([]), params, num_output=num_output, extra=extra, eos_ids={1, 3, 99})
    blocked = [num_output + i < 4 for i in range(3)]
    assert (logits[:, 1] == -INF).tolist() == blocked
    assert (logits[:, 3] == -INF).tolist() == blocked
    assert (logits[:, [0, 2]] == 0).all()


def test_an_infinite_bias_forces_or_forbids():
    logits = torch.tensor([[5.0, 0.0, -INF]])
    forced = SamplingParams(logit_bias=((1, INF), (1, INF), (0, -INF)))
    shape_logits(logits, TokenHistory([]), forced, num_output=0, extra=[()], eos_ids=[])
    assert probabilities(logits, [1.0], [0], [1.0], [0.0])[0].tolist() == [0.0, 1.0, 0.0]


def test_impossible_requests_are_refused():
    history = TokenHistory([])
    with pytest.raises(UsageError, match="logit_bias id 9"):
        shape_logits(
            torch.zeros(1, 4), history, SamplingParams(logit_bias=((9, 1.0),)), num_output=0, extra=[()], eos_ids=[]
        )
    everything = SamplingParams(logit_bias=tuple((i, -INF) for i in range(4)))
    with pytest.raises(UsageError, match="forbid"):
        shape_logits(torch.zeros(1, 4), history, everything, num_output=0, extra=[()], eos_ids=[])


def test_history_grows_without_losing_counts():
    rng = random.Random(4)
    prompt = [rng.randrange(5000) for _ in range(300)]
    history, output = TokenHistory(prompt), []
    for _ in range(3000):
        token = rng.randrange(5000) if rng.random() < 0.7 else rng.choice(prompt)
        history.append(token)
        output.append(token)
    assert sorted(history.seen_ids.tolist()) == sorted(set(prompt) | set(output))
    counts = dict(zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counts == {token: output.count(token) for token in set(output)}
    assert history.count(output[0]) == output.count(output[0])
    assert history.count(10**9) == 0


@pytest.mark.parametrize("seed", range(6))
def test_penalties_on_a_processor_are_those_of_torch_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    history = TokenHistory([draw.randrange(500) for _ in range(40)])
    for _ in range(30):
        history.append(draw.randrange(500))
    params = SamplingParams(
        repetition_penalty=draw.choice([1.0, 1.1, 0.8]),
        presence_penalty=draw.choice([0.0, 0.3]),
        frequency_penalty=draw.choice([0.0, 0.2]),
    )
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed)) * 5
    logits[0, 7], logits[1, 9] = float("-inf"), 3e38
    drafts = [(), (draw.randrange(500),), (1, 1)]
    here, there = logits.clone(), logits.clone()
    shape_logits(here, history, params, num_output=30, extra=drafts, eos_ids=())
    # With a map of the vocabulary torch's operations are taken.
    shape_logits(there, history, params, num_output=30, extra=drafts, eos_ids=(), index_of=torch.arange(500))
    assert torch.equal(here, there)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_whole_number_beyond_64_bits_is_a_penalty_like_any_other(name: str, by_torch: bool) -> None:
    history = TokenHistory([1])
    history.append(2)
    index_of = torch.arange(8) if by_torch else None
    whole, real = torch.ones(2, 8), torch.ones(2, 8)
    for logits, value in ((whole, 10**30), (real, 1e30)):
        params = SamplingParams(**{name: value})
        shape_logits(logits, history, params, num_output=1, extra=[(), (3,)], eos_ids=(), index_of=index_of)
    assert torch.equal(whole, real)
    assert whole[0, 2] < 1e-20 and whole[0, 3] == 1.0
