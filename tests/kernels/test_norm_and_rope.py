"""Residual + RMSNorm, and the split that turns and stores queries, keys and values, against their references."""

from __future__ import annotations

import pytest
import torch

from sparkchat.kernels.activation.kernel import launch_silu_mul
from sparkchat.kernels.activation.reference import silu_mul_reference
from sparkchat.kernels.norm.kernel import launch_add_rms_norm
from sparkchat.kernels.norm.reference import add_rms_norm_reference
from sparkchat.kernels.rope.kernel import MANY_ROWS, launch_write_qkv
from sparkchat.kernels.rope.reference import write_qkv_reference

NAN = float("nan")


@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 100), (3, 1024)])
@pytest.mark.parametrize("delta", [None, "half", "parts"])
@pytest.mark.parametrize("has_x", [True, False])
def test_norm(rows: int, size: int, delta: str | None, has_x: bool, device: torch.device) -> None:
    if delta is None and not has_x:
        pytest.skip("there is nothing to normalise")
    x = torch.randn(rows, size, device=device) if has_x else None
    added = None
    if delta is not None:
        added = torch.randn(rows, size, device=device, dtype=torch.float16)
    if delta == "parts":
        added = torch.randn(3, rows, size, device=device)
    weight = torch.randn(size, device=device)
    taps = torch.full((2, rows, 3 * size), NAN, device=device)
    outs = torch.full((2, rows, size), NAN, device=device, dtype=torch.float16)
    xs = [None if x is None else x.clone() for _ in range(2)]
    launch_add_rms_norm(xs[0], added, weight, 1e-5, outs[0], taps[0, :, size : 2 * size])
    add_rms_norm_reference(xs[1], added, weight, 1e-5, outs[1], taps[1, :, size : 2 * size])
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(taps[0], taps[1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert not taps[0, :, size : 2 * size].isnan().any()
    if x is not None:
        torch.testing.assert_close(xs[0], xs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 16), (5, 5, 32)])
def test_write_qkv(heads: int, kv_heads: int, dim: int, has_norm: bool, is_paged: bool, device: torch.device) -> None:
    rows = 6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=torch.float16)
    # Two spans; the last row is padding; positions beyond the slots of a row wrap around, those of pages end with them.
    positions = torch.tensor([3, 4, 5, *((30, 31) if is_paged else (40, 41)), 0], device=device)
    cache_rows = torch.tensor([1, 1, 1, 0, 0, -1], device=device, dtype=torch.int32)
    table = torch.randn(64, dim, device=device)
    norm = torch.randn(heads + kv_heads, dim, device=device) if has_norm else None
    pages = torch.tensor([[4, 2], [0, 1]], device=device, dtype=torch.int32) if is_paged else None
    caches = torch.full((2, 5, 2 * kv_heads, 16, dim), NAN, device=device, dtype=torch.float16)
    queries = torch.full((2, rows, heads, dim), NAN, device=device, dtype=torch.float16)
    launch_write_qkv(qkv, positions, cache_rows, table, caches[0], queries[0], norm, 1e-6, pages)
    write_qkv_reference(qkv, positions, cache_rows, table, caches[1], queries[1], norm, 1e-6, pages)
    torch.testing.assert_close(queries[0], queries[1], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(caches[0], caches[1], atol=5e-3, rtol=5e-3, equal_nan=True)
    assert int(caches[0].isnan().logical_not().sum()) == 5 * 2 * kv_heads * dim


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "parts"), [(8, 4, 16, 0), (6, 2, 32, 3), (5, 3, 16, 0)])
@pytest.mark.parametrize("is_paged", [False, True])
def test_write_qkv_of_many_rows(
    heads: int, kv_heads: int, dim: int, parts: int, is_paged: bool, device: torch.device
) -> None:
    """Programs of several heads, where the numbers of heads have a common divisor."""
    rows, width = MANY_ROWS + 3, (heads + 2 * kv_heads) * dim
    qkv = torch.randn(parts, rows, width, device=device) if parts else torch.randn(rows, width, device=device).half()
    positions = torch.arange(rows, device=device) % 9 + 20
    cache_rows = (torch.arange(rows, device=device) // 9).int()
    cache_rows[-2:] = -1
    table, norm = torch.randn(64, dim, device=device), torch.randn(heads + kv_heads, dim, device=device)
    pages = torch.arange(8, device=device, dtype=torch.int32).view(4, 2) if is_paged else None
    caches = torch.full((2, 8, 2 * kv_heads, 16, dim), NAN, device=device, dtype=torch.float16)
    queries = torch.full((2, rows, heads, dim), NAN, device=device, dtype=torch.float16)
    launch_write_qkv(qkv, positions, cache_rows, table, caches[0], queries[0], norm, 1e-6, pages)
    write_qkv_reference(qkv, positions, cache_rows, table, caches[1], queries[1], norm, 1e-6, pages)
    assert not queries[0].isnan().any()
    torch.testing.assert_close(queries[0], queries[1], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(caches[0], caches[1], atol=5e-3, rtol=5e-3, equal_nan=True)


@pytest.mark.parametrize(("rows", "size"), [(3, 5), (2, 2100)])
def test_silu_mul(rows: int, size: int, device: torch.device) -> None:
    gate_up = (3 * torch.randn(rows, 2 * size + 7, device=device)).half()[:, : 2 * size]
    gate_up[0, 0] = -60000.0
    outs = torch.full((2, rows, size), NAN, device=device, dtype=torch.float16)
    launch_silu_mul(gate_up, outs[0])
    silu_mul_reference(gate_up, outs[1])
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)


def test_write_qkv_adds_partial_sums(device: torch.device) -> None:
    parts = torch.randn(4, 2, 6 * 16, device=device)
    positions, rows = torch.tensor([7, 8], device=device), torch.zeros(2, device=device, dtype=torch.int32)
    table = torch.randn(16, 16, device=device)
    caches, queries = torch.zeros(2, 1, 2, 16, 16, device=device), torch.zeros(2, 2, 4, 16, device=device)
    launch_write_qkv(parts, positions, rows, table, caches[0], queries[0], None, 0.0, None)
    write_qkv_reference(parts.sum(0), positions, rows, table, caches[1], queries[1], None, 0.0, None)
    torch.testing.assert_close(queries[0], queries[1])
    torch.testing.assert_close(caches[0], caches[1])
