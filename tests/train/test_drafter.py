"""Who sees whom in a block, and the training form against the step-by-step form."""

import torch

from sparkchat.train.batches import Batch
from sparkchat.train.config import Recipe
from sparkchat.train.drafter import TrainingDrafter, block_mask
from sparkchat.train.generate import RowSampling
from sparkchat.train.losses import VocabularyHead
from sparkchat.train.simulate import Simulator
from sparkchat.train.step import AgreementMeter, batch_loss
from sparkchat.train.target import Target

IDS = torch.randint(4, 250, (2, 40), generator=torch.Generator().manual_seed(5))


def blocks_of(drafter: TrainingDrafter, ids: torch.Tensor, anchors: torch.Tensor, block_len: int = 5) -> torch.Tensor:
    with torch.no_grad():
        features, _ = drafter.target.forward(ids, drafter.tap_layers)
        return drafter(features, ids, anchors, block_len)


def test_a_block_sees_its_anchor_and_the_context_strictly_before_it(drafter: TrainingDrafter) -> None:
    anchors = torch.tensor([[20, 31], [7, 20]])
    base = blocks_of(drafter, IDS, anchors)
    for position, seen_by in ((19, [1, 1]), (20, [1, 1]), (21, [0, 1]), (31, [0, 1]), (32, [0, 0])):
        changed = IDS.clone()
        changed[0, position] = 4 + (changed[0, position] + 1) % 200
        moved = (blocks_of(drafter, changed, anchors) - base).abs().amax(dim=(2, 3)) > 1e-6
        assert moved[0].tolist() == [bool(x) for x in seen_by], position
        assert not moved[1].any()


def test_block_rows_see_each_other_both_ways() -> None:
    mask = block_mask(torch.tensor([[3, 5]]), 2, 8)[0, 0]
    assert mask.shape == (4, 12)
    assert mask[:, :8].sum(dim=1).tolist() == [3, 3, 5, 5]
    assert mask[:, 8:].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_blocks_do_not_depend_on_their_mates(drafter: TrainingDrafter) -> None:
    together = blocks_of(drafter, IDS, torch.tensor([[20, 31, 9], [7, 20, 3]]))
    alone = blocks_of(drafter, IDS[1:], torch.tensor([[20]]))
    torch.testing.assert_close(together[1, 1], alone[0, 0], atol=1e-5, rtol=1e-4)


def test_training_form_equals_incremental_form(drafter: TrainingDrafter, head: VocabularyHead) -> None:
    """After some rounds of decoding, the drafter's next block is what one teacher-forced pass gives."""
    prompts = [IDS[0, :12].tolist(), IDS[1, :19].tolist()]
    simulator = Simulator(drafter, head, end_id=2, block_len=5)
    _, ids = simulator.run(prompts, RowSampling.fixed(2, 1.0, 1.0, 1.0, "cpu"), 12)
    width = int(simulator.anchor.max()) + 1
    expected = blocks_of(drafter, ids[:, :width], simulator.anchor[:, None])
    with torch.inference_mode():
        got = simulator._backbone()
    torch.testing.assert_close(got, expected[:, 0], atol=1e-4, rtol=1e-4)


def test_confidence_does_not_see_its_own_draft(drafter: TrainingDrafter) -> None:
    hidden, w1 = torch.randn(1, 3, 32), drafter.previous_embedding(torch.tensor([[5, 6, 7]]))
    changed = w1.clone()
    changed[0, 2] += 1
    before, after = drafter.confidence_head(hidden, w1), drafter.confidence_head(hidden, changed)
    assert torch.equal(before[0, :2], after[0, :2])
    assert before[0, 2] != after[0, 2]


def test_a_drafter_that_copies_the_target_overlaps_fully(target: Target, drafter: TrainingDrafter) -> None:
    """With the whole vocabulary and the target's own state in every slot, nothing is left to lose."""
    from sparkchat.train.losses import vocabulary_head

    head = vocabulary_head(target.head, torch.arange(target.shape.vocab_size))
    drafter.markov_head.markov_w2.weight = torch.nn.Parameter(torch.zeros(target.shape.vocab_size, 8))
    batch = Batch(IDS, torch.ones_like(IDS, dtype=torch.bool), torch.tensor([[9, 20], [5, 30]]), IDS[:, :2] > 0, 4)
    _, hidden = target.forward(IDS, ())
    rows = batch.anchors[..., None] + torch.arange(4)
    drafter.forward = lambda *_: hidden[torch.arange(2)[:, None, None], rows]  # type: ignore[method-assign]
    loss = batch_loss(drafter, head, batch, Recipe(loss_sampling=((0.7, 1.0), (0.5, 1.1))))
    torch.testing.assert_close(loss.overlap, torch.ones(2, 2, 4), atol=1e-5, rtol=0)
    meter = AgreementMeter.empty(4, "cpu")
    meter.add(loss)
    assert abs(meter.acceptance_length() - 5) < 1e-3
