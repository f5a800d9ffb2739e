"""Products with weights of 8 bits, a power of two or any number to each block of 128 x 128."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.fp8.plan import is_expanded
from sparkchat.kernels.fp8.reference import fp8_linear_reference
from sparkchat.kernels.fp8.weights import TiledFp8, takes
from sparkchat.kernels.ranks import Meeting

__all__ = ["TiledFp8", "fp8_linear", "make_room", "takes"]


def fp8_linear(
    x: Tensor,
    weight: TiledFp8,
    out: Tensor,
    *,
    groups: int = 1,
    is_rounded: bool = False,
    meeting: Meeting | None = None,
) -> None:
    """out = x weight^T for x [N, groups * in] half; where groups > 1, output group g reads input group g.

    out [N, out] half or float32, or partial sums [weight.splits(N, is_rounded), N, out] float32, to be added in order.
    ``is_rounded``: x is first rounded as fp8 products round it, e4m3 with a power of two for each row's 128 inputs.
    ``meeting``: ``out``, whole, lies where other ranks read it; the launch ends when all ranks have written theirs.
    Of up to 127 rows (``plan.EXPANDED_ROWS``), of rounded ones and with a meeting a row's bits depend on the weight's
    shape and on whether sums are parts, never on the rows beside it. For more the weight is expanded to x's type, which
    is exact where scales are powers of two, and the library multiplies, whose order of sums may follow from N. Raises
    ValueError for wrong shapes.
    """
    outs, size = weight.shape
    parts = (weight.splits(x.shape[0], is_rounded),) if out.dim() == 3 else ()
    if x.shape[1] != groups * size or tuple(out.shape) != (*parts, x.shape[0], outs) or outs % (32 * groups):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {(outs, size)} and {groups} groups do not give {tuple(out.shape)}"
        )
    if x.stride(1) != 1 or out.stride(-1) != 1:
        raise ValueError("numbers of a row must lie side by side")
    if not x.is_cuda:
        fp8_linear_reference(x, weight, out, groups, is_rounded)
        return
    if meeting is None and is_expanded(outs, size, x.shape[0], is_rounded, groups):
        from sparkchat.kernels.fp8.expanded import linear_expanded

        linear_expanded(x, weight, out, groups)
        return
    from sparkchat.kernels.fp8.kernel import launch_fp8_linear

    launch_fp8_linear(x, weight, out, groups, is_rounded, meeting=meeting)


def make_room(device: torch.device) -> None:
    """Make the room, once for a GPU, that weights are expanded in for many rows: 128 MiB (``plan.MOST_EXPANDED``)."""
    from sparkchat.kernels.fp8.expanded import expansion_room

    expansion_room(device)
