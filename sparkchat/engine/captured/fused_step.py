"""The step by the kernels of ``sparkchat.kernels``: laws are numbers beside logits and are never written out.

Draft and acceptance are one call each. The numbers drawn are those of ``CapturedStep``, because the kernels compute
those of ``engine/rng.py`` from seed and round. On a GPU the plan, the packing and the records are kernels as well: as
torch's operations they are a hundred launches. Elsewhere they are ``CapturedStep``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparkchat.engine.acceptance import Acceptance
from sparkchat.engine.captured.allocation import allocate, survival_of
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.state import SHARED
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.simulated import spread_chances
from sparkchat.kernels.accept import AcceptBuffers, accept_block
from sparkchat.kernels.gemm import small_gemm
from sparkchat.kernels.markov import MarkovBuffers, markov_block
from sparkchat.kernels.planner import plan_lengths
from sparkchat.kernels.sampling import DrawSettings, Laws, LawScratch, NearScratch
from sparkchat.kernels.seats import PackedRows, enter_block, enter_rows, limit, settle
from sparkchat.models.dspark.drafter import BlockWeights
from sparkchat.models.fused import MOST_SMALL_ROWS
from sparkchat.models.linear import PlainLinear
from sparkchat.models.rows import RowBatch

MOST_PLANNED, WIDEST_PLANNED = 256, 16
"""Requests, and drafts of each, that the planner's kernel sorts."""
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
    _accepting: dict[tuple[int, int, bool], AcceptBuffers] = field(init=False)
    _target_to_draft: Tensor | None = field(init=False)
    _weights: BlockWeights | None = field(init=False)
    """Of the drafter's heads, put together once: kernels may read weights before those ahead of them have ended"""

    _enters: bool = field(init=False)
    """Rows enter, and records leave, by kernels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._enters = self.pair.device.type == "cuda"
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
        rows, x = self._entered_block(count)
        hidden = drafter.draft_rows(rows, self.pair.draft_cache, x)
        base = self._base[:count]
        if hidden.shape[0] <= MOST_SMALL_ROWS:
            linear = weights.base
            small_gemm(
                hidden.to(linear.dtype), linear.weight, base.view(count * g, -1), scales=linear.scales, bias=linear.bias
            )
        else:
            weights.base.write_floats(hidden.to(weights.base.dtype), base.view(count * g, -1))
        # Simulated chances take the place of confidences; where rows entered by a kernel, it wrote both.
        markov_block(
            base,
            weights.w1,
            weights.w2,
            self.seats.anchor[:count],
            self._settings(count),
            self._markov(count, draws),
            draft_to_target=drafter.draft_to_target,
            hidden=hidden.view(count, g, -1),
            confidence=None if self.exponents is not None else weights.confidence,
        )
        if self._enters:
            return
        self.block.is_sound[:count] = ~self._laws.peak.view(-1, g)[:count].isnan().any(dim=1)
        if self.exponents is not None:
            chance = spread_chances(self.exponents, self.inputs.uniforms(count)[3])
            self.block.chance[:count] = chance
            self.block.confidence[:count] = torch.logit(chance).float()

    def _entered_block(self, count: int) -> tuple[RowBatch, Tensor | None]:
        drafter, device = self.pair.drafter, self.pair.device
        assert drafter is not None
        mask, table = drafter.config.mask_token_id, drafter.embedding.table
        if not self._enters:
            return self._block_rows(count, mask), None
        packed = PackedRows.empty(count, count * self.width, table.shape[1], device)
        enter_block(self.inputs, self.seats, table, mask, packed, self.block, self.spare_draft_row, self.exponents)
        return batch_of(packed, packed.cache_rows, self.spare_draft_row), packed.x

    @torch.inference_mode()
    def verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        if not self._enters:
            super().verify(num_rows, draws, shares)
            return
        pair, count = self.pair, min(num_rows, self.inputs.seats)
        table = pair.target.embedding.table
        packed = PackedRows.empty(count, num_rows, table.shape[1], pair.device)
        planned = self._shared_lens(count) if shares else None
        enter_rows(self.inputs, self.seats, table, packed, self.block, self.spare_row, self.spare_draft_row, planned)
        rows = batch_of(packed, packed.cache_rows, self.spare_row)
        hidden, features = pair.target.fused.run(packed.x, rows, pair.tap_layers)
        logits = pair.target.logits(hidden)
        buffers = self._accepted(logits, packed.starts, packed.verify_lens, packed.caps, draws)
        laws = self._laws_of(count) if self.width else None
        settle(self.inputs, self.seats, packed, buffers, self.block, laws, self.records.device_rows)
        if features is not None and pair.drafter is not None:
            handed = batch_of(packed, packed.draft_rows, self.spare_draft_row)
            pair.drafter.store_rows(features, handed, pair.draft_cache)

    def _shared_lens(self, count: int) -> Tensor:
        """[R] int32 verify lengths of the requests that share a budget, by this step's confidences."""
        if count > MOST_PLANNED or self.width > WIDEST_PLANNED:
            drafted, planned, _, _, shared = self.inputs.whole(count)
            most = torch.minimum(drafted, (self.seats.remaining[:count] - 1).clamp(min=0))
            survival = survival_of(self.block.confidence[:count], self.temperatures)
            return allocate(survival, most, planned == SHARED, shared).int()
        limits, budget, lens = (torch.empty(n, dtype=torch.int32, device=self.pair.device) for n in (count, 1, count))
        limit(self.inputs, self.seats.remaining, limits, budget)
        plan_lengths(self.block.confidence[:count], self.temperatures, limits, self.temperatures, lens, budget=budget)
        return lens

    def _settings(self, count: int) -> DrawSettings:
        s = self.seats
        values = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.rounds)
        return DrawSettings(*(value[:count] for value in values))

    def _laws_of(self, count: int) -> Laws:
        laws, rows = self._laws, count * self.width
        numbers = (laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie)
        return Laws(laws.logits[:rows], *(values[:rows] for values in numbers))

    def _markov(self, count: int, draws: Draws = Draws.SAMPLED) -> MarkovBuffers:
        if draws is Draws.FILTERED and self._scratch.near is None:
            # Made when such a block is first run, which is before it is captured.
            seats, vocab, device = self._base.shape[0], self._base.shape[2], self._base.device
            self._scratch = replace(self._scratch, near=NearScratch.empty(seats, vocab, device))
        scratch = self._scratch.first(count)
        return MarkovBuffers(
            self.block.ids[:count],
            self.block.index[:count],
            self._laws_of(count),
            self.block.confidence[:count],
            scratch if draws is Draws.FILTERED else replace(scratch, near=None),
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
        buffers = self._accepted(logits, starts.int(), verify_lens.int(), caps.int(), draws)
        taken, full, next_ids = buffers.accepted_len.long(), buffers.full_len.long(), buffers.next_ids.clamp(min=0)
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

    def _accepted(
        self, logits: Tensor, starts: Tensor, verify_lens: Tensor, caps: Tensor, draws: Draws = Draws.SAMPLED
    ) -> AcceptBuffers:
        count, g = starts.shape[0] - 1, self.width
        buffers = self._buffers(logits, count, draws is Draws.FILTERED)
        accept_block(
            logits,
            starts,
            verify_lens,
            self._settings(count),
            buffers,
            drafts=self.block.ids[:count] if g else None,
            draft_laws=self._laws_of(count) if g else None,
            draft_index=self.block.index[:count] if g else None,
            target_to_draft=self._target_to_draft,
            caps=caps if g else None,
            chance=None if self.exponents is None or not g else self.block.chance[:count],
        )
        return buffers

    def _drawn_with(self, count: int, drafted: Tensor) -> Tensor:
        """[R, g] q of every draft, tested or not; NaN where nothing was drafted."""
        laws, g = self._laws_of(count), self.width
        peak, temperature, scale = (v.view(count, g) for v in (laws.peak, laws.temperature, laws.scale))
        logits = self._base[:count].gather(2, self.block.index[:count, :, None])[..., 0]
        q = torch.exp((logits - peak) / temperature) * scale
        return torch.where(torch.arange(g, device=q.device) < drafted[:, None], q, torch.nan)

    def _buffers(self, logits: Tensor, count: int, has_filters: bool) -> AcceptBuffers:
        """Made when a shape is first run, which is before it is captured; the logits of a shape may lie elsewhere."""
        key = (len(logits), count, has_filters)
        if key not in self._accepting:
            self._accepting[key] = AcceptBuffers.empty(logits, count, self.width, has_filters)
        buffers = self._accepting[key]
        laws = buffers.laws
        numbers = (laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie)
        return AcceptBuffers(
            **{name: getattr(buffers, name) for name in AcceptBuffers.__dataclass_fields__ if name != "laws"},
            laws=Laws(logits, *numbers),
        )


def batch_of(packed: PackedRows, cache_rows: Tensor, spare_row: int) -> RowBatch:
    """What the layers read of rows that are embedded already."""
    return RowBatch(
        token_ids=packed.positions,
        positions=packed.positions,
        cache_rows=cache_rows,
        ends=packed.ends,
        starts=packed.starts,
        spare_row=spare_row,
    )
