"""What a layer makes of its input before attention, in one launch.

Shapes: N rows, d hidden size, r low rank, o outputs of what reads low ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.latent_attention import LatentRows


@dataclass(frozen=True)
class InputRows:
    """Rows, what multiplies them, and where what is made of them goes."""

    x: Tensor
    """[N, d] half"""
    product: JointProduct
    parts: Tensor
    plain: Tensor
    whole: Tensor
    """As ``JointProduct`` returns them; ``pools`` and ``written`` are cut from them"""
    pools: Sequence[Pool]
    written: LatentRows
    """With low ranks"""
    positions: Tensor
    rows: Tensor
    starts: Tensor
    span_starts: Tensor
    rope: Tensor
    """As of ``compress_rows``"""
    shape: PoolShape
    queries: TiledFp8
    """[o, r]: what reads the normed low ranks"""
    count: Tensor
    """Of programs that have ended a phase (kernels/phases.py)"""
    is_rounded: bool = False


@dataclass(frozen=True)
class InputPlan:
    """How the launch is cut."""

    launches: tuple[tuple[int, int], ...] = ((0, 2),)
    """First and last phase of each: 0 products of the input, 1 what is kept of rows, 2 products of the low ranks"""
    pairs: int = 2
    split: int = 2
    stages: int = 3
    """Pairs of tiles of a program of the last products, parts of the inputs that its warps share, depth of loads"""
    programs_each: int = 2
    """Programs of a multiprocessor"""
    ahead: int = 2
    """Codes of the last products are called into L2 at the start (1) or behind the first products (2)."""
