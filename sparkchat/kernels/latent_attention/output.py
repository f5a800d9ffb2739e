"""Attention over latents and what is made of its heads, in one launch.

Shapes: N rows, H heads, c size of a latent, G groups of heads, m outputs of all groups, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8.plan import Fp8Plan
from sparkchat.kernels.fp8.reference import fp8_linear_reference
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.latent_attention import LatentShape, LatentWorkspace
from sparkchat.kernels.latent_attention.reference import latent_attention_reference
from sparkchat.kernels.ranks import Meeting
from sparkchat.kernels.tiles.packing import STEP

_WARPS = 8
MOST_ROWS = 24
"""That go in one launch; more are attended to by a program for each, and multiplied apart."""


@dataclass(frozen=True)
class OutputWeights:
    """The two products behind attention."""

    inner: TiledFp8
    """[m, H/G * c]: output group g reads group g of the heads"""
    output: TiledFp8
    """[d, m]"""
    groups: int
    """G"""
    is_rounded: bool = False
    """Whether inputs of the second product are rounded as published fp8 products round them."""

    @property
    def cut(self) -> Fp8Plan:
        """Of both products, also where they are launches of their own, so that a row's bits are the same."""
        steps = min(self.inner.shape[1], self.output.shape[1]) // STEP
        return Fp8Plan(min(_WARPS, 1 << (steps.bit_length() - 1)), 1, 3)


@dataclass(frozen=True)
class OutputPlan:
    """How the launch is cut."""

    launches: tuple[tuple[int, int], ...] = ((0, 3),)
    """First and last phase of each: 0 spans, 1 their join, 2 groups of heads, 3 the output"""
    stages: int = 3
    ahead: int = 1
    """Codes of both products are called into L2 at the start (1), or those of the second behind the spans (2)."""


PLAN = OutputPlan()


def attend_to_output(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    weights: OutputWeights,
    out: Tensor,
    workspace: LatentWorkspace,
    shape: LatentShape,
    *,
    context: int,
    chosen: Tensor | None = None,
    meeting: Meeting | None = None,
) -> None:
    """out [N, d] = what both products make of ``latent_attention``'s heads, N <= ``MOST_ROWS``.

    Other arguments as there, but that the cache is half; ``meeting`` as of ``fp8_linear``, of as many programs as the
    second product has by itself.
    """
    if q.is_cuda:
        from sparkchat.kernels.latent_attention.output_kernel import launch_attend_to_output

        launch_attend_to_output(
            q, cache, rows, positions, first_seen, ends, rope, sinks, weights, out, workspace, shape, context, chosen,
            meeting, PLAN,
        )  # fmt: skip
        return
    output_reference(
        q, cache, rows, positions, first_seen, ends, rope, sinks, weights, out, shape, chosen
    )  # fmt: skip


def output_reference(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    first_seen: Tensor,
    ends: Tensor,
    rope: Tensor,
    sinks: Tensor,
    weights: OutputWeights,
    out: Tensor,
    shape: LatentShape,
    chosen: Tensor | None,
) -> None:
    """See ``attend_to_output``."""
    heads = torch.empty((out.shape[0], sinks.shape[0], cache.shape[2]), dtype=cache.dtype, device=q.device)
    inner = torch.empty((out.shape[0], weights.inner.shape[0]), dtype=cache.dtype, device=q.device)
    latent_attention_reference(q, cache, rows, positions, first_seen, ends, rope, sinks, heads, shape, chosen)
    fp8_linear_reference(heads.flatten(1), weights.inner, inner, weights.groups, False)
    fp8_linear_reference(inner, weights.output, out, 1, weights.is_rounded)
