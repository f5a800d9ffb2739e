"""The decode step as two stages that ask the host nothing: draft; then plan, verify, accept, commit.

Every stage reads ``StepInputs`` and ``Seats`` and leaves its results in static tensors, so that it may be run as it is
or captured once and replayed. Rows of a verification are packed: request r has verify_len[r] + 1 of them, requests
stand side by side, and rows behind the last one belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparkchat.engine import sampling
from sparkchat.engine.acceptance import Acceptance, Proposal, accept
from sparkchat.engine.captured.allocation import allocate, survival_of
from sparkchat.engine.captured.laws import Draws, row_laws
from sparkchat.engine.captured.state import CAP, COMPACT, SHARED, Block, Records, Seats, StepInputs
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.sampling import GREEDY_BELOW
from sparkchat.engine.simulated import spread_chances
from sparkchat.models.rows import RowBatch


@dataclass
class CapturedStep:
    """The stages, over a pair with filled caches. ``spare_row`` and ``spare_draft_row`` take rows of nobody."""

    pair: LoadedPair
    seats: Seats
    inputs: StepInputs
    block: Block
    records: Records
    spare_row: int
    spare_draft_row: int
    temperatures: Tensor
    """[g] float64 of the confidences"""
    exponents: Tensor | None
    """[g] float64 of a simulated profile"""
    agree: Callable[[], None] | None = None
    """Makes seats, inputs and block those of rank 0, where ranks share the pair; every stage begins with it."""
    width: int = field(init=False)
    draws_on_device: ClassVar[bool] = False
    """Random numbers are made where they are used, and one kind of step serves greedy and sampled requests alike."""

    def __post_init__(self) -> None:
        self.width = self.inputs.block

    @torch.inference_mode()
    def draft(self, count: int, draws: Draws) -> None:
        """Draft a block for each of the first ``count`` seats."""
        if self.agree is not None:
            self.agree()
        drafter, seats, g = self.pair.drafter, self.seats, self.width
        assert drafter is not None
        rows = self._block_rows(count, drafter.config.mask_token_id)
        hidden = drafter.draft_rows(rows, self.pair.draft_cache).view(count, g, -1)
        base = drafter.base_logits(hidden.flatten(0, 1)).view(count, g, -1)
        uniforms, _, _, simulated = self.inputs.uniforms(count)
        previous, state = seats.anchor[:count], drafter.initial_state(count)
        before, peaks = [], []
        for k in range(g):
            before.append(previous)
            bias, state = drafter.markov_step(previous, hidden[:, k], state)
            logits = base[:, k] + bias
            peaks.append(logits.amax(dim=1))
            logits = logits.nan_to_num(nan=0.0, posinf=1e30, neginf=-1e30)
            chosen, law = self._drawn(logits, uniforms[:, k], count, draws)
            if law is not None and self.block.laws is not None:
                self.block.laws[:count, k] = law
            previous = chosen if drafter.draft_to_target is None else drafter.draft_to_target[chosen]
            self.block.ids[:count, k] = previous
            self.block.index[:count, k] = chosen
        self.block.is_sound[:count] = torch.stack(peaks).isfinite().all(dim=0)
        if drafter.has_confidence:
            logits = drafter.confidence(torch.stack(before, dim=1).flatten(), hidden.flatten(0, 1))
            self.block.confidence[:count] = logits.view(count, g)
        if self.exponents is not None:
            chance = spread_chances(self.exponents, simulated)
            self.block.chance[:count] = chance
            self.block.confidence[:count] = torch.logit(chance).float()

    @torch.inference_mode()
    def verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        """Plan, run ``num_rows`` packed rows through the target, accept, and commit for all seats that have some.

        ``shares``: some requests settle a budget between them by this step's confidences.
        """
        if self.agree is not None:
            self.agree()
        count = min(num_rows, self.inputs.seats)
        drafted, verify_lens, caps, starts = self._plan(count, num_rows, shares)
        rows, owner, is_real, draft_rows = self._pack(count, num_rows, starts)
        hidden, features = self.pair.target.decode_rows(rows, self.pair.cache, self.pair.tap_layers)
        logits = self.pair.target.logits(hidden)
        accepted, is_bad = self._accept(logits, owner, starts, drafted, verify_lens, caps, draws)
        self._record(count, logits, is_bad & is_real, starts, verify_lens, accepted)
        self._commit(count, starts, accepted)
        if features is not None and self.pair.drafter is not None:
            handed = replace(rows, cache_rows=draft_rows)
            self.pair.drafter.store_rows(features, handed, self.pair.draft_cache)

    def _block_rows(self, count: int, mask: int) -> RowBatch:
        """[anchor, mask, ...] of every request; rows of a block see its drafted length of it.

        A block of nobody is a copy of the last request's, or stands in the spare row where there is no request.
        """
        seats, device = self.seats, self.seats.anchor.device
        place = torch.arange(self.width, device=device)
        drafted, _, _, num_requests, _ = self.inputs.whole(count)
        seat = torch.minimum(torch.arange(count, device=device), (num_requests - 1).clamp(min=0))
        start, drafted = seats.kv_len[seat, None], drafted[seat, None]
        rows = torch.where(num_requests > 0, seats.draft_row[seat], self.spare_draft_row)
        return RowBatch(
            token_ids=torch.where(place == 0, seats.anchor[seat, None], mask).flatten(),
            positions=(start + place).flatten(),
            # Repeated, not expanded: of one request, flattened, that stays a view of one number.
            cache_rows=rows[:, None].repeat(1, self.width).flatten(),
            ends=(start + drafted).clamp(min=1).repeat(1, self.width).flatten(),
            starts=torch.arange(count + 1, dtype=torch.int32, device=device) * self.width,
            spare_row=self.spare_draft_row,
        )

    def _drawn(self, logits: Tensor, u: Tensor, count: int, draws: Draws) -> tuple[Tensor, Tensor | None]:
        """One draft [R] from logits [R, Vd], and the law it was drawn from."""
        s = self.seats
        settings = (s.temperature[:count], s.top_k[:count], s.top_p[:count], s.min_p[:count])
        law = row_laws(logits, *settings, draws)
        best = sampling.argmax_ids(logits)
        if law is None:
            return best, None
        return torch.where(s.temperature[:count] < GREEDY_BELOW, best, sampling.draw(law, u)), law

    def _plan(self, count: int, num_rows: int, shares: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Drafted, verified and most committed drafts [R], and where each request's rows begin [R+1]."""
        drafted, planned, kind, num_requests, budget = self.inputs.whole(count)
        limits = torch.minimum(drafted, (self.seats.remaining[:count] - 1).clamp(min=0))
        if shares:
            survival = survival_of(self.block.confidence[:count], self.temperatures)
            planned = torch.where(planned == SHARED, allocate(survival, limits, planned == SHARED, budget), planned)
        planned = torch.minimum(planned, limits)
        verify_lens = torch.where(kind == COMPACT, planned, drafted)
        caps = torch.where(kind == CAP, planned, verify_lens)
        is_active = torch.arange(count, device=drafted.device) < num_requests
        num_rows_each = torch.where(is_active, verify_lens + 1, 0)
        starts = torch.cat([num_requests * 0, num_rows_each.cumsum(0)])
        return drafted, verify_lens, caps, starts.clamp(max=num_rows)

    def _pack(self, count: int, num_rows: int, starts: Tensor) -> tuple[RowBatch, Tensor, Tensor, Tensor]:
        """The rows; the seat of each [N]; which of them are somebody's [N]; their rows in the drafter's cache [N]."""
        seats, device = self.seats, starts.device
        index = torch.arange(num_rows, device=device)
        owner = torch.searchsorted(starts[1:].contiguous(), index, right=True)
        is_real, owner = owner < count, owner.clamp(max=count - 1)
        offset = torch.where(is_real, index - starts[owner], 0)
        tokens = seats.anchor[owner]
        if self.width:
            draft = self.block.ids[owner, (offset - 1).clamp(min=0, max=self.width - 1)]
            tokens = torch.where(offset > 0, draft, tokens)
        positions = torch.where(is_real, seats.kv_len[owner] + offset, 0)
        rows = RowBatch(
            token_ids=tokens,
            positions=positions,
            cache_rows=torch.where(is_real, seats.cache_row[owner], self.spare_row),
            ends=positions + 1,
            starts=starts.int(),
            spare_row=self.spare_row,
        )
        return rows, owner, is_real, torch.where(is_real, seats.draft_row[owner], self.spare_draft_row)

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
        """The outcome of every request, and which rows of logits [N, V] are not of numbers."""
        s, count = self.seats, len(drafted)
        is_bad = ~logits.amax(dim=1).isfinite()
        logits = torch.where(is_bad[:, None], 0.0, logits)
        law = row_laws(logits, s.temperature[owner], s.top_k[owner], s.top_p[owner], s.min_p[owner], draws)
        proposal = None
        if self.width:
            places = torch.arange(self.width, device=drafted.device) < drafted[:, None]
            proposal = Proposal(
                ids=torch.where(places, self.block.ids[:count], -1),
                lens=drafted,
                probs=None if law is None or self.block.laws is None else self.block.laws[:count],
                draft_index=self.block.index[:count],
                draft_to_target=None if self.pair.drafter is None else self.pair.drafter.draft_to_target,
                chance=None if self.exponents is None else self.block.chance[:count],
            )
        _, u_accept, u_next, _ = self.inputs.uniforms(count)
        accepted = accept(
            law,
            starts[:-1].clamp(max=len(logits) - 1),
            verify_lens,
            proposal,
            u_accept,
            u_next,
            caps,
            greedy=s.temperature[:count] < GREEDY_BELOW,
            target_argmax=sampling.argmax_ids(logits),
        )
        return accepted, is_bad

    def _record(
        self, count: int, logits: Tensor, is_bad: Tensor, starts: Tensor, verify_lens: Tensor, accepted: Acceptance
    ) -> None:
        """What the host is told: see ``Records``."""
        g, first = self.width, starts[:-1].clamp(max=len(logits) - 1)
        place = torch.arange(g + 1, device=starts.device)
        rows = (first[:, None] + place).clamp(max=len(logits) - 1)
        damaged = is_bad[rows] & (place <= verify_lens[:, None])
        rank = torch.zeros_like(first)
        if g:
            refused = self.block.ids[:count].gather(1, accepted.full_accepted_len.clamp(max=g - 1)[:, None])
            row = logits[(first + accepted.full_accepted_len).clamp(max=len(logits) - 1)]
            rank = (row > row.gather(1, refused)).sum(dim=1) + 1
        nothing = torch.full_like(accepted.p_draft, torch.nan)[:, :0]
        self.records.write(
            {
                "taken": accepted.accepted_len,
                "full": accepted.full_accepted_len,
                "next_id": accepted.next_ids,
                "verify_len": verify_lens,
                "is_draft_sound": self.block.is_sound[:count],
                "damaged_from": torch.where(damaged.any(dim=1), damaged.int().argmax(dim=1), g + 1),
                "target_rank": rank,
            },
            {
                "ids": self.block.ids[:count],
                "confidence": self.block.confidence[:count],
                "p_draft": accepted.p_draft if g else nothing,
                "p_target": accepted.p_target if g else nothing,
            },
        )

    def _commit(self, count: int, starts: Tensor, accepted: Acceptance) -> None:
        """The anchor and the lengths of the next round; seats without rows stay as they are."""
        seats, has_rows = self.seats, starts[1:] > starts[:-1]
        kept = torch.where(has_rows, accepted.accepted_len + 1, 0)
        seats.anchor[:count] = torch.where(has_rows, accepted.next_ids, seats.anchor[:count])
        seats.kv_len[:count] += kept
        seats.rounds[:count] += has_rows
        seats.remaining[:count] -= kept
