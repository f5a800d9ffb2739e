"""What drafters read over the vocabulary in 8 bits: how near it is, and that the output's law does not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.laws import settings_of
from sparkchat.kernels.accept import AcceptBuffers, accept_block
from sparkchat.kernels.fp8 import fp8_linear
from sparkchat.kernels.markov import MarkovBuffers, markov_block
from sparkchat.models.deepseek_v4 import vocabulary
from sparkchat.models.deepseek_v4.packed import TiledLinear
from sparkchat.models.deepseek_v4.vocabulary import VocabularyHead, rounded_head, rows_for_drafts
from sparkchat.models.linear import PlainLinear
from sparkchat.models.parallel import ALONE

CPU = torch.device("cpu")


def test_a_head_in_8_bits_is_within_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_ROUNDED_OUTS", 128)
    weight = torch.randn(160, 256) * torch.logspace(-2, 1, 160)[:, None]
    found = rounded_head(weight)
    assert found is not None and found.shape == (160, 256)
    dense = found.dense()
    blocks = torch.cat([part.abs().amax() * torch.ones_like(part) for part in weight.split(128)])
    assert bool(((dense - weight).abs() <= weight.abs() / 16 + blocks / (448 * 512) * 1.001).all())
    assert (dense - weight).norm() < 0.04 * weight.norm()
    assert rounded_head(torch.zeros(40, 256)) is None and rounded_head(torch.zeros(32, 100)) is None


def test_it_is_taken_where_kernels_are_and_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = VocabularyHead(PlainLinear(torch.randn(64, 128), None), ALONE), torch.randn(64, 16)
    assert head.for_drafts() is head and rows_for_drafts(rows) is rows
    monkeypatch.setattr(vocabulary, "has_kernels", lambda device, dtype: dtype == torch.float32)
    # What is stored in few bits may be multiplied by inputs of more: those decide.
    wide = PlainLinear(torch.randn(64, 128), None)
    wide.dtype = torch.float64
    assert (other := VocabularyHead(wide, ALONE)).for_drafts() is other
    short, x = head.for_drafts(), torch.randn(3, 128)
    assert isinstance(short._part, TiledLinear) and short(x).dtype == torch.float32
    torch.testing.assert_close(short(x), head(x), atol=2.0, rtol=0.1)
    assert not torch.equal(short(x), head(x)) and rows_for_drafts(rows).shape == rows.shape
    monkeypatch.setenv(vocabulary.DRAFT_TABLES, "stored")
    assert head.for_drafts() is head and rows_for_drafts(rows) is rows


def outputs(temperature: float, rounds: int) -> tuple[Tensor, int, Tensor, Tensor]:
    """First tokens of 256 requests by ``rounds`` drafts from rounded tables, how many were accepted, and the laws."""
    torch.manual_seed(3)
    requests, vocab = 256, 32
    settings = settings_of([(temperature, 8, 0.95, 0.0)] * requests, CPU)
    hidden, head, w1, w2 = (
        torch.randn(1, 128),
        torch.randn(vocab, 128) * 0.3,
        torch.randn(vocab, 16),
        torch.randn(vocab, 16),
    )
    target = (hidden @ head.T + torch.randn(1, vocab)).expand(2, vocab)
    logits, base = target.repeat(requests, 1), torch.empty(1, vocab)
    rounded = rounded_head(head)
    assert rounded is not None
    fp8_linear(hidden, rounded, base)
    rows = vocabulary.RoundedRows.of(w2 * 0.1)
    starts = torch.arange(0, 2 * requests + 1, 2, dtype=torch.int32)
    lens, anchors = torch.ones(requests, dtype=torch.int32), torch.zeros(requests, dtype=torch.int64)
    drawn = base.expand(requests, 1, vocab).clone()
    block, buffers = MarkovBuffers.empty(drawn), AcceptBuffers.empty(logits, requests, 1)
    counts, accepted = torch.zeros(vocab), 0
    for step in range(rounds):
        settings.rounds.fill_(step)
        drawn.copy_(base.expand_as(drawn))
        markov_block(drawn, w1, rows, anchors, settings, block)
        accept_block(
            logits, starts, lens, settings, buffers, drafts=block.tokens, draft_laws=block.laws, draft_index=block.index
        )
        counts += torch.bincount(buffers.tokens[:, 0], minlength=vocab)
        accepted += int(buffers.accepted_len.sum())
    p, q = buffers.laws.probabilities()[0], block.laws.probabilities()[0]
    assert torch.equal(logits[0], target[0])
    return counts, accepted, p, q


def test_sampled_output_has_the_targets_law() -> None:
    rounds = 12
    counts, accepted, p, q = outputs(0.9, rounds)
    want = p * 256 * rounds
    kept = want > 0
    assert float(counts[~kept].sum()) == 0
    # 1e-4 of a chi-square law of at most 7 degrees of freedom lies above 29.9.
    assert float(((counts - want)[kept].square() / want[kept]).sum()) < 29.9
    share, tries = float(torch.minimum(p, q).sum()), 256 * rounds
    assert 0.02 < share < 0.98
    assert abs(accepted - tries * share) < 4 * math.sqrt(tries * share * (1 - share))


def test_greedy_output_is_the_targets() -> None:
    counts, _, p, _ = outputs(0.0, 1)
    assert int(counts[p.argmax()]) == 256
