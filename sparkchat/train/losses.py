"""The drafter's losses and their gradients, without ever holding all logits.

For each block slot: CE = -log p_d(label), L1 = sum |p_d - p_t| over the target's whole vocabulary, and the
confidence's cross entropy against 1 - L1 / 2 (paper section 4.1). M rows, Vd draft vocabulary, V target
vocabulary, d hidden size, r Markov rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class VocabularyHead:
    """The target's output rows with the draft vocabulary's first, so that its logits are a leading slice."""

    weight: Tensor
    """[V, d]: rows of draft_to_target, then all others"""
    draft_to_target: Tensor
    """[Vd] target ids"""
    column_of: Tensor
    """[V] row of ``weight`` that belongs to a target id; its draft index where that is below Vd"""

    @property
    def draft_size(self) -> int:
        return self.draft_to_target.shape[0]

    def draft_index(self, ids: Tensor) -> Tensor:
        """Draft indices of target ids, -1 outside the draft vocabulary."""
        columns = self.column_of[ids]
        return torch.where(columns < self.draft_size, columns, -1)


def vocabulary_head(head: Tensor, draft_to_target: Tensor) -> VocabularyHead:
    """Reorders head [V, d] for the draft vocabulary ``draft_to_target`` [Vd]."""
    vocab_size, device = head.shape[0], head.device
    draft_to_target = draft_to_target.to(device)
    is_draft = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    is_draft[draft_to_target] = True
    order = torch.cat([draft_to_target, (~is_draft).nonzero().squeeze(-1)])
    column_of = torch.empty_like(order)
    column_of[order] = torch.arange(vocab_size, device=device)
    return VocabularyHead(head[order].contiguous(), draft_to_target, column_of)


@dataclass(frozen=True)
class Shaping:
    """How logits are shaped before both distributions are compared, by sequence: penalty, then temperature.

    Rows are positions of B sequences of length L, row = sequence * L + position.
    """

    temperature: Tensor
    """[B]"""
    penalty: Tensor
    """[B] repetition penalty on tokens up to the row's own position"""
    first_seen: Tensor | None
    """[B, V] int32 where a column's token first occurs, L or more where it does not; None: no penalty anywhere"""
    length: int

    def shaped(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shaped logits of ``rows`` [M] for their leading columns [M, n], and their derivative by the raw ones."""
        sequence = rows // self.length
        factor = torch.ones_like(logits)
        if self.first_seen is not None:
            is_seen = self.first_seen[sequence, : logits.shape[1]] <= (rows % self.length)[:, None]
            penalty = self.penalty[sequence][:, None]
            factor = torch.where(is_seen, torch.where(logits > 0, 1 / penalty, penalty), 1.0)
        factor = factor / self.temperature[sequence][:, None]
        return logits * factor, factor


def shaping(ids: Tensor, settings: tuple[tuple[float, float], ...], head: VocabularyHead, offset: int) -> Shaping:
    """Deals ``settings`` (temperature, penalty) out to the sequences ids [B, L] in turn, from ``offset`` on."""
    num_sequences, length = ids.shape
    dealt = [settings[(offset + i) % len(settings)] for i in range(num_sequences)]
    temperature, penalty = (torch.tensor(x, device=ids.device) for x in zip(*dealt, strict=True))
    first_seen = None
    if any(factor != 1 for _, factor in settings):
        size = (num_sequences, head.weight.shape[0])
        first_seen = torch.full(size, length, dtype=torch.int32, device=ids.device)
        places = torch.arange(length, dtype=torch.int32, device=ids.device).expand(num_sequences, -1)
        first_seen.scatter_reduce_(1, head.column_of[ids], places, "amin")
    return Shaping(temperature, penalty, first_seen, length)


def product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a [M, k] @ b [n, k].T with the result in fp32: bf16 logits of 20 would be off by a sixteenth."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T


def target_probabilities(hidden: Tensor, head: VocabularyHead, shape: Shaping) -> Tensor:
    """softmax over all V ids of the target's shaped logits, columns of the draft vocabulary: [P, d] -> [P, Vd]."""
    out = torch.empty(hidden.shape[0], head.draft_size, dtype=hidden.dtype, device=hidden.device)
    for start in range(0, hidden.shape[0], _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        logits = product_fp32(hidden[rows], head.weight)
        if logits.is_cuda:
            from sparkchat.train.triton_kernels import launch_target_probabilities

            launch_target_probabilities(logits, start, shape, out[rows])
        else:
            index = torch.arange(start, start + logits.shape[0], device=hidden.device)
            out[rows] = shape.shaped(logits, index)[0].softmax(dim=-1)[:, : head.draft_size]
    return out


@dataclass(frozen=True)
class SlotTargets:
    """What each of M block slots is fitted to."""

    probabilities: Tensor
    """[P, Vd] shaped target distributions of P positions, full-vocabulary softmax"""
    rows: Tensor
    """[M] which of the P rows belongs to the slot"""
    labels: Tensor
    """[M] draft index of the true next token, -1 outside the draft vocabulary"""
    weights: Tensor
    """[M] weight of the slot's loss, already divided by the batch's total"""
    shaping: Shaping
    ce_weight: float
    l1_weight: float


def block_losses(z: Tensor, targets: SlotTargets, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """ce [M], l1 [M] (fp32, unweighted) and the weighted loss's gradient by z [M, Vd], for fp32 logits z."""
    weights, chosen, labels = targets.weights[rows], targets.rows[rows], targets.labels[rows]
    if z.is_cuda:
        from sparkchat.train.triton_kernels import launch_block_losses

        return launch_block_losses(z, targets, rows, dtype)
    shaped, factor = targets.shaping.shaped(z, chosen)
    log_p = shaped.log_softmax(dim=-1)
    p, q = log_p.exp(), targets.probabilities[chosen].float()
    known = labels >= 0
    one_hot = torch.zeros_like(p).scatter_(1, labels.clamp(min=0)[:, None], 1.0)
    ce = torch.where(known, -(log_p * one_hot).sum(dim=-1), 0.0)
    # Target mass outside the draft vocabulary can never be drafted, and counts.
    l1 = (p - q).abs().sum(dim=-1) + (1 - q.sum(dim=-1)).clamp(min=0)
    sign = (p - q).sign()
    grad = targets.l1_weight * p * (sign - (sign * p).sum(dim=-1, keepdim=True))
    grad += targets.ce_weight * known[:, None] * (p - one_hot)
    return ce, l1, (grad * factor * weights[:, None]).to(dtype)


class DraftLoss(torch.autograd.Function):
    """Weighted CE + L1 of Markov-corrected logits; gradients are taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        context, states: Tensor, w2: Tensor, head: Tensor, targets: SlotTargets
    ) -> tuple[Tensor, Tensor, Tensor]:
        """states [M, d + r] = [hidden; Markov embedding], w2 [Vd, r], head [Vd, d] -> (loss, ce [M], l1 [M])."""
        rank = w2.shape[1]
        weight = torch.cat([head, w2.to(head.dtype)], dim=1)
        grad_states, grad_w2 = torch.empty_like(states), torch.zeros_like(w2)
        ce, l1 = torch.empty_like(targets.weights), torch.empty_like(targets.weights)
        for start in range(0, states.shape[0], _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            z = product_fp32(states[rows], weight)
            ce[rows], l1[rows], grad = block_losses(z, targets, rows, states.dtype)
            grad_states[rows] = grad @ weight
            grad_w2 += product_fp32(grad.T, states[rows, -rank:].T)
        context.save_for_backward(grad_states, grad_w2)
        context.mark_non_differentiable(ce, l1)
        loss = (targets.weights * (targets.ce_weight * ce + targets.l1_weight * l1)).sum()
        return loss, ce, l1

    @staticmethod
    def backward(context, grad_loss: Tensor, _ce: Tensor, _l1: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_w2 = context.saved_tensors
        return grad_states * grad_loss.to(grad_states.dtype), grad_w2 * grad_loss, None, None
