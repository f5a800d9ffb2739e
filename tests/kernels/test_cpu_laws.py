"""Passes over a vocabulary on a processor, against torch's: peaks, softmax, draws, acceptance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparkchat.engine import acceptance, rng, sampling
from sparkchat.engine.acceptance import Acceptance, Proposal, accept
from sparkchat.kernels import cpu

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

SIZES = (4096, 5003, 49152)
"""A whole number of blocks, and not."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_peaks(size: int) -> None:
    logits = random(3, size)
    assert torch.equal(sampling.row_peaks(logits), logits.amax(dim=1))
    for place in (0, 17, size - 1):
        for value in (float("nan"), float("inf"), float("-inf")):
            broken = logits.clone()
            broken[1, place] = value
            wanted = broken.amax(dim=1)
            assert torch.equal(sampling.row_peaks(broken).nan_to_num(7e7), wanted.nan_to_num(7e7))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_softmax(size: int, temperature: float) -> None:
    logits = 4 * random(2, size)
    logits[0, 5:900] = float("-inf")
    law = sampling.probabilities(logits, [temperature] * 2, [0] * 2, [1.0] * 2, [0.0] * 2)
    exact = torch.softmax(logits.double() / temperature, dim=1)
    torch.testing.assert_close(law.double(), exact, rtol=2e-5, atol=1e-9)
    assert (law[0, 5:900] == 0).all()
    assert (law.double().sum(dim=1) - 1).abs().max() < 1e-6


def test_settings_of_rows_are_their_own() -> None:
    logits = 3 * random(4, 4096)
    together = sampling.probabilities(logits, [0.0, 0.7, 0.7, 0.7], [0, 5, 0, 0], [1.0, 1.0, 0.5, 1.0], [0, 0, 0, 0.1])
    for row in range(4):
        alone = [[values[row]] for values in ([0.0, 0.7, 0.7, 0.7], [0, 5, 0, 0], [1.0, 1.0, 0.5, 1.0], [0, 0, 0, 0.1])]
        assert torch.equal(sampling.probabilities(logits[row : row + 1], *alone), together[row : row + 1])
    assert (together[0] > 0).sum() == 1 and (together[1] > 0).sum() == 5


