"""Which drafts survive, and the token after them: the rule that keeps the output law the target's.

Draft x_i is accepted iff u * q(x_i) < p(x_i) (strict), with p and q the fp32 laws of that position; the first
rejection is replaced by a draw from normalise(max(p - q, 0)); a run without rejection ends in a plain draw from p,
also when further tokens were drafted but not tested. Source: paper sections 2 and 3, Leviathan et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkchat.engine.sampling import draw, has_kernels

RESIDUAL_FLOOR = 1e-8
"""A residual of at most this mass is rounding noise; p itself is drawn from instead."""


@dataclass(frozen=True)
class Proposal:
    """A drafted block per request. R requests, g positions, Vd draft vocabulary."""

    ids: Tensor
    """[R, g] int64 target ids, -1 beyond a request's own length."""
    lens: Tensor
    """[R] int64 drafted tokens, 0 to g."""
    probs: Tensor | None
    """[R, g, Vd] float32: the exact law each token was drawn from. Not read for greedy requests."""
    draft_index: Tensor | None
    """[R, g] int64 index of each token in ``probs``. Not read for greedy requests."""
    confidence_logit: Tensor | None = None
    """[R, g] float32 raw confidence logits."""
    draft_to_target: Tensor | None = None
    """[Vd] int64 target id of each draft id, all different, or [R, g, Vd] where every place has its own; None when
    the vocabularies are the same."""
    chance: Tensor | None = None
    """[R, g] float64: where acceptance is simulated, how likely each draft is to pass whatever the laws say. The token
    after the accepted run is then a plain draw from p."""


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verified block per request."""

    accepted_len: Tensor
    """[R] int64 drafts to commit, after the cap."""
    full_accepted_len: Tensor
    """[R] int64 leading drafts that passed the test, before the cap."""
    next_ids: Tensor
    """[R] int64 token to commit after them."""
    is_bonus: Tensor
    """[R] bool: nothing was rejected in what is committed (accepted_len == min(verify_len, cap)); so also on plain
    steps."""
    next_is_draft: Tensor
    """[R] bool: ``next_ids`` is an accepted draft just beyond the cap."""
    p_draft: Tensor
    """[R, g] float64 q(x_i); NaN where nothing was drafted."""
    p_target: Tensor
    """[R, g] float64 p(x_i); NaN where nothing was verified."""

    def on_host(self) -> Acceptance:
        """The same in host memory: one wait for the device here instead of one for every number read."""
        if self.accepted_len.device.type == "cpu":
            return self
        return Acceptance(*(getattr(self, field.name).cpu() for field in fields(self)))


def accept(
    p: Tensor | None,
    row_start: Sequence[int] | Tensor,
    verify_len: Sequence[int] | Tensor,
    proposal: Proposal | None,
    u_accept: Tensor,
    u_next: Tensor,
    cap: Sequence[int] | Tensor | None = None,
    *,
    greedy: Sequence[bool] | Tensor | None = None,
    target_argmax: Tensor | None = None,
) -> Acceptance:
    """Test the first ``verify_len[r]`` drafts of every request and choose the token after them.

    ``p [N, V]`` float32 holds the target's laws; rows ``row_start[r] .. row_start[r] + verify_len[r]`` are request r's,
    row i being the law of draft i+1. ``u_accept [R, >=g]`` and ``u_next [R]`` (or ``[R, >=g+1]``, read at the committed
    length) are in [0, 1). ``proposal`` None means plain rows. With ``cap [R]`` at most that many drafts are committed
    and the next one, if it was accepted, becomes the next token. Requests marked ``greedy`` are decided by
    ``target_argmax [N]`` alone, as if both laws were one-hot: their rows of ``p`` are not read, and ``p`` may be None
    when all are. Tensors that lie on the device already are read there: nothing then waits for the host.
    """
    if p is not None and has_kernels(p) and is_sparse(proposal):
        return accept_sparse(p, row_start, verify_len, proposal, (u_accept, u_next), cap, greedy, target_argmax)
    device = target_argmax.device if p is None else p.device  # type: ignore[union-attr]
    starts = torch.as_tensor(row_start, dtype=torch.int64).to(device)
    lens = torch.as_tensor(verify_len, dtype=torch.int64).to(device)
    is_greedy = torch.zeros_like(lens, dtype=torch.bool)
    if greedy is not None:
        is_greedy = torch.as_tensor(greedy, dtype=torch.bool, device=device)
    passed, p_draft, p_target = _test(p, starts, lens, proposal, u_accept, is_greedy, target_argmax)
    full = passed.long().cumprod(dim=1).sum(dim=1)
    limit = lens if cap is None else torch.minimum(lens, torch.as_tensor(cap, dtype=torch.int64).to(device))
    taken = torch.minimum(full, limit)
    next_is_draft = full > taken
    next_ids = _draw_next(p, starts + taken, taken, taken < lens, proposal, u_next, is_greedy, target_argmax)
    if proposal is not None:
        ids = proposal.ids.to(device)
        beyond = ids.gather(1, taken.clamp(max=ids.shape[1] - 1)[:, None])[:, 0]
        next_ids = torch.where(next_is_draft, beyond, next_ids)
    return Acceptance(taken, full, next_ids, taken == limit, next_is_draft, p_draft, p_target)


def _test(
    p: Tensor | None,
    starts: Tensor,
    lens: Tensor,
    proposal: Proposal | None,
    u: Tensor,
    is_greedy: Tensor,
    target_argmax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which drafts pass on their own ``[R, g]`` bool, and q(x_i), p(x_i) ``[R, g]`` float64."""
    device = starts.device
    if proposal is None:
        nothing = torch.empty((len(starts), 0), dtype=torch.float64, device=device)
        return nothing.bool(), nothing, nothing
    ids = proposal.ids.to(device)
    places = torch.arange(ids.shape[1], device=device)
    drafted, tested = places < proposal.lens.to(device)[:, None], places < lens[:, None]
    # Places that are not tested read some row of the batch; ``tested`` drops what comes of it.
    num_rows = p.shape[0] if p is not None else target_argmax.shape[0]  # type: ignore[union-attr]
    rows = (starts[:, None] + places).clamp(max=num_rows - 1)
    q_x = torch.ones(ids.shape, dtype=torch.float64, device=device)
    p_x = torch.zeros_like(q_x)
    if target_argmax is not None:
        p_x = (ids == target_argmax[rows]).double()
    if p is not None and proposal.probs is not None:  # without laws, only greedy requests have drafted
        assert proposal.draft_index is not None
        drawn_from = proposal.probs.gather(2, proposal.draft_index.to(device)[..., None])[..., 0].double()
        q_x = torch.where(is_greedy[:, None], q_x, drawn_from)
        p_x = torch.where(is_greedy[:, None], p_x, p[rows, ids.clamp(min=0)].double())
    u = u[:, : ids.shape[1]].to(device)
    if proposal.chance is not None:
        passed = tested & drafted & (u < proposal.chance.to(device))
    else:
        passed = tested & drafted & (q_x > 0) & (u * q_x < p_x)
    return passed, q_x.masked_fill(~drafted, torch.nan), p_x.masked_fill(~tested, torch.nan)


