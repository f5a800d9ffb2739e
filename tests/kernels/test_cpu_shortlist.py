"""A block's drafts in one call, against the same steps in NumPy and torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparkchat.engine import shortlist
from sparkchat.engine.output import SilentOutput
from sparkchat.engine.request import RequestState
from sparkchat.engine.sampling import TokenHistory
from sparkchat.kernels import cpu
from sparkchat.models.dspark.heads import ConfidenceHead, GatedHead, VanillaHead
from sparkchat.models.dspark.lane_heads import ExactRows, LaneHeads
from sparkchat.params import GenerateRequest, SamplingParams

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

from sparkchat.kernels.cpu.matrix import quantize

VOCAB, HIDDEN, RANK, WIDTH = 9000, 64, 32, 5
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.8},
    {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": ((5, 4.0), (17, float("-inf")))},
]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """A drafter's heads without a drafter."""

    def __init__(self, size: int, has_head: bool = True) -> None:
        self.size = size
        mapping = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:size].sort().values
        head = None
        if has_head:
            head = VanillaHead(random(VOCAB, RANK, seed=2).bfloat16(), None, random(size, RANK, seed=3).bfloat16())
        self.judge = ConfidenceHead(
            random(HIDDEN + (RANK if has_head else 0), seed=4), torch.tensor(0.3), head.embedding if head else None
        )
        index_of = torch.full((VOCAB,), -1, dtype=torch.int64)
        index_of[mapping] = torch.arange(size)

        def vector(ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
            return None if head is None else head.vector(ids, hidden, state)[0].float(), state

        drafter = SimpleNamespace(
            draft_to_target=mapping,
            initial_state=lambda count: torch.zeros((count, 0)),
            markov_rows=lambda columns: None if head is None else head.rows_of(columns),
            markov_vector=vector,
        )
        config = SimpleNamespace(vocab_size=VOCAB)
        self.pair: Any = SimpleNamespace(
            drafter=drafter, target=SimpleNamespace(config=config), draft_index_of=index_of
        )
        heads = LaneHeads.of(head, self.judge, mapping, torch.device("cpu"))
        assert heads is not None
        self.heads = heads

    def draw(self, base: torch.Tensor, states: list[RequestState], lens: list[int], seed: int = 9) -> tuple[Any, Any]:
        """By NumPy (proposal, tokens before each draft, damaged), and by the kernel."""
        drafting = [r for r, n in enumerate(lens) if n]
        starts = [0, *np.cumsum([lens[r] for r in drafting]).tolist()]
        hidden = random(starts[-1], HIDDEN, seed=seed)
        u = torch.rand(len(drafting), max(lens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        shared = (states, lens, drafting, starts, hidden)
        torch_way = shortlist.draw_block(self.pair, *shared, base.clone(), u)
        kernel_way = shortlist.draw_by_kernel(self.pair, self.heads, *shared, base.clone(), u)
        before = torch.tensor([token for tokens in torch_way[1] for token in tokens])
        places = [(r, k) for r in drafting for k in range(lens[r])]
        confidence = torch.zeros(len(states), max(lens))
        confidence[[r for r, _ in places], [k for _, k in places]] = self.judge(before, hidden)
        return (*torch_way, confidence), kernel_way


def state_of(settings: dict[str, Any], adaptive: bool = False) -> RequestState:
    prompt = tuple(range(3, VOCAB, 2))
    state = RequestState(
        GenerateRequest(id="a", prompt="", sampling=SamplingParams(**settings)),
        prompt, WIDTH, 10**6, 1, SilentOutput(), TokenHistory(prompt),
        tokens=[*prompt, 12, 40, 12], draft_temperature="adaptive" if adaptive else "target",
    )  # fmt: skip
    for token in (12, 40, 12, *range(100, 3000, 4)):
        state.history.append(token)
    return state


@pytest.mark.parametrize("size", [4096, 5003])
@pytest.mark.parametrize("adaptive", [False, True])
def test_draws_are_those_of_numpy(size: int, adaptive: bool) -> None:
    case = Case(size)
    lens = [WIDTH, 1, 0, 3, 4, WIDTH, 2, WIDTH]
    states = [state_of(settings, adaptive) for settings in SETTINGS]
    for seed in range(4):
        base = 3 * random(sum(lens), size, seed=20 + seed)
        (wanted, _, damaged, confidence), (found, bad) = case.draw(base, states, lens, seed)
        assert not damaged and not bad
        assert torch.equal(found.draft_to_target, wanted.draft_to_target)
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.draft_index, wanted.draft_index)
        torch.testing.assert_close(found.probs, wanted.probs, rtol=2e-5, atol=1e-8)
        assert torch.equal(found.probs > 0, wanted.probs > 0)
        torch.testing.assert_close(found.confidence_logit, confidence, rtol=1e-5, atol=1e-5)


def test_the_law_is_the_one_drawn_from() -> None:
    """Chi-square of first drafts over the reported law, 99.9 % bound of 255 degrees."""
    case, count = Case(4096), 4000
    state = state_of({"temperature": 1.3})
    base = 2 * random(1, 4096, seed=5).expand(count, -1).contiguous()
    hidden, u = torch.zeros(count, HIDDEN), torch.rand(count, 1, generator=torch.Generator().manual_seed(6)).double()
    everyone = list(range(count))
    proposal, _ = shortlist.draw_by_kernel(
        case.pair, case.heads, [state] * count, [1] * count, everyone, [*everyone, count], hidden, base, u
    )
    assert proposal.probs is not None and proposal.draft_index is not None
    assert (proposal.probs == proposal.probs[0]).all()
    law = proposal.probs[0, 0].double()
    assert abs(float(law.sum()) - 1) < 1e-6
    seen = torch.bincount(proposal.draft_index[:, 0], minlength=256).double()
    is_likely = law * count >= 5
    seen = torch.cat([seen[is_likely], seen[~is_likely].sum()[None]])
    expected = torch.cat([law[is_likely], law[~is_likely].sum()[None]]) * count
    assert len(expected) > 20
    assert float(((seen - expected) ** 2 / expected).sum()) < len(expected) + 3.3 * (2 * len(expected)) ** 0.5 + 6


def test_a_request_draws_the_same_alone() -> None:
    case, states = Case(4096), [state_of(settings) for settings in SETTINGS[:3]]
    base = 3 * random(9, 4096, seed=8)
    _, (together, _) = case.draw(base, states, [3, 3, 3])
    hidden = random(9, HIDDEN, seed=9)
    u = torch.rand(3, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for r in range(3):
        rows = slice(3 * r, 3 * r + 3)
        alone, _ = shortlist.draw_by_kernel(
            case.pair, case.heads, [states[r]], [3], [0], [0, 3], hidden[rows], base[rows].clone(), u[r : r + 1]
        )
        for name in ("ids", "probs", "confidence_logit"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[r])


def test_logits_may_be_the_first_columns_of_what_a_head_filled_up() -> None:
    """As of vocabularies that are no whole lanes."""
    case, states = Case(5003), [state_of(settings) for settings in (SETTINGS[0], SETTINGS[7])]
    filled = 3 * random(8, 5024, seed=8)
    hidden, u = random(8, HIDDEN, seed=9), torch.rand(2, 4, generator=torch.Generator().manual_seed(9)).double()
    shared = (case.pair, case.heads, states, [4, 4], [0, 1], [0, 4, 8], hidden)
    found, _ = shortlist.draw_by_kernel(*shared, filled[:, :5003], u)
    wanted, _ = shortlist.draw_by_kernel(*shared, 3 * random(8, 5024, seed=8)[:, :5003].contiguous(), u)
    for name in ("ids", "probs", "confidence_logit"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_estimated_logits_choose_and_exact_ones_are_drawn_from() -> None:
    case = Case(4096)
    weight = 0.4 * random(4096, HIDDEN, seed=30)
    codes, scale = quantize(weight)
    exact = (codes.view(4096, -1, 32) * scale[:, :, None]).view(4096, HIDDEN)
    case.heads = replace(case.heads, exact=ExactRows(codes.numpy(), scale.numpy()))
    hidden, state = random(3, HIDDEN, seed=9), state_of({"temperature": 0.9})
    logits = hidden @ exact.T
    u = torch.rand(1, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    shared = ([state], [3], [0], [0, 3], hidden)
    wanted, *_ = shortlist.draw_block(case.pair, *shared, logits.clone(), u)
    # Which tokens are likeliest is the same here; how likely they are is not.
    found, bad = shortlist.draw_by_kernel(case.pair, case.heads, *shared, 0.5 * logits, u)
    assert not bad and torch.equal(found.draft_to_target, wanted.draft_to_target)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-4, atol=1e-7)
    # What a request adds to logits lies in those of the whole vocabulary, which then count.
    biased = state_of({"temperature": 0.9, "logit_bias": ((int(wanted.ids[0, 0]), 9.0),)})
    shared = ([biased], [3], [0], [0, 3], hidden)
    wanted, *_ = shortlist.draw_block(case.pair, *shared, logits.clone(), u)
    found, _ = shortlist.draw_by_kernel(case.pair, case.heads, *shared, logits.clone(), u)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-4, atol=1e-7)


def test_equal_logits_and_few_possible_tokens() -> None:
    """Of equal logits the first are taken; where few are possible, they are all there is to draw."""
    case = Case(4096, has_head=False)
    flat, few = torch.zeros(1, 4096), torch.full((1, 4096), float("-inf"))
    few[0, 4000:4010] = torch.arange(10.0)
    (wanted, *_), (found, bad) = case.draw(torch.cat([flat, few]), [state_of({"temperature": 1.0})] * 2, [1, 1])
    assert not bad
    assert torch.equal(found.draft_to_target[0, 0], case.pair.drafter.draft_to_target[:256])
    assert (found.probs[0] == 1 / 256).all()
    assert int(found.ids[1]) == int(wanted.ids[1])
    assert (found.probs[1] > 0).sum() == 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_reported(value: float) -> None:
    case = Case(4096)
    base = random(4, 4096, seed=1)
    base[1, 77] = value
    states = [state_of({"temperature": 0.7}), state_of({"temperature": 0.0})]
    _, (found, bad) = case.draw(base, states, [2, 2])
    assert bad == {0}
    assert bool(found.probs.isfinite().all()) and (found.ids >= 0).all()


def test_heads_with_a_state_or_a_gate_are_not_taken() -> None:
    w1, w2 = random(VOCAB, RANK, seed=2).bfloat16(), random(4096, RANK, seed=3).bfloat16()
    device = torch.device("cpu")
    assert LaneHeads.of(VanillaHead(w1, None, w2), None, None, device) is not None
    assert LaneHeads.of(GatedHead(w1, None, w2, None), None, None, device) is None
    assert LaneHeads.of(VanillaHead(w1.float(), None, w2.float()), None, None, device) is None
