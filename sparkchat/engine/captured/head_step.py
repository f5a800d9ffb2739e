"""The step of a model whose layers are its own affair: its heads, draws and acceptance by ``sparkchat.kernels``.

What ``FusedStep`` is for dense models, without that their layers, embedding or output head are known here: rows go
through ``decode_rows`` and ``draft_rows``, base logits through ``base_logits``. Over ranks every one of them has the
whole of the sequential head, so that a block is drawn without a word between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkchat.engine.captured.fused_step import FusedStep
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.simulated import spread_chances
from sparkchat.kernels.markov import markov_block


def can_fuse_heads(pair: LoadedPair) -> bool:
    """Whether the kernels draw the blocks of this pair: they do where a block's base logits precede its tokens."""
    return pair.drafter is None or hasattr(type(pair.drafter), "block_weights")


@dataclass
class HeadStep(FusedStep):
    """As ``CapturedStep``; draft and acceptance are one call of the kernels each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._enters = False

    @torch.inference_mode()
    def draft(self, count: int, draws: Draws) -> None:
        if self.agree is not None:
            self.agree()
        drafter, g, weights = self.pair.drafter, self.width, self._weights
        assert drafter is not None and weights is not None
        hidden = drafter.draft_rows(self._block_rows(count, drafter.config.mask_token_id), self.pair.draft_cache)
        base = self._base[:count]
        base.view(count * g, -1).copy_(drafter.base_logits(hidden))
        markov_block(
            base,
            weights.w1,
            weights.w2,
            self.seats.anchor[:count],
            self._settings(count),
            self._markov(count),
            hidden=hidden.view(count, g, -1),
            confidence=None if self.chances is not None else weights.confidence,
        )
        self.block.is_sound[:count] = ~self._laws.peak.view(-1, g)[:count].isnan().any(dim=1)
        if self.chances is not None:
            chance = spread_chances(self.chances, self.inputs.uniforms(count)[3])
            self.block.chance[:count] = chance
            self.block.confidence[:count] = torch.logit(chance).float()

    @torch.inference_mode()
    def verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        CapturedStep.verify(self, num_rows, draws, shares)
