"""Residual addition and RMSNorm in one pass."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.norm.reference import add_rms_norm_reference


def add_rms_norm(
    x: Tensor | None,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    tap: Tensor | None = None,
    *,
    is_settled: bool = False,
) -> None:
    """x += delta in place, out = x / sqrt(mean(x^2) + eps) * weight.

    x [N, d] float32, or None where the delta alone is normalised. delta None, [N, d], or partial sums [S, N, d] float32
    that are added in order. weight [d] float32. out [N, d] and tap [N, d] (which receives x) in any floating dtype.
    ``is_settled``: a product lies between the last launch that wrote x and this one (launch.reads_ahead).
    """
    if not out.is_cuda:
        add_rms_norm_reference(x, delta, weight, eps, out, tap)
        return
    from sparkchat.kernels.norm.kernel import launch_add_rms_norm

    launch_add_rms_norm(x, delta, weight, eps, out, tap, is_settled)