def test_rows_that_lie_apart_have_the_laws_they_have_alone() -> None:
    """A head whose outputs are no whole number of lane blocks gives such rows."""
    logits = (4 * random(3, 5008))[:, :5003]
    settings = [[0.7] * 3, [0, 0, 9], [1.0] * 3, [0.0] * 3]
    laws = sampling.probabilities(logits, *settings)
    u = torch.rand(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = sampling.draw(laws, u)
    assert torch.equal(sampling.row_peaks(logits), logits.amax(dim=1))
    for row in range(3):
        alone = sampling.probabilities(logits[row : row + 1].clone(), *([values[row]] for values in settings))
        assert torch.equal(alone[0], laws[row])
        apart = torch.empty(1, 5008)[:, :5003].copy_(alone)
        assert int(sampling.draw(apart, u[row : row + 1])) == int(drawn[row])
    wide = torch.zeros(3, 5008)
    wide[:, :5003] = laws
    assert torch.equal(sampling.draw(wide[:, :5003], u), drawn)


@pytest.mark.parametrize("size", SIZES)
def test_draws_invert_the_sums(size: int) -> None:
    """Whole numbers as weights: every sum is exact, and so is the place that a number in [0, 1) falls to."""
    weights = torch.randint(0, 4, (200, size), generator=torch.Generator().manual_seed(1)).float()
    weights[:, : size // 3] = 0.0
    weights[7] = 0.0
    weights[7, 11] = 3.0
    u = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    drawn = sampling.draw(weights, u)
    sums = weights.double().cumsum(dim=1)
    wanted = (sums <= u[:, None] * sums[:, -1:]).sum(dim=1)
    assert torch.equal(drawn, wanted)
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_draws_follow_the_law() -> None:
    """Chi-square over the 40 tokens that have a chance, 99.9 % bound."""
    weights = torch.zeros(1, 4096)
    weights[0, 100:4100:100] = torch.rand(40, generator=torch.Generator().manual_seed(3)) + 0.1
    count = 20000
    u = torch.rand(count, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drawn = sampling.draw(weights.expand(count, -1)[:500].contiguous(), u[:500])
    for start in range(500, count, 500):
        drawn = torch.cat([drawn, sampling.draw(weights.expand(500, -1).contiguous(), u[start : start + 500])])
    seen = torch.bincount(drawn, minlength=4096)[100:4100:100].double()
    expected = (weights[0, 100:4100:100] / weights.sum() * count).double()
    assert seen.sum() == count
    assert float(((seen - expected) ** 2 / expected).sum()) < 72.1


def make_case(seed: int) -> tuple[tuple, dict]:
    """Laws of whole numbers over 2^k, so that no sum is rounded and both forms must decide alike."""
    numbers = np.random.default_rng(seed)
    requests, width, size, few = int(numbers.integers(1, 5)), 4, 4096, 8
    lens = numbers.integers(0, width + 1, requests)
    drafted = np.maximum(lens, numbers.integers(0, width + 1, requests))
    starts = np.concatenate([[0], np.cumsum(lens + 1)])[:-1]
    rows = int((lens + 1).sum())
    p = numbers.integers(0, 3, (rows, size)) * numbers.integers(0, 2, (rows, size))
    p[:, 0] += 1
    p = torch.from_numpy(p).float() / 4096
    support = np.stack([[numbers.choice(size, few, replace=False) for _ in range(width)] for _ in range(requests)])
    probs = torch.from_numpy(numbers.multinomial(64, [1 / few] * few, (requests, width))).float() / 4096
    index = torch.from_numpy(np.asarray(probs.argmax(-1)))
    ids = torch.from_numpy(support).gather(2, index[..., None])[..., 0]
    proposal = Proposal(
        ids=ids.masked_fill(torch.arange(width) >= torch.from_numpy(drafted)[:, None], -1),
        lens=torch.from_numpy(drafted),
        probs=probs,
        draft_index=index,
        draft_to_target=torch.from_numpy(support),
    )
    u = torch.from_numpy(numbers.random((requests, 2 * width + 1)))
    greedy = numbers.random(requests) < 0.3
    options = {
        "cap": torch.from_numpy(numbers.integers(0, width + 1, requests)) if seed % 2 else None,
        "greedy": torch.from_numpy(greedy) if seed % 3 else None,
        "target_argmax": torch.from_numpy(numbers.choice(ids.flatten().numpy(), rows)) if seed % 3 else None,
    }
    given = (p, torch.from_numpy(starts), torch.from_numpy(lens), proposal if seed % 7 else None)
    if not seed % 7:
        given = (p, torch.from_numpy(starts), torch.zeros(requests, dtype=torch.int64), None)
    return (*given, u[:, :width], u[:, width:]), options


@pytest.mark.parametrize("seed", range(60))
def test_acceptance_is_that_of_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = make_case(seed)
    called: list[int] = []
    monkeypatch.setattr(acceptance, "accept_sparse", _counted(acceptance.accept_sparse, called))
    ours = accept(*args, **options)
    assert called == [1]
    for module in (acceptance, sampling):
        monkeypatch.setattr(module, "has_kernels", lambda rows: False)
    theirs = accept(*args, **options)
    assert called == [1]
    for name in Acceptance.__dataclass_fields__:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.shape == b.shape and torch.equal(a.double().nan_to_num(-5), b.double().nan_to_num(-5)), name


def _counted(function, calls: list[int]):
    def call(*args, **options):
        calls.append(1)
        return function(*args, **options)

    return call


def test_random_numbers_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, rounds = [0, 1, 2**64 - 1, 77], [3, 2**63 + 5, 0, 2**64 - 1]
    for kind in rng.DrawKind:
        monkeypatch.setattr(cpu, "is_loaded", lambda: True)
        ours = rng.uniforms(seeds, rounds, 2, 9, kind)
        monkeypatch.setattr(cpu, "is_loaded", lambda: False)
        assert torch.equal(ours, rng.uniforms(seeds, rounds, 2, 9, kind))


def test_laws_of_a_step_are_those_of_its_rows() -> None:
    """Requests that draw by temperature, top-p and min-p alone take one call; the others do not, with the same bits."""
    from sparkchat.engine import laws
    from sparkchat.engine.output import SilentOutput
    from sparkchat.engine.request import RequestState
    from sparkchat.params import GenerateRequest, SamplingParams

    def state(**settings: float) -> RequestState:
        request = GenerateRequest(id="a", prompt="", sampling=SamplingParams(**settings))  # type: ignore[arg-type]
        return RequestState(request, (1,), 3, 99, 1, SilentOutput(), sampling.TokenHistory([1]))

    states = [state(temperature=0.7), state(temperature=1.2, top_p=0.8), state(temperature=0.9, min_p=0.1)]
    logits, starts = 4 * random(6, 5003), [0, 3, 4, 6]
    found = laws.target_laws(logits.clone(), states, starts, [[5, 6], [], [7]])
    assert found.law is not None and not found.damaged_from
    more = torch.cat([logits, random(1, 5003)])
    mixed = laws.target_laws(more, [*states, state(temperature=0.0)], [*starts, 7], [[5, 6], [], [7], []])
    assert mixed.law is not None and torch.equal(mixed.law[:6], found.law)
    broken = logits.clone()
    broken[2, 40] = float("nan")
    damaged = laws.target_laws(broken, states, starts, [[5, 6], [], [7]])
    assert damaged.damaged_from == {0: 2} and not any(s.is_finished for s in states)
    assert damaged.law is not None and torch.equal(damaged.law[3:], found.law[3:])


def test_uniforms_of_a_step_are_those_of_their_streams() -> None:
    seeds, rounds = [5, 2**63 + 11], [7, 2**40]
    accept_u, next_u = rng.acceptance_uniforms(seeds, rounds, 3)
    assert torch.equal(accept_u, rng.uniforms(seeds, rounds, 0, 3, rng.ACCEPT))
    assert torch.equal(next_u, rng.uniforms(seeds, rounds, 0, 4, rng.NEXT))


@pytest.mark.parametrize("is_4bit", [True, False])
def test_rows_of_codes_are_unpacked_as_torch_does(is_4bit: bool) -> None:
    from sparkchat.models.native import unpacked_rows
    from sparkchat.models.quant import GroupedWeight

    numbers = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (50, 96), generator=numbers).to(torch.uint8 if is_4bit else torch.int8)
    weight = GroupedWeight(codes, random(50, 3), random(50, 3, seed=2) if is_4bit else None)
    index = torch.tensor([3, 49, 3, 0])
    import sparkchat.kernels.cpu.team  # noqa: F401

    assert torch.equal(unpacked_rows(weight, index), weight.rows(index).dense())
