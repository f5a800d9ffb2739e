"""The step of a model whose layers are its own affair: its heads, draws and acceptance by ``sparkchat.kernels``.

What ``FusedStep`` is for dense models, without that their layers, embedding or output head are known here: rows go
through ``decode_rows`` and ``draft_rows``, base logits through ``base_logits``. Over ranks every one of them has the
whole of the sequential head, so that a block is drawn without a word between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparkchat.engine.captured.fused_step import FusedStep, batch_of
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.simulated import spread_chances
from sparkchat.kernels.markov import markov_block
from sparkchat.kernels.seats import PackedRows, enter_block, enter_rows, settle
from sparkchat.models.rows import RowBatch


@dataclass
class HeadStep(FusedStep):
    """As ``CapturedStep``; plan, draft, acceptance and record are a launch or two each."""

    _ids: Tensor = field(init=False)
    """[V, 1] float32: every token's row is its id, which float32 holds: what rows are entered with is what they are"""

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab = self.pair.target.config.vocab_size
        self._ids = torch.arange(vocab, dtype=torch.float32, device=self.pair.device).unsqueeze(1)

    @torch.inference_mode()
    def draft(self, count: int, draws: Draws) -> None:
        if self.agree is not None:
            self.agree()
        drafter, g = self.pair.drafter, self.width
        assert drafter is not None
        hidden = drafter.draft_rows(self._blocks(count, drafter.config.mask_token_id), self.pair.draft_cache)
        hidden = hidden.view(count, g, -1)
        if self._weights is None:
            self._draft_in_turn(hidden, count, draws)
        else:
            self._draft_at_once(hidden, count, draws)
        if self._enters:
            return
        self.block.is_sound[:count] = ~self._laws.peak.view(-1, g)[:count].isnan().any(dim=1)
        if self.exponents is not None:
            chance = spread_chances(self.exponents, self.inputs.uniforms(count)[3])
            self.block.chance[:count] = chance
            self.block.confidence[:count] = torch.logit(chance).float()

    def _draft_at_once(self, hidden: Tensor, count: int, draws: Draws) -> None:
        """From hidden rows [R, g, d] of whole blocks."""
        base, weights, drafter = self._base[:count], self._weights, self.pair.drafter
        assert weights is not None and drafter is not None
        base.view(count * self.width, -1).copy_(drafter.base_logits(hidden.flatten(0, 1)))
        markov_block(
            base,
            weights.w1,
            weights.w2,
            self.seats.anchor[:count],
            self._settings(count),
            self._markov(count, draws),
            hidden=hidden,
            confidence=None if self.exponents is not None else weights.confidence,
        )

    def _draft_in_turn(self, hidden: Tensor, count: int, draws: Draws) -> None:
        """Where a draft is known only behind the one before: hidden [R, g, d], of which the first rows count."""
        base, drafter = self._base[:count], self.pair.drafter
        assert drafter is not None
        base[:, 0] = drafter.base_logits(hidden[:, 0])
        state = drafter.initial_state(count)

        def fill(k: int, previous: Tensor) -> None:
            nonlocal state
            logits, state = drafter.markov_step(previous, hidden[:, k], state)
            if k:
                base[:, k] = logits

        markov_block(
            base, None, None, self.seats.anchor[:count], self._settings(count), self._markov(count, draws), fill=fill
        )

    def _blocks(self, count: int, mask: int) -> RowBatch:
        if not self._enters:
            return self._block_rows(count, mask)
        packed = PackedRows.empty(count, count * self.width, 1, self.pair.device, has_ids=True)
        enter_block(self.inputs, self.seats, self._ids, mask, packed, self.block, self.spare_draft_row, self.exponents)
        return _named(packed, packed.cache_rows, self.spare_draft_row)

    @torch.inference_mode()
    def verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        if not self._enters:
            CapturedStep.verify(self, num_rows, draws, shares)
            return
        if self.agree is not None:
            self.agree()
        pair, count = self.pair, min(num_rows, self.inputs.seats)
        packed = PackedRows.empty(count, num_rows, 1, pair.device, has_ids=True)
        planned = self._shared_lens(count) if shares else None
        enter_rows(
            self.inputs, self.seats, self._ids, packed, self.block, self.spare_row, self.spare_draft_row, planned
        )
        rows = _named(packed, packed.cache_rows, self.spare_row)
        hidden, features = pair.target.decode_rows(rows, pair.cache, pair.tap_layers)
        buffers = self._accepted(pair.target.logits(hidden), packed.starts, packed.verify_lens, packed.caps, draws)
        laws = self._laws_of(count) if self.width else None
        settle(self.inputs, self.seats, packed, buffers, self.block, laws, self.records.device_rows)
        if features is not None and pair.drafter is not None:
            handed = _named(packed, packed.draft_rows, self.spare_draft_row)
            pair.drafter.store_rows(features, handed, pair.draft_cache)


def _named(packed: PackedRows, cache_rows: Tensor, spare_row: int) -> RowBatch:
    """Rows with their tokens' ids."""
    return replace(batch_of(packed, cache_rows, spare_row), token_ids=packed.x[:, 0])
