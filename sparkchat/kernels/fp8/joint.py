"""Products of one input with a weight of 8 bits and one of plain numbers, in one launch; of many rows by the library.

Shapes: N rows, k inputs, o outputs of the weight of 8 bits in P parts, n outputs of the plain one in S parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import fp8_linear
from sparkchat.kernels.fp8.plan import MULTIPROCESSORS, Fp8Plan, is_expanded
from sparkchat.kernels.fp8.reference import fp8_linear_reference
from sparkchat.kernels.fp8.weights import TiledFp8
from sparkchat.kernels.tiles.packing import OUTS, STEP

PLAIN_OUTS = 64
"""Of a tile of the plain weight."""


@dataclass(frozen=True)
class JointPlan:
    """How the two products are cut; ``splits`` of either decide in what order an output is summed."""

    codes: Fp8Plan
    plain_splits: int
    plain_stages: int


@cache
def joint_plan(out: int, size: int, plain_out: int) -> JointPlan:
    """The plan of weights [out, size] and [plain_out, size]: nearly two programs to a multiprocessor, those of the
    plain weight longer than those of the codes (benchmarks/results/2026-11-30-v4-products.md)."""
    tiles, pairs, steps = -(-plain_out // PLAIN_OUTS), out // (2 * OUTS), size // STEP
    plain_splits = max(n for n in (1, 2, 4) if steps % n == 0)
    splits = 1
    while splits < 8 and tiles * plain_splits + pairs * splits < 1.9 * MULTIPROCESSORS and steps >= 8 * splits:
        splits *= 2
    return JointPlan(Fp8Plan(4, splits, 2), plain_splits, 3)


def takes_joint(codes: TiledFp8, plain: Tensor) -> bool:
    """Whether ``JointProduct`` takes these weights."""
    size = codes.shape[1]
    plan = joint_plan(codes.shape[0], size, plain.shape[0])
    return plain.shape[1] == size and size % (plan.plain_splits * STEP) == 0 and plain.is_contiguous()


class JointProduct:
    """Two weights that read the same rows."""

    def __init__(self, codes: TiledFp8, plain: Tensor, whole_from: int | None = None) -> None:
        """``plain`` [n, k]; its outputs from ``whole_from`` on, a multiple of 64, are added up over their parts.

        Raises ValueError where ``takes_joint`` is false.
        """
        outs = plain.shape[0]
        self.whole_from = outs if whole_from is None else whole_from
        if not takes_joint(codes, plain) or (self.whole_from < outs and self.whole_from % PLAIN_OUTS):
            raise ValueError(f"weights {codes.shape} and {tuple(plain.shape)} do not go into one launch")
        self.codes, self.plain = codes, plain
        tiles = max(1, -(-(outs - self.whole_from) // PLAIN_OUTS))
        self.arrived = torch.zeros((tiles, _MOST_ROW_TILES), dtype=torch.int32, device=plain.device)
        """Programs that have left their part; zero when a launch ends"""

    @property
    def plan(self) -> JointPlan:
        return joint_plan(*self.codes.shape, self.plain.shape[0])

    def __call__(self, x: Tensor, *, is_rounded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, k] half, N <= 512 -> parts [P, N, o] of the codes' product (of rounded x where ``is_rounded``), parts
        [S, N, n] of the plain one's, and its last outputs [N, n - whole_from] added up. All float32.

        The parts of those last outputs mean nothing. A row's bits do not depend on the rows beside it, but where the
        weight of 8 bits is expanded (``fp8_linear``): then both have one part.
        """
        if x.stride(1) != 1 or x.shape[1] != self.plain.shape[1]:
            raise ValueError(f"x {tuple(x.shape)} does not fit weights of {self.plain.shape[1]} inputs")
        plan, count = self.plan, x.shape[0]
        if is_expanded(*self.codes.shape, count, is_rounded):
            return self._by_library(x)
        out = torch.empty((plan.codes.splits, count, self.codes.shape[0]), device=x.device)
        plain = torch.empty((plan.plain_splits, count, self.plain.shape[0]), device=x.device)
        whole = torch.empty((count, self.plain.shape[0] - self.whole_from), device=x.device)
        if x.is_cuda:
            from sparkchat.kernels.fp8.joint_kernel import launch_joint

            launch_joint(x, self, out, plain, whole, is_rounded, plan)
        else:
            joint_reference(x, self, out, plain, whole, is_rounded)
        return out, plain, whole

    def _by_library(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty((1, x.shape[0], self.codes.shape[0]), device=x.device)
        plain = torch.empty((1, x.shape[0], self.plain.shape[0]), device=x.device)
        fp8_linear(x, self.codes, out)
        if x.is_cuda:
            from sparkchat.kernels.fp8.expanded import multiply_plain

            multiply_plain(x, self.plain, plain[0])
        else:
            plain[0] = x.float() @ self.plain.float().T
        return out, plain, plain[0, :, self.whole_from :]


_MOST_ROW_TILES = 32
"""512 rows in tiles of 16."""


def joint_reference(
    x: Tensor, product: JointProduct, out: Tensor, plain: Tensor, whole: Tensor, is_rounded: bool
) -> None:
    """See ``JointProduct``. Computes in float32."""
    fp8_linear_reference(x, product.codes, out, 1, is_rounded, product.plan.codes)
    splits = product.plan.plain_splits
    width = x.shape[1] // splits
    for part in range(splits):
        at = slice(part * width, (part + 1) * width)
        plain[part] = x[:, at].float() @ product.plain[:, at].float().T
    whole.copy_(plain[..., product.whole_from :].sum(dim=0))