def _draw_next(
    p: Tensor | None,
    rows: Tensor,
    taken: Tensor,
    is_rejected: Tensor,
    proposal: Proposal | None,
    u_next: Tensor,
    is_greedy: Tensor,
    target_argmax: Tensor | None,
) -> Tensor:
    """``[R]``: a residual draw where draft ``taken`` was rejected, a plain draw from the target's law elsewhere."""
    if p is None:
        assert target_argmax is not None  # and every request is greedy
        return target_argmax[rows]
    u = u_next.to(p.device)
    if u.dim() == 2:
        u = u.gather(1, taken[:, None])[:, 0]
    weights = p[rows]
    if proposal is not None and proposal.probs is not None and proposal.chance is None:
        place = taken.clamp(max=proposal.ids.shape[1] - 1)
        everyone = torch.arange(len(rows), device=p.device)
        q = proposal.probs[everyone, place]
        mapping = proposal.draft_to_target
        if mapping is not None and mapping.dim() == 3:
            if bool(is_rejected.any()):
                weights = _sparse_residual(weights, q * is_rejected[:, None], mapping[everyone, place])
        else:
            weights = _residual(weights, q * is_rejected[:, None], mapping)
    drawn = draw(weights, u)
    return drawn if target_argmax is None else torch.where(is_greedy, target_argmax[rows], drawn)


