"""Projections of an attention sub-block whose weights lie in tiles, several of them in one product.

Shapes: N rows, d hidden size, r low rank, c latent size, H heads, G output groups, o outputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8, fp8_linear
from sparkchat.kernels.fp8.plan import is_expanded, num_programs
from sparkchat.models.deepseek_v4.formats import Stored
from sparkchat.models.deepseek_v4.packed import MOST_ROWS, TiledLinear, fp8_parts, has_kernels, lies_in_tiles
from sparkchat.models.deepseek_v4.scope import RoundedLinear, Scope
from sparkchat.models.linear import Linear
from sparkchat.models.parallel import Group

_TILE_OUTS = 32
_SCALED_OUTS = 128


@dataclass(frozen=True)
class TileProducts:
    """What kernels multiply by; ``linears`` are views of it."""

    joint: TiledFp8
    """[r + c, d]: the low ranks of queries, then latents"""
    low_rank: int
    """r"""
    inner: TiledFp8
    """[G * o, H/G * c]"""
    groups: int
    is_rounded: bool
    """Whether inputs of published fp8 products are rounded as those do."""
    dtype: torch.dtype

    @classmethod
    def of(cls, scope: Scope, low_rank: Stored, latent: Stored, inner: Stored, group_outs: int) -> TileProducts | None:
        """None where the weights do not lie in tiles, or nothing multiplies them so there."""
        weights = (low_rank, latent, inner)
        if not (scope.is_packed and has_kernels(scope.device, scope.dtype) and all(map(lies_in_tiles, weights))):
            return None
        rank, outs = low_rank.shape[0], inner.shape[0]
        if rank % _SCALED_OUTS or group_outs % _TILE_OUTS:
            return None
        codes, scales = zip(*(fp8_parts(weight, scope.device) for weight in (low_rank, latent)), strict=True)
        joint = TiledFp8.of(torch.cat([c.view(torch.int8) for c in codes]).view(codes[0].dtype), torch.cat(scales))
        inner_tiles = TiledFp8.of(*fp8_parts(inner, scope.device))
        return cls(joint, rank, inner_tiles, outs // group_outs, scope.has_roundings, scope.dtype)

    @property
    def latents(self) -> TiledFp8:
        """[c, d]: that part of ``joint``"""
        return self.joint.outs(self.low_rank, self.joint.shape[0])

    def linears(self) -> tuple[Linear, Linear, list[Linear]]:
        """To low ranks, to latents, and of each output group, by themselves: for long prompts."""
        size = self.inner.shape[0] // self.groups
        low, latent = (
            TiledLinear(self.joint.outs(*cut), self.dtype)
            for cut in ((0, self.low_rank), (self.low_rank, self.joint.shape[0]))
        )
        groups: list[Linear] = [
            TiledLinear(self.inner.outs(g * size, (g + 1) * size), self.dtype) for g in range(self.groups)
        ]
        if self.is_rounded:
            return RoundedLinear(low), RoundedLinear(latent), groups
        return low, latent, groups

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d] -> low ranks [P, N, r] and latents [P, N, c], float32 parts to be added in order."""
        parts = parts_of(x, self.joint, self.is_rounded)
        return parts[..., : self.low_rank], parts[..., self.low_rank :]

    def to_groups(self, heads: Tensor) -> Tensor:
        """heads [N, H, c] -> [N, G * o]"""
        out = torch.empty((heads.shape[0], self.inner.shape[0]), dtype=self.dtype, device=heads.device)
        fp8_linear(heads.flatten(1), self.inner, out, groups=self.groups)
        return out


def in_parts(linear: Linear, x: Tensor) -> Tensor:
    """x [N, in] -> [N, out], or where the weight lies in tiles float32 parts [P, N, out] to be added in order; of many
    rows they are one, [N, out] float32, which nobody need add up."""
    is_rounded, inner = _taken_apart(linear)
    if inner is None:
        return linear(x)
    parts = parts_of(x, inner.weight, is_rounded)
    return parts[0] if is_expanded(*inner.weight.shape, x.shape[0], is_rounded) else parts


def parts_of(x: Tensor, weight: TiledFp8, is_rounded: bool) -> Tensor:
    """x [N, in] -> float32 parts [P, N, out] to be added in order."""
    parts = torch.empty((weight.splits(x.shape[0], is_rounded), x.shape[0], weight.shape[0]), device=x.device)
    fp8_linear(x, weight, parts, is_rounded=is_rounded)
    return parts


def into_room(linear: Linear, x: Tensor, group: Group) -> Tensor:
    """x [N, in] -> this rank's part [N, out], which ``group.parts`` takes next; where the weight lies in tiles it is
    written where other ranks read it, of few rows by a launch that meets them."""
    is_rounded, inner = _taken_apart(linear)
    if inner is None or x.shape[0] > MOST_ROWS:
        return linear(x)
    room = group.room((x.shape[0], inner.weight.shape[0]), inner.dtype, x.device)
    meeting = None
    if not is_expanded(*inner.weight.shape, x.shape[0], is_rounded):
        meeting = group.meeting(room, num_programs(*inner.weight.shape, x.shape[0], is_rounded))
    fp8_linear(x, inner.weight, room, is_rounded=is_rounded, meeting=meeting)
    return room


def _taken_apart(linear: Linear) -> tuple[bool, TiledLinear | None]:
    """Whether inputs are rounded, and what multiplies them where its weight lies in tiles."""
    inner = linear.inner if isinstance(linear, RoundedLinear) else linear
    return inner is not linear, inner if isinstance(inner, TiledLinear) else None
