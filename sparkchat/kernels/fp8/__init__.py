"""Products of a few rows with weights of 8 bits, a power of two or any number to each block of 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.fp8.plan import plan_of
from sparkchat.kernels.fp8.reference import fp8_linear_reference
from sparkchat.kernels.tiles.packing import FP8_BLOCK, fits, pack_fp8, unpack_fp8


@dataclass(frozen=True)
class TiledFp8:
    """A weight [out, in] in the order of tiles (kernels/tiles/packing.py)."""

    tiles: Tensor
    """[out, in] int8"""
    scales: Tensor
    """[ceil(out/128), in/128] float32"""

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> TiledFp8:
        """codes [out, in] float8_e4m3fn, scales [ceil(out/128), ceil(in/128)] float32.

        Raises ValueError where the weight does not lie in tiles (``takes``).
        """
        return cls(pack_fp8(codes), scales.float().contiguous())

    @property
    def shape(self) -> torch.Size:
        return self.tiles.shape

    def codes(self) -> Tensor:
        """[out, in] float8_e4m3fn as they are stored."""
        return unpack_fp8(self.tiles)

    def splits(self) -> int:
        """Parts of the inputs that ``fp8_linear`` sums apart where it may."""
        return plan_of(*self.tiles.shape).splits


def takes(codes: Tensor, block: tuple[int, int]) -> bool:
    """Whether ``TiledFp8`` can hold a weight of these codes, with a scale to each ``block`` of outputs and inputs."""
    return codes.dtype == torch.float8_e4m3fn and codes.dim() == 2 and block == FP8_BLOCK and fits(*codes.shape)


def fp8_linear(x: Tensor, weight: TiledFp8, out: Tensor, *, groups: int = 1, is_rounded: bool = False) -> None:
    """out = x weight^T for x [N, groups * in] half; where groups > 1, output group g reads input group g.

    out [N, out] half or float32, or partial sums [weight.splits(), N, out] float32, to be added in order.
    ``is_rounded``: x is first rounded as fp8 products round it, e4m3 with a power of two for each row's 128 inputs.
    A row's bits depend on the weight's shape and on whether sums are parts, never on the rows beside it. Raises
    ValueError for wrong shapes.
    """
    outs, size = weight.shape
    parts = (weight.splits(),) if out.dim() == 3 else ()
    if x.shape[1] != groups * size or tuple(out.shape) != (*parts, x.shape[0], outs) or outs % (32 * groups):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {(outs, size)} and {groups} groups do not give {tuple(out.shape)}"
        )
    if x.stride(1) != 1 or out.stride(-1) != 1:
        raise ValueError("numbers of a row must lie side by side")
    if not x.is_cuda:
        fp8_linear_reference(x, weight.codes(), weight.scales, out, groups, is_rounded)
        return
    from sparkchat.kernels.fp8.kernel import launch_fp8_linear

    launch_fp8_linear(x, weight.tiles, weight.scales, out, groups, is_rounded, out.dim() == 3)
