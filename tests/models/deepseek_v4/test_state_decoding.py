"""Greedy decoding with drafts equals greedy decoding without, for good, half good and wrong drafts of every width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from models.deepseek_v4.trunks import make_trunk, random_ids, run
from sparkchat.models.deepseek_v4.model import DeepseekV4

SMALL: dict[str, Any] = {"compress_ratios": [0, 4, 8, 4], "num_hidden_layers": 4, "hc_sinkhorn_iters": 2}
WIDE: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "index_topk": 40,
    "hc_sinkhorn_iters": 2,
}
KINDS = ("oracle", "half", "anti")
PROMPT = 21


def plain(model: DeepseekV4, prompt: torch.Tensor, count: int) -> list[int]:
    """``count`` greedy tokens, one row at a time."""
    cache = model.new_cache(1, len(prompt) + count + 16, 64)
    row, tokens = cache.allocate(), []
    hidden = run(model, cache, [(row, prompt)])
    for _ in range(count):
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        hidden = run(model, cache, [(row, torch.tensor(tokens[-1:]))])
    return tokens


@dataclass
class Answer:
    """One that is decoded with drafts of one width and kind, in a cache row of its own."""

    width: int
    kind: str
    row: int
    tokens: list[int]
    draw: torch.Generator
    rounds: int = 0

    def drafts(self, truth: list[int]) -> list[int]:
        wrong = {"oracle": 0.0, "half": 0.3, "anti": 1.0}[self.kind]
        right = truth[len(self.tokens) : len(self.tokens) + self.width]
        return [(d + 1) % 97 if float(torch.rand((), generator=self.draw)) < wrong else d for d in right]


def drafted(model: DeepseekV4, prompt: torch.Tensor, truth: list[int], widths: list[int]) -> list[Answer]:
    """As many greedy tokens as ``truth`` for every width and kind, verified in blocks: all of them in one batch."""
    kinds = [(width, kind) for width in widths for kind in KINDS]
    cache = model.new_cache(len(kinds), len(prompt) + len(truth) + 16, 64)
    answers = []
    for width, kind in kinds:
        row = cache.allocate()
        first = int(model.logits(run(model, cache, [(row, prompt)])[-1:]).argmax())
        answers.append(Answer(width, kind, row, [first], torch.Generator().manual_seed(width)))
    while waiting := [answer for answer in answers if len(answer.tokens) < len(truth)]:
        blocks = [(answer, answer.drafts(truth), cache.length(answer.row)) for answer in waiting]
        spans = [(answer.row, torch.tensor([answer.tokens[-1], *drafts])) for answer, drafts, _ in blocks]
        choices = model.logits(run(model, cache, spans)).argmax(-1).split([len(ids) for _, ids in spans])
        for (answer, drafts, start), chosen in zip(blocks, map(torch.Tensor.tolist, choices), strict=True):
            accepted = next((i for i, d in enumerate(drafts) if chosen[i] != d), len(drafts))
            answer.tokens += chosen[: accepted + 1]
            answer.rounds += 1
            cache.truncate(answer.row, start + accepted + 1)
    return answers


def check(sizes: dict[str, Any], count: int, widths: list[int]) -> None:
    model, prompt = make_trunk(**sizes).ours, random_ids(PROMPT)
    truth = plain(model, prompt, count)
    assert len(set(truth)) > 5
    answers = drafted(model, prompt, truth, widths)
    for answer in answers:
        assert answer.tokens[: len(truth)] == truth, f"width {answer.width}, {answer.kind}"
    for width in widths:
        oracle, half, anti = (answer.rounds for answer in answers if answer.width == width)
        assert oracle < half < anti == count - 1


def test_narrow_entries() -> None:
    check(SMALL, 48, [1, 4, 5, 8])


def test_over_a_wide_entry() -> None:
    check(WIDE, 125, [5])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["narrow", "wide"])
def test_two_thousand_tokens(sizes: dict[str, Any]) -> None:
    check(sizes, 2000, list(range(1, 9)))
