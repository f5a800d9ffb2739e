"""Products of a few rows with a large weight, which cost what reading the weight costs."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.gemm.plan import plan_of
from sparkchat.kernels.gemm.reference import small_gemm_reference

EPILOGUES = ("none", "add", "silu_mul", "partials")


def gemm_splits(weight: Tensor, epilogue: str = "partials") -> int:
    """Parts of k that are summed apart: S of the "partials" epilogue, 1 for the others."""
    return plan_of(weight, epilogue).splits


def small_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: str = "none",
) -> None:
    """y = x weight^T + bias for x [N, k] and weight [n, k]; what becomes of y is the epilogue's.

    "none": out [N, n] = y. "add": out [N, n] += y. "silu_mul": weight is [gate; up], out [N, n/2] = silu(y_gate) *
    y_up. "partials": out [S, N, n] float32 with S = ``gemm_splits(weight)``. weight has x's dtype, or is
    float8_e4m3fn with scales [ceil(n/128), ceil(k/128)] float32. The order in which k is summed depends on the
    weight's shape and the epilogue alone. Raises ValueError for an unknown epilogue or a wrong shape.
    """
    _check(x, weight, out, scales, epilogue)
    if not x.is_cuda:
        small_gemm_reference(x, weight, out, scales, bias, epilogue)
        return
    from sparkchat.kernels.gemm.kernel import launch_small_gemm

    launch_small_gemm(x, weight, out, scales, bias, epilogue)


def _check(x: Tensor, weight: Tensor, out: Tensor, scales: Tensor | None, epilogue: str) -> None:
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue is {epilogue!r}; it must be one of {', '.join(EPILOGUES)}")
    n, k = weight.shape
    wanted = (x.shape[0], n // 2 if epilogue == "silu_mul" else n)
    if epilogue == "partials":
        wanted = (gemm_splits(weight), *wanted)
    if x.shape[1] != k or tuple(out.shape) != wanted:
        raise ValueError(f"x {tuple(x.shape)} and weight {(n, k)} give {wanted}, not {tuple(out.shape)}")
    if (weight.element_size() == 1) != (scales is not None):
        raise ValueError("8 bit weights need scales, and only they have some")
