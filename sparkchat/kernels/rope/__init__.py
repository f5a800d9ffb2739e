"""Queries, keys and values of a step: split, normalised, rotated, and the keys and values stored."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.rope.reference import write_context_reference, write_qkv_reference


def write_qkv(
    qkv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    q: Tensor,
    *,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    pages: Tensor | None = None,
    is_settled: bool = False,
) -> None:
    """Rotate queries into q and store keys and values at their positions.

    qkv [N, (H+2K)*D], or partial sums [S, N, ...] float32; positions [N]; rows [N] int32, -1 stores nothing; rope
    [P, D] float32 (cosine, sine side by side); cache [pages, 2K, slots, D] of one layer, keys before values; q
    [N, H, D]; qk_norm [H+K, D] float32; pages [cache rows, n] int32, None where cache row and page are one.
    ``is_settled``: a product lies between what wrote positions and rows and this launch (launch.reads_ahead).
    """
    if not q.is_cuda:
        write_qkv_reference(qkv, positions, rows, rope, cache, q, qk_norm, eps, pages)
        return
    from sparkchat.kernels.rope.kernel import launch_write_qkv

    launch_write_qkv(qkv, positions, rows, rope, cache, q, qk_norm, eps, pages, is_settled)


def write_context(
    kv: Tensor,
    positions: Tensor,
    rows: Tensor,
    rope: Tensor,
    cache: Tensor,
    *,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pages: Tensor | None = None,
    is_settled: bool = False,
) -> None:
    """Store keys and values of all L layers of a drafter at their positions.

    kv [N, L*2K*D], or partial sums [S, N, ...] float32; positions [N]; rows [N] int32, -1 stores nothing; rope [P, D]
    float32; cache [L, pages, 2K, slots, D]; k_norm [L, K, D] float32. ``pages`` and ``is_settled`` as in ``write_qkv``.
    """
    if not kv.is_cuda:
        write_context_reference(kv, positions, rows, rope, cache, k_norm, eps, pages)
        return
    from sparkchat.kernels.rope.kernel import launch_write_context

    launch_write_context(kv, positions, rows, rope, cache, k_norm, eps, pages, is_settled)
