"""Acceptance in torch, one request after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkchat.kernels.sampling import GREEDY_BELOW, DrawSettings, Laws
from sparkchat.kernels.sampling.reference import ACCEPT, NEXT, draw_reference, laws_reference, uniforms_reference

if TYPE_CHECKING:
    from sparkchat.kernels.accept import AcceptBuffers

RESIDUAL_FLOOR = 1e-8
"""A residual of at most this mass is rounding noise; p itself is drawn from instead."""


def accept_block_reference(
    logits: Tensor,
    starts: Tensor,
    verify_lens: Tensor,
    settings: DrawSettings,
    buffers: AcceptBuffers,
    drafts: Tensor | None,
    draft_laws: Laws | None,
    draft_index: Tensor | None,
    target_to_draft: Tensor | None,
    caps: Tensor | None,
    chance: Tensor | None = None,
) -> None:
    """See ``accept_block``."""
    bounds, width = starts.tolist(), buffers.p_draft.shape[1]
    owner = torch.repeat_interleave(torch.arange(len(bounds) - 1), torch.tensor(bounds).diff())
    rows = slice(0, bounds[-1])
    laws_reference(logits[rows], owner, settings, buffers.laws, rows)
    laws = Laws(logits[rows], *(getattr(buffers.laws, n)[rows] for n in ("peak", "temperature", "least", "scale")),
                buffers.laws.last_tie[rows])  # fmt: skip
    p = laws.probabilities()
    q = None if draft_laws is None else draft_laws.probabilities().view(len(bounds) - 1, width, -1)
    u_accept, u_next = (uniforms_reference(settings, width + extra, kind) for extra, kind in ((0, ACCEPT), (1, NEXT)))
    buffers.ranks.zero_()
    for r, (first, stop) in enumerate(pairwise(bounds)):
        if stop <= first:
            _store(buffers, r, 0, 0, -1, None)
            buffers.damaged[r] = 0
            continue
        lens = 0 if drafts is None else min(int(verify_lens[r]), width)
        is_greedy = float(settings.temperature[r]) < GREEDY_BELOW
        full, passing = 0, True
        buffers.p_draft[r], buffers.p_target[r] = torch.nan, torch.nan
        for i in range(lens):
            assert drafts is not None and draft_index is not None and q is not None
            token = int(drafts[r, i])
            p_x = float(p[first + i, token])
            q_x = 1.0 if is_greedy else float(q[r, i, int(draft_index[r, i])])
            buffers.p_draft[r, i], buffers.p_target[r, i] = q_x, p_x
            u = float(u_accept[r, i])
            passing = passing and (q_x > 0 and u * q_x < p_x if chance is None else u < float(chance[r, i]))
            full += passing
        limit = lens if caps is None else min(lens, int(caps[r]))
        taken = min(full, limit)
        row = first + taken
        buffers.damaged[r] = int(bool(laws.peak[first : row + 1].isnan().any()))
        weights = p[row]
        if taken < lens and not is_greedy and chance is None:
            assert q is not None
            weights = _residual(p[row], q[r, taken], target_to_draft)
        if is_greedy:
            token = int(laws.last_tie[row])
        else:
            token = int(draw_reference(weights[None], u_next[r, taken : taken + 1]))
        if full > taken:
            assert drafts is not None
            token = int(drafts[r, taken])
        if full < lens:
            assert drafts is not None
            z = logits[first + full]
            buffers.ranks[r, 0] = (z > z[drafts[r, full]]).sum()
        _store(buffers, r, taken, full, 0 if buffers.damaged[r] else token, drafts)


def _residual(p: Tensor, q: Tensor, target_to_draft: Tensor | None) -> Tensor:
    if target_to_draft is not None:
        known = target_to_draft >= 0
        q = torch.where(known, q[target_to_draft.clamp(min=0).long()], 0.0)
    rest = (p - q).clamp(min=0.0)
    return rest if float(rest.sum()) > RESIDUAL_FLOOR else p


def _store(buffers: AcceptBuffers, r: int, taken: int, full: int, token: int, drafts: Tensor | None) -> None:
    buffers.accepted_len[r], buffers.full_len[r], buffers.next_ids[r] = taken, full, token
    buffers.tokens[r] = -1
    if taken:
        assert drafts is not None
        buffers.tokens[r, :taken] = drafts[r, :taken]
    buffers.tokens[r, taken] = token
