"""Which drafts survive and the token after them, from logits, on the device. The rule is ``engine/acceptance.py``'s."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.accept.reference import accept_block_reference
from sparkchat.kernels.sampling import VOCAB_BLOCK, DrawSettings, Laws, LawScratch

BLOCKS_A_PROGRAM = 8
"""Vocabulary blocks of one program in the passes over whole rows."""


@dataclass(frozen=True)
class AcceptBuffers:
    """What a verified step leaves, for R requests of up to g drafts and N rows."""

    accepted_len: Tensor
    """[R] int32 drafts to commit, after the cap"""
    full_len: Tensor
    """[R] int32 leading drafts that passed, before the cap"""
    next_ids: Tensor
    """[R] int64 the token after them; -1 for a request without rows"""
    tokens: Tensor
    """[R, g+1] int64: accepted drafts, the next token, then -1"""
    p_draft: Tensor
    """[R, g] float32 q(x_i), NaN where nothing was drafted or tested"""
    p_target: Tensor
    """[R, g] float32 p(x_i), NaN likewise"""
    damaged: Tensor
    """[R] int32: 1 where the target's logits are no numbers, at a row up to that of the next token"""
    laws: Laws
    """N rows: the target's"""
    scratch: LawScratch
    masses: Tensor
    """[R, 2, blocks] float32: of p, and of what is left of it less q"""
    ranks: Tensor
    """[R, parts] int32: together how many tokens the target finds likelier than the first draft it refused; 0 where it
    refused none"""

    @classmethod
    def empty(cls, logits: Tensor, requests: int, width: int, has_filters: bool = False) -> AcceptBuffers:
        """Static buffers for ``requests`` requests of up to ``width`` drafts, their rows in logits [N, V].

        ``has_filters``: some may have top-k, top-p or min-p, which take two more launches then.
        """
        device = logits.device
        blocks = -(-logits.shape[1] // VOCAB_BLOCK)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            ints(requests),
            ints(requests),
            ints(requests, dtype=torch.int64),
            ints(requests, width + 1, dtype=torch.int64),
            floats(requests, width),
            floats(requests, width),
            ints(requests),
            Laws.empty(logits),
            LawScratch.empty(logits.shape[0], logits.shape[1], device, has_filters),
            floats(requests, 2, blocks),
            ints(requests, -(-blocks // BLOCKS_A_PROGRAM)),
        )


def accept_block(
    logits: Tensor,
    starts: Tensor,
    verify_lens: Tensor,
    settings: DrawSettings,
    buffers: AcceptBuffers,
    *,
    drafts: Tensor | None = None,
    draft_laws: Laws | None = None,
    draft_index: Tensor | None = None,
    target_to_draft: Tensor | None = None,
    caps: Tensor | None = None,
    chance: Tensor | None = None,
) -> None:
    """Test the drafts of every request and choose the token after the accepted ones.

    logits [N, V]: row starts[r] + i of request r stands behind its first i drafts; starts [R+1] int32; verify_lens [R]
    int32 drafts tested. drafts [R, g] int64, draft_laws (rows r*g + i) and draft_index [R, g] int64 are the block's;
    all None on a plain step. target_to_draft [V] int32 holds draft ids, -1 where the draft vocabulary lacks a token.
    caps [R] int32: at most that many drafts are committed, and the next, if it passed, is the next token. chance [R, g]
    float64: acceptance is simulated, every draft passes with its own chance, and the token after is drawn from p.
    """
    arguments = (logits, starts, verify_lens, settings, buffers, drafts, draft_laws, draft_index, target_to_draft, caps,
                 chance)  # fmt: skip
    if not logits.is_cuda:
        accept_block_reference(*arguments)
        return
    from sparkchat.kernels.accept.kernel import launch_accept_block

    launch_accept_block(*arguments)
