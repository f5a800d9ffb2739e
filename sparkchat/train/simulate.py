"""Speculative decoding of many rows at once, to measure a drafter while it is being trained.

Draft, verify and accept follow the paper's rule with fp32 probabilities; every block is verified whole.
R rows, g block length, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.generate import RowSampling
from sparkchat.train.losses import VocabularyHead, product_fp32
from sparkchat.train.target import RowCache


@dataclass(frozen=True)
class Rounds:
    """Outcome of N decode rounds, rows that had already ended left out."""

    accepted: Tensor
    """[N] accepted drafts"""
    confidence_logits: Tensor
    """[N, g]"""
    is_accepted: Tensor
    """[N, g] bool: this draft and all before it were accepted"""
    is_counted: Tensor
    """[N, g] bool: false behind an accepted end token, where drafts have no meaning"""
    num_tokens: Tensor
    """[N] tokens delivered: accepted drafts and the next one, without an end token and what follows it"""

    def mean_acceptance_length(self) -> float:
        return self.num_tokens.float().mean().item()

    def survival(self) -> list[float]:
        """Share of rounds whose first k drafts were accepted, k = 1..g."""
        return self.is_accepted.float().mean(dim=0).tolist()


class Simulator:
    """Decodes rows with a drafter; all rows share length limits and stop at ``end_id``."""

    def __init__(self, drafter: TrainingDrafter, head: VocabularyHead, end_id: int, block_len: int) -> None:
        self.drafter, self.head, self.end_id, self.block_len = drafter, head, end_id, block_len
        self.target, self.device = drafter.target, drafter.target.device

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], sampling: RowSampling, max_new: int) -> tuple[Rounds, Tensor]:
        """Decodes every prompt until its end token or ``max_new`` tokens.

        Returns the rounds and the ids [R, length], prompts included, zeros behind each row's end.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        limit = int(lengths.max()) + max_new + 2 * self.block_len + 2
        self.ids = torch.zeros(len(prompts), limit, dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        self.sampling = sampling
        self.rows = torch.arange(len(prompts), device=self.device)
        self.anchor = lengths.clone()
        self.stop_at = lengths + max_new
        self.seen = torch.zeros(len(prompts), self.target.shape.vocab_size, dtype=torch.bool, device=self.device)
        self.cache = RowCache(self.target, len(prompts), limit)
        self._prefill(lengths)
        self.is_running = self.ids[self.rows, self.anchor] != self.end_id
        rounds = []
        while bool(self.is_running.any()):
            rounds.append(self._round())
        return Rounds(*(torch.cat([r[i] for r in rounds]) for i in range(5))), self.ids

    def _prefill(self, lengths: Tensor) -> None:
        width = int(lengths.max())
        positions = torch.arange(width, device=self.device).expand(len(lengths), -1)
        features, hidden = self.target.forward_cached(
            self.ids[:, :width], positions, self.cache, self.drafter.tap_layers
        )
        shape, layers = self.target.shape, self.drafter.layers
        size = (len(layers), 2, len(lengths), shape.num_kv_heads, self.cache.length, shape.head_dim)
        self.draft_cache = torch.zeros(size, dtype=self.target.dtype, device=self.device)
        self._extend_context(features, positions)
        self.seen.scatter_(1, torch.where(positions < lengths[:, None], self.ids[:, :width], self.ids[:, :1]), True)
        last = hidden[self.rows, lengths - 1]
        p = self._probabilities(product_fp32(last, self.target.head), self.seen)
        self.ids[self.rows, self.anchor] = _draw(p)

    def _extend_context(self, features: Tensor, positions: Tensor) -> None:
        context = self.drafter.context(features)
        rope = self.target.cos[positions][:, :, None], self.target.sin[positions][:, :, None]
        for layer, cache in zip(self.drafter.layers, self.draft_cache, strict=True):
            keys, values = layer.self_attn.keys_values(context, *rope)
            cache[0][self.rows[:, None], :, positions] = keys
            cache[1][self.rows[:, None], :, positions] = values

    def _probabilities(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Penalty, temperature, then top-p, as the engine applies them: logits [R, n] -> probabilities."""
        s = self.sampling
        penalty = s.repetition_penalty[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        probs = (logits / s.temperature[:, None]).softmax(dim=-1)
        if bool((s.top_p < 1).any()):
            ordered, order = probs.sort(dim=-1, descending=True)
            above = ordered.cumsum(dim=-1) - ordered
            kept = torch.zeros_like(probs).scatter_(1, order, torch.where(above < s.top_p[:, None], ordered, 0.0))
            probs = kept / kept.sum(dim=-1, keepdim=True)
        return probs

    def _draft(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """ids [R, g] in the target's vocabulary, their laws g x [R, Vd], confidence logits [R, g]."""
        hidden = self._backbone()
        weight = self.head.weight[: self.head.draft_size]
        base = product_fp32(hidden.flatten(0, 1), weight).unflatten(0, hidden.shape[:2])
        w2 = self.drafter.markov_head.markov_w2.weight.to(hidden.dtype)
        previous, seen = self.ids[self.rows, self.anchor], self.seen.clone()
        ids, laws, confidence = [], [], []
        for slot in range(self.block_len):
            seen[self.rows, previous] = True
            embedded = self.drafter.previous_embedding(previous).to(hidden.dtype)
            confidence.append(self.drafter.confidence_head(hidden[:, slot], embedded))
            law = self._probabilities(base[:, slot] + product_fp32(embedded, w2), seen[:, self.head.draft_to_target])
            previous = self.head.draft_to_target[_draw(law)]
            laws.append(law)
            ids.append(previous)
        return torch.stack(ids, dim=1), laws, torch.stack(confidence, dim=1)

    def _backbone(self) -> Tensor:
        target = self.target
        blocks = self.drafter.block_ids(self.ids[self.rows, self.anchor], self.block_len)
        positions = self.anchor[:, None] + torch.arange(self.block_len, device=self.device)
        rope = target.cos[positions][:, :, None], target.sin[positions][:, :, None]
        context = torch.arange(self.cache.length, device=self.device) < self.anchor[:, None]
        own = context.new_ones(len(self.rows), self.block_len)
        mask = torch.cat([context, own], dim=1)[:, None, None].expand(-1, -1, self.block_len, -1)
        x = torch.nn.functional.embedding(blocks, target.embedding)
        for layer, cache in zip(self.drafter.layers, self.draft_cache, strict=True):
            normed = layer.input_layernorm(x)
            keys, values = layer.self_attn.keys_values(normed, *rope)
            keys = torch.cat([cache[0].transpose(1, 2), keys], dim=1)
            values = torch.cat([cache[1].transpose(1, 2), values], dim=1)
            x = x + layer.self_attn(normed, *rope, keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.drafter.norm(x)

    def _round(self) -> tuple[Tensor, ...]:
        drafts, laws, confidence = self._draft()
        window = torch.cat([self.ids[self.rows, self.anchor][:, None], drafts], dim=1)
        positions = self.anchor[:, None] + torch.arange(self.block_len + 1, device=self.device)
        features, hidden = self.target.forward_cached(window, positions, self.cache, self.drafter.tap_layers)
        self._extend_context(features, positions)
        accepted, following = self._accept(window, laws, hidden)
        slots = torch.arange(self.block_len, device=self.device)
        is_accepted = slots < accepted[:, None]
        ends = (drafts == self.end_id) & is_accepted
        is_counted = (ends.cumsum(dim=1) - ends.long()) == 0
        self._commit(window, accepted, following)
        ended_early = ends.any(dim=1)
        # As the engine counts: the end token itself is not delivered.
        num_tokens = torch.where(ended_early, ends.long().argmax(dim=1), accepted + (following != self.end_id))
        is_done = ended_early | (following == self.end_id) | (self.anchor >= self.stop_at)
        running = self.is_running.clone()
        self.is_running &= ~is_done
        outcome = accepted, confidence, is_accepted, is_counted, num_tokens
        return tuple(x[running] for x in outcome)

    def _accept(self, window: Tensor, laws: list[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted drafts [R] and the token after them [R]: the residual's, or the bonus behind a full block."""
        alive = torch.ones_like(self.is_running)
        accepted, seen = torch.zeros_like(self.anchor), self.seen.clone()
        following = torch.zeros_like(self.anchor)
        for slot in range(self.block_len + 1):
            seen[self.rows, window[:, slot]] = True
            p = self._probabilities(product_fp32(hidden[:, slot], self.target.head), seen)
            if slot == self.block_len:
                following = torch.where(alive, _draw(p), following)
                break
            q = torch.zeros_like(p).index_copy_(1, self.head.draft_to_target, laws[slot])
            ids = window[:, slot + 1, None]
            u = torch.rand(len(self.rows), device=self.device)
            takes = u * q.gather(1, ids)[:, 0] < p.gather(1, ids)[:, 0]
            residual = (p - q).clamp(min=0)
            residual = torch.where(residual.sum(dim=1, keepdim=True) > 1e-8, residual, p)
            following = torch.where(alive & ~takes, _draw(residual), following)
            alive &= takes
            accepted += alive
        return accepted, following

    def _commit(self, window: Tensor, accepted: Tensor, following: Tensor) -> None:
        """Writes the accepted drafts and the next token behind the anchor of rows that still run."""
        slots = torch.arange(self.block_len + 1, device=self.device)
        tokens = torch.cat([window[:, 1:], following[:, None]], dim=1)
        tokens[self.rows, accepted] = following
        is_kept = (slots <= accepted[:, None]) & self.is_running[:, None]
        places = self.anchor[:, None] + 1 + slots
        self.ids.scatter_(1, places, torch.where(is_kept, tokens, self.ids.gather(1, places)))
        self.seen.scatter_(1, torch.where(slots <= accepted[:, None], window, window[:, :1]), True)
        self.anchor += torch.where(self.is_running, accepted + 1, 0)


def _draw(weights: Tensor) -> Tensor:
    """One id per row of non-negative weights [R, n], never one of weight zero."""
    return torch.multinomial(weights, 1)[:, 0]
