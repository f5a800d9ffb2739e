"""Losses and hand-written gradients against plain autograd."""

import pytest
import torch

from sparkchat.train.losses import (
    DraftLoss,
    Shaping,
    SlotTargets,
    VocabularyHead,
    shaping,
    target_probabilities,
    vocabulary_head,
)
from sparkchat.train.target import Target


def slow_shape(logits: torch.Tensor, seen: torch.Tensor, penalty: float, temperature: float) -> torch.Tensor:
    """Penalty and temperature as the sampler applies them to one row."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits) / temperature


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_gradients_equal_autograd(monkeypatch: pytest.MonkeyPatch, penalty: float) -> None:
    monkeypatch.setattr("sparkchat.train.losses._CHUNK_ROWS", 5)
    torch.manual_seed(0)
    num_rows, size, rank, kept, vocab = 12, 16, 4, 30, 50
    states = torch.randn(num_rows, size + rank, dtype=torch.float32, requires_grad=True)
    w2 = torch.randn(kept, rank, requires_grad=True)
    head = torch.randn(vocab, size)
    full = (torch.randn(8, vocab) * 2).softmax(dim=-1)
    rows = torch.randint(0, 8, (num_rows,))
    labels = torch.randint(-1, kept, (num_rows,))
    labels[0] = -1
    weights = torch.rand(num_rows)
    first_seen = torch.randint(0, 8, (2, vocab), dtype=torch.int32) if penalty != 1 else None
    shape = Shaping(torch.tensor([1.0, 0.7]), torch.tensor([1.0, penalty]), first_seen, 4)
    targets = SlotTargets(full[:, :kept], rows, labels, weights, shape, 0.1, 0.9)
    loss, ce, l1 = DraftLoss.apply(states, w2, head[:kept], targets)
    (3 * loss).backward()
    got = states.grad.clone(), w2.grad.clone()

    states.grad = w2.grad = None
    z = states[:, :size] @ head[:kept].T + states[:, size:] @ w2.T
    shaped = []
    for row, index in zip(z, rows.tolist(), strict=True):
        seen = torch.zeros(kept, dtype=torch.bool) if first_seen is None else first_seen[index // 4, :kept] <= index % 4
        shaped.append(slow_shape(row, seen, (1.0, penalty)[index // 4], (1.0, 0.7)[index // 4]))
    z = torch.stack(shaped)
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


def test_target_probabilities_are_the_full_softmax(
    target: Target, head: VocabularyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row under the penalty and temperature of its sequence, for the tokens up to its own position."""
    monkeypatch.setattr("sparkchat.train.losses._CHUNK_ROWS", 4)
    ids = torch.randint(4, 250, (3, 5), generator=torch.Generator().manual_seed(5))
    hidden = torch.randn(15, target.shape.hidden_size)
    settings = ((0.7, 1.0), (0.5, 1.1))
    got = target_probabilities(hidden, head, shaping(ids, settings, head, offset=1))
    for row in range(15):
        sequence, position = divmod(row, 5)
        temperature, penalty = settings[(1 + sequence) % 2]
        seen = torch.zeros(target.shape.vocab_size, dtype=torch.bool)
        seen[ids[sequence, : position + 1]] = True
        full = slow_shape(hidden[row] @ target.head.T, seen, penalty, temperature).softmax(dim=-1)
        torch.testing.assert_close(got[row], full[head.draft_to_target], atol=1e-6, rtol=1e-4)
    assert bool((got.sum(dim=-1) < 1).all())


def test_vocabulary_head_maps_both_ways() -> None:
    weight = torch.arange(10.0)[:, None].expand(-1, 3)
    head = vocabulary_head(weight, torch.tensor([0, 4, 7]))
    assert head.weight[:, 0].tolist() == [0, 4, 7, 1, 2, 3, 5, 6, 8, 9]
    assert head.draft_index(torch.arange(10)).tolist() == [0, -1, -1, -1, 1, -1, -1, 2, -1, -1]
    assert torch.equal(head.weight[head.column_of, 0], torch.arange(10.0))