def _residual(p: Tensor, q: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """max(p - q, 0) ``[R, V]``, not normalised, with q ``[R, Vd]`` moved to target ids; p where too little is left."""
    rest = p - q if draft_to_target is None else p.index_add(1, draft_to_target.to(p.device), q, alpha=-1.0)
    rest.clamp_(min=0.0)
    too_little = rest.sum(dim=-1, keepdim=True) <= RESIDUAL_FLOOR
    # What is left of ``rest`` then weighs nothing beside p. On the CPU this is far cheaper than torch.where.
    return rest.addcmul_(p, too_little.float())


def _sparse_residual(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """As ``_residual``, with q ``[R, M]`` on a few target ids ``[R, M]``; only those entries change."""
    rest = p.scatter(1, ids, (p.gather(1, ids) - q).clamp_(min=0.0))
    too_little = rest.sum(dim=-1, keepdim=True) <= RESIDUAL_FLOOR
    return torch.where(too_little, p, rest) if bool(too_little.any()) else rest


def is_sparse(proposal: Proposal | None) -> bool:
    """Whether every draft's law lies on a few tokens of its own, or nothing was drafted."""
    if proposal is None:
        return True
    mapping = proposal.draft_to_target
    return proposal.chance is None and proposal.probs is not None and mapping is not None and mapping.dim() == 3


def accept_sparse(
    p: Tensor,
    row_start: Sequence[int] | Tensor,
    verify_len: Sequence[int] | Tensor,
    proposal: Proposal | None,
    uniforms: tuple[Tensor, Tensor],
    cap: Sequence[int] | Tensor | None,
    greedy: Sequence[bool] | Tensor | None,
    target_argmax: Tensor | None,
) -> Acceptance:
    """As ``accept``, by the processor's kernels; ``uniforms`` are ``u_accept`` and ``u_next``."""
    from sparkchat.kernels.cpu.laws import accept_drafts

    starts, lens = _array(row_start, np.int64), _array(verify_len, np.int64)
    count, limits = len(starts), lens if cap is None else _array(cap, np.int64)
    if proposal is None:
        ids, drafted = np.empty((count, 0), np.int64), np.zeros(count, np.int64)
        probs, index, support = np.empty((count, 0, 0), np.float32), ids, np.empty((count, 0, 0), np.int64)
    else:
        assert proposal.probs is not None and proposal.draft_index is not None and proposal.draft_to_target is not None
        ids, drafted = _array(proposal.ids, np.int64), _array(proposal.lens, np.int64)
        probs, index = _array(proposal.probs, np.float32), _array(proposal.draft_index, np.int64)
        support = _array(proposal.draft_to_target, np.int64)
    u_accept, u_next = (_array(u, np.float64) for u in uniforms)
    if u_next.ndim == 1:
        u_next = np.repeat(u_next[:, None], ids.shape[1] + 1, axis=1)
    is_greedy = np.zeros(count, bool) if greedy is None else _array(greedy, bool)
    argmax = np.zeros(len(p), np.int64) if target_argmax is None else _array(target_argmax, np.int64)
    out, seen = np.empty((count, 3), np.int64), np.full((2, *ids.shape), np.nan)
    given = (_array(p, np.float32), starts, lens, limits, ids, drafted, probs, index, support, u_accept, u_next)
    accept_drafts(*given, is_greedy, argmax, RESIDUAL_FLOOR, out, seen)
    taken, full, next_ids = out.T
    ends = np.minimum(lens, limits)
    # NumPy's operations are started in a fraction of what torch's take.
    return Acceptance(*map(torch.from_numpy, (taken, full, next_ids, taken == ends, full > taken, *seen)))


def _array(values: Sequence[Any] | Tensor, kind: Any) -> np.ndarray:
    """As a kernel takes it."""
    return np.ascontiguousarray(values.numpy() if isinstance(values, Tensor) else values, kind)
