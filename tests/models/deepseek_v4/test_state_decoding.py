"""Greedy decoding with drafts equals greedy decoding without, for good, half good and wrong drafts of every width."""

from __future__ import annotations

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


def drafted(model: DeepseekV4, prompt: torch.Tensor, truth: list[int], width: int, kind: str) -> tuple[list[int], int]:
    """As many greedy tokens as ``truth``, verified in blocks, and how many blocks there were."""
    cache = model.new_cache(1, len(prompt) + len(truth) + 16, 64)
    row = cache.allocate()
    hidden = run(model, cache, [(row, prompt)])
    tokens, draw = [int(model.logits(hidden[-1:]).argmax())], torch.Generator().manual_seed(width)
    rounds = 0
    while len(tokens) < len(truth):
        drafts = truth[len(tokens) : len(tokens) + width]
        wrong = {"oracle": 0.0, "half": 0.3, "anti": 1.0}[kind]
        drafts = [(d + 1) % 97 if float(torch.rand((), generator=draw)) < wrong else d for d in drafts]
        start = cache.length(row)
        choices = model.logits(run(model, cache, [(row, torch.tensor([tokens[-1], *drafts]))])).argmax(-1).tolist()
        accepted = next((i for i, d in enumerate(drafts) if choices[i] != d), len(drafts))
        tokens += choices[: accepted + 1]
        cache.truncate(row, start + accepted + 1)
        rounds += 1
    return tokens[: len(truth)], rounds


def check(sizes: dict[str, Any], count: int, widths: list[int]) -> None:
    model, prompt = make_trunk(**sizes).ours, random_ids(PROMPT)
    truth = plain(model, prompt, count)
    assert len(set(truth)) > 5
    for width in widths:
        rounds = {}
        for kind in ("oracle", "half", "anti"):
            tokens, rounds[kind] = drafted(model, prompt, truth, width, kind)
            assert tokens == truth, f"width {width}, {kind}"
        assert rounds["oracle"] < rounds["half"] < rounds["anti"] == count - 1


def test_narrow_entries() -> None:
    check(SMALL, 48, [1, 4, 5, 8])


def test_over_a_wide_entry() -> None:
    check(WIDE, 125, [5])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, WIDE], ids=["narrow", "wide"])
def test_two_thousand_tokens(sizes: dict[str, Any]) -> None:
    check(sizes, 2000, list(range(1, 9)))
