"""Losses and hand-written gradients against plain autograd."""

import pytest
import torch

from sparkchat.train.losses import DraftLoss, SlotTargets, VocabularyHead, target_probabilities, vocabulary_head
from sparkchat.train.target import Target


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_equal_autograd(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr("sparkchat.train.losses._CHUNK_ROWS", 5)
    torch.manual_seed(0)
    num_rows, size, rank, kept, vocab = 12, 16, 4, 30, 50
    states = torch.randn(num_rows, size + rank, dtype=torch.float32, requires_grad=True)
    w2 = torch.randn(kept, rank, requires_grad=True)
    head = torch.randn(vocab, size)
    full = (torch.randn(7, vocab) * 2).softmax(dim=-1)
    rows = torch.randint(0, 7, (num_rows,))
    labels = torch.randint(-1, kept, (num_rows,))
    labels[0] = -1
    weights = torch.rand(num_rows)
    targets = SlotTargets(full[:, :kept], rows, labels, weights, temperature, 0.1, 0.9)
    loss, ce, l1 = DraftLoss.apply(states, w2, head[:kept], targets)
    (3 * loss).backward()
    got = states.grad.clone(), w2.grad.clone()

    states.grad = w2.grad = None
    z = (states[:, :size] @ head[:kept].T + states[:, size:] @ w2.T) / temperature
    p = torch.cat([z.softmax(dim=-1), torch.zeros(num_rows, vocab - kept)], dim=1)
    want_l1 = (p - full[rows]).abs().sum(dim=-1)
    want_ce = torch.where(labels >= 0, -z.log_softmax(dim=-1).gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    want = (weights * (0.1 * want_ce + 0.9 * want_l1)).sum()
    (3 * want).backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(l1, want_l1.detach())
    torch.testing.assert_close(ce, want_ce.detach())
    torch.testing.assert_close(got[0], states.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], w2.grad, atol=1e-5, rtol=1e-4)


def test_target_probabilities_are_the_full_softmax(target: Target, head: VocabularyHead) -> None:
    hidden = torch.randn(9, target.shape.hidden_size)
    got = target_probabilities(hidden, head, 0.7)
    full = (hidden @ target.head.T / 0.7).softmax(dim=-1)
    torch.testing.assert_close(got, full[:, head.draft_to_target])
    assert bool((got.sum(dim=-1) < 1).all())


def test_vocabulary_head_maps_both_ways() -> None:
    weight = torch.arange(10.0)[:, None].expand(-1, 3)
    head = vocabulary_head(weight, torch.tensor([0, 4, 7]))
    assert head.weight[:, 0].tolist() == [0, 4, 7, 1, 2, 3, 5, 6, 8, 9]
    assert head.target_to_draft.tolist() == [0, -1, -1, -1, 1, -1, -1, 2, -1, -1]
