"""One training step: target pass, block pass, the three losses (paper section 4.1)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.train.batches import Batch
from sparkchat.train.config import Recipe
from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.losses import DraftLoss, SlotTargets, VocabularyHead, shaping, target_probabilities


@dataclass(frozen=True)
class StepLoss:
    """Losses of a batch, and the drafter's agreement with the target."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    overlap: Tensor
    """[B, A, g] chance that the slot's draft would be accepted, 1 - L1 / 2"""
    supervised: Tensor
    """[B, A, g] bool"""


def batch_loss(
    drafter: TrainingDrafter, head: VocabularyHead, batch: Batch, recipe: Recipe, offset: int = 0
) -> StepLoss:
    """The recipe's total loss of ``batch``; gradients reach the drafter only.

    ``offset`` says where in ``recipe.loss_sampling`` the first sequence stands.
    """
    shape = shaping(batch.ids, recipe.loss_sampling, head, offset)
    with torch.no_grad():
        features, hidden = drafter.target.forward(batch.ids, drafter.tap_layers)
        probabilities = target_probabilities(hidden.flatten(0, 1), head, shape)
    blocks = drafter(features, batch.ids, batch.anchors, batch.block_len)
    labels, supervised = batch.labels()
    anchor_ids = batch.ids.gather(1, batch.anchors)[..., None]
    previous = drafter.previous_embedding(torch.cat([anchor_ids, labels[..., :-1]], dim=-1)).to(blocks.dtype)
    slot = torch.arange(batch.block_len, device=blocks.device)
    weights = supervised * torch.exp(-slot / recipe.slot_decay)
    weights = weights / weights.sum().clamp(min=1e-6)
    targets = SlotTargets(
        probabilities=probabilities,
        rows=_position_rows(batch, slot),
        labels=head.draft_index(labels).flatten(),
        weights=weights.flatten(),
        shaping=shape,
        ce_weight=recipe.ce_weight,
        l1_weight=recipe.l1_weight,
    )
    states = torch.cat([blocks, previous], dim=-1).flatten(0, 2)
    w2 = drafter.markov_head.markov_w2.weight
    draft_loss, ce, l1 = DraftLoss.apply(states, w2, head.weight[: head.draft_size], targets)
    overlap = (1 - l1 / 2).clamp(0, 1).view_as(weights)
    logits = drafter.confidence_head(blocks, previous)
    bce = F.binary_cross_entropy_with_logits(logits, overlap, reduction="none")
    confidence = (weights * bce).sum()
    flat = weights.flatten()
    return StepLoss(
        total=draft_loss + recipe.confidence_weight * confidence,
        ce=(flat * ce).sum(),
        l1=(flat * l1).sum(),
        confidence=confidence.detach(),
        overlap=overlap,
        supervised=supervised,
    )


def _position_rows(batch: Batch, slot: Tensor) -> Tensor:
    """[B * A * g] row of the flattened sequences whose target distribution predicts each slot's label."""
    num_sequences, length = batch.ids.shape
    sequence = torch.arange(num_sequences, device=batch.ids.device)[:, None, None]
    position = (batch.anchors[..., None] + slot).clamp(max=length - 1)
    return (sequence * length + position).flatten()


@dataclass
class AgreementMeter:
    """Running sums of overlap by slot, kept on the device so that no step waits for the host."""

    overlap: Tensor
    count: Tensor
    length: Tensor
    """Expected accepted drafts of the fully supervised blocks: sum over slots of the running product"""
    blocks: Tensor

    @classmethod
    def empty(cls, block_size: int, device: str) -> "AgreementMeter":
        return cls(*(torch.zeros(n, device=device) for n in (block_size, block_size, 1, 1)))

    def add(self, loss: StepLoss) -> None:
        block_len = loss.overlap.shape[-1]
        overlap = loss.overlap * loss.supervised
        self.overlap[:block_len] += overlap.sum(dim=(0, 1))
        self.count[:block_len] += loss.supervised.sum(dim=(0, 1))
        if block_len == self.overlap.shape[0]:
            full = loss.supervised.all(dim=-1)
            self.length += (overlap.cumprod(dim=-1).sum(dim=-1) * full).sum()
            self.blocks += full.sum()

    def by_slot(self) -> list[float]:
        return (self.overlap / self.count.clamp(min=1)).tolist()

    def acceptance_length(self) -> float:
        """Expected tokens a round, the bonus included, of full blocks on teacher-forced text."""
        return 1 + (self.length / self.blocks.clamp(min=1)).item()
