"""What a layer makes of its input before attention, in one launch.

Shapes: N rows, d hidden size, r low rank, o outputs of what reads low ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkchat.kernels.compressor import Pool, PoolShape, compress_rows
from sparkchat.kernels.fp8.joint import JointProduct, joint_reference
from sparkchat.kernels.fp8.reference import fp8_linear_reference
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


PLAN = InputPlan()
MOST_ROWS = 24
"""That go in one launch."""


def keep_and_project(given: InputRows, out: Tensor) -> None:
    """Fill what ``given`` has room in, keep its rows, and out [N, o] = the product of their normed low ranks.

    N <= ``MOST_ROWS``. All bits are those of the joint product, ``compress_rows`` and ``fp8_linear`` in turn.
    """
    if given.x.is_cuda:
        from sparkchat.kernels.compressor.input_kernel import launch_keep_and_project

        launch_keep_and_project(given, out, PLAN)
        return
    joint_reference(given.x, given.product, given.parts, given.plain, given.whole, given.is_rounded)
    compress_rows(
        given.pools, given.positions, given.rows, given.starts, given.span_starts, given.rope, given.shape,
        written=given.written,
    )  # fmt: skip
    assert given.written.out is not None
    fp8_linear_reference(given.written.out, given.queries, out, 1, given.is_rounded)
