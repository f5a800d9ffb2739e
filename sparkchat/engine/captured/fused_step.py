"""The step by the kernels of ``sparkchat.kernels``: laws are numbers beside logits and are never written out.

The plan, the packing and the records are those of ``CapturedStep``; draft and acceptance are one call each. The numbers
drawn are the same, because the kernels compute those of ``engine/rng.py`` from seed and round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparkchat.engine.acceptance import Acceptance
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.simulated import spread_chances
from sparkchat.kernels.accept import AcceptBuffers, accept_block
from sparkchat.kernels.gemm import small_gemm
from sparkchat.kernels.markov import MarkovBuffers, markov_block
from sparkchat.kernels.sampling import DrawSettings, Laws, LawScratch
from sparkchat.models.dspark.drafter import BlockWeights
from sparkchat.models.fused import MOST_SMALL_ROWS
from sparkchat.models.linear import PlainLinear

MOST_GROUP = 32
"""Query heads of a key head that the attention kernel takes; and head sizes are powers of two."""


def can_fuse(pair: LoadedPair) -> bool:
    """Whether the kernels compute everything that this pair needs."""
    shapes = [pair.target.stack.shape]
    linears = [layer.qkv for layer in pair.target.stack.layers] + [pair.target.head]
    if pair.drafter is not None:
        weights = pair.drafter.block_weights
        if weights is None:
            return False
        linears.append(weights.base)
        shapes.append(pair.drafter.config.decoder)
    if any(s.group_size > MOST_GROUP or s.head_dim & (s.head_dim - 1) for s in shapes):
        return False
    return all(isinstance(linear, PlainLinear) for linear in linears)


@dataclass
class FusedStep(CapturedStep):
    """As ``CapturedStep``, over a pair whose models were fused."""

    draws_on_device: ClassVar[bool] = True
    _base: Tensor = field(init=False)
    """[S, g, Vd] float32 logits of the block, its bias added by the draft"""
    _laws: Laws = field(init=False)
    """S * g rows: what the drafts were drawn from"""
    _scratch: LawScratch = field(init=False)
    _accepting: dict[tuple[int, int], AcceptBuffers] = field(init=False)
    _target_to_draft: Tensor | None = field(init=False)
    _weights: BlockWeights | None = field(init=False)
    """Of the drafter's heads, put together once: kernels may read weights before those ahead of them have ended"""

    def __post_init__(self) -> None:
        super().__post_init__()
        drafter, seats, device = self.pair.drafter, self.inputs.seats, self.pair.device
        vocab = 1 if drafter is None else drafter.config.draft_vocab_size
        self._base = torch.zeros((seats, self.width, vocab), dtype=torch.float32, device=device)
        self._laws = Laws.empty(self._base.view(-1, vocab))
        self._scratch = LawScratch.empty(seats, vocab, device)
        self._accepting = {}
        self._weights = None if drafter is None else drafter.block_weights
        table = self.pair.draft_index_of
        self._target_to_draft = None if table is None else table.int()

    @torch.inference_mode()
    def draft(self, count: int, draws: Draws) -> None:
        drafter, g = self.pair.drafter, self.width
        assert drafter is not None
        weights = self._weights
        assert weights is not None
        hidden = drafter.draft_rows(self._block_rows(count, drafter.config.mask_token_id), self.pair.draft_cache)
        base = self._base[:count]
        if hidden.shape[0] <= MOST_SMALL_ROWS:
            linear = weights.base
            small_gemm(
                hidden.to(linear.dtype), linear.weight, base.view(count * g, -1), scales=linear.scales, bias=linear.bias
            )
        else:
            base.view(count * g, -1).copy_(weights.base(hidden.to(weights.base.dtype)))
        markov_block(
            base,
            weights.w1,
            weights.w2,
            self.seats.anchor[:count],
            self._settings(count),
            self._markov(count),
            draft_to_target=drafter.draft_to_target,
            hidden=hidden.view(count, g, -1),
            confidence=weights.confidence,
        )
        self.block.is_sound[:count] = ~self._laws.peak.view(-1, g)[:count].isnan().any(dim=1)
        if self.chances is not None:
            chance = spread_chances(self.chances, self.inputs.uniforms(count)[3])
            self.block.chance[:count] = chance
            self.block.confidence[:count] = torch.logit(chance).float()

    def _settings(self, count: int) -> DrawSettings:
        s = self.seats
        values = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.rounds)
        return DrawSettings(*(value[:count] for value in values))

    def _laws_of(self, count: int) -> Laws:
        laws, rows = self._laws, count * self.width
        numbers = (laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie)
        return Laws(laws.logits[:rows], *(values[:rows] for values in numbers))

    def _markov(self, count: int) -> MarkovBuffers:
        scratch = self._scratch
        return MarkovBuffers(
            self.block.ids[:count],
            self.block.index[:count],
            self._laws_of(count),
            self.block.confidence[:count],
            LawScratch(scratch.block_max[:count], scratch.block_sum[:count], scratch.entries[:count]),
        )

    def _accept(
        self,
        logits: Tensor,
        owner: Tensor,
        starts: Tensor,
        drafted: Tensor,
        verify_lens: Tensor,
        caps: Tensor,
        draws: Draws,
    ) -> tuple[Acceptance, Tensor]:
        count, g = len(drafted), self.width
        buffers = self._buffers(logits, count)
        accept_block(
            logits,
            starts.int(),
            verify_lens.int(),
            self._settings(count),
            buffers,
            drafts=self.block.ids[:count] if g else None,
            draft_laws=self._laws_of(count) if g else None,
            draft_index=self.block.index[:count] if g else None,
            target_to_draft=self._target_to_draft,
            caps=caps.int() if g else None,
        )
        taken, full, next_ids = buffers.accepted_len.long(), buffers.full_len.long(), buffers.next_ids.clamp(min=0)
        if self.chances is not None:
            place = torch.arange(g, device=logits.device)
            passed = (self.inputs.uniforms(count)[1] < self.block.chance[:count]) & (place < verify_lens[:, None])
            full = passed.long().cumprod(dim=1).sum(dim=1)
            taken = torch.minimum(full, caps)
        accepted = Acceptance(
            accepted_len=taken,
            full_accepted_len=full,
            next_ids=next_ids,
            is_bonus=taken == caps,
            next_is_draft=full > taken,
            p_draft=self._drawn_with(count, drafted) if g else buffers.p_draft,
            p_target=buffers.p_target,
        )
        return accepted, buffers.laws.peak.isnan()

    def _drawn_with(self, count: int, drafted: Tensor) -> Tensor:
        """[R, g] q of every draft, tested or not; NaN where nothing was drafted."""
        laws, g = self._laws_of(count), self.width
        peak, temperature, scale = (v.view(count, g) for v in (laws.peak, laws.temperature, laws.scale))
        logits = self._base[:count].gather(2, self.block.index[:count, :, None])[..., 0]
        q = torch.exp((logits - peak) / temperature) * scale
        return torch.where(torch.arange(g, device=q.device) < drafted[:, None], q, torch.nan)

    def _buffers(self, logits: Tensor, count: int) -> AcceptBuffers:
        """Made when a shape is first run, which is before it is captured; the logits of a shape may lie elsewhere."""
        key = (len(logits), count)
        if key not in self._accepting:
            self._accepting[key] = AcceptBuffers.empty(logits, count, self.width)
        buffers = self._accepting[key]
        laws = buffers.laws
        numbers = (laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie)
        return AcceptBuffers(
            **{name: getattr(buffers, name) for name in AcceptBuffers.__dataclass_fields__ if name != "laws"},
            laws=Laws(logits, *numbers),
        )
