"""Weights of 8 bits expanded for many rows: the kernel to the bit, the products behind it, and when which is taken."""

from __future__ import annotations

import pytest
import torch

from kernels.test_fp8_linear import NAN, half, weight_of
from sparkchat.kernels.fp8 import TiledFp8, fp8_linear
from sparkchat.kernels.fp8.expand_kernel import launch_expand
from sparkchat.kernels.fp8.expanded import expansion_room, linear_expanded
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.plan import EXPANDED_ROWS, TRIED_EXPANSIONS, expanded_pieces, is_expanded, plan_of
from sparkchat.kernels.fp8.reference import fp8_linear_reference

MANY = EXPANDED_ROWS


def powers_of_two(out: int, size: int, device: torch.device) -> TiledFp8:
    """Every code there is, in every place of a tile, times powers of two as they are published."""
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw[(raw & 0x7F) != 0x7F]
    codes = raw[torch.randint(0, len(raw), (out, size))].view(torch.float8_e4m3fn)
    return TiledFp8.of(codes.to(device), torch.exp2(torch.randint(-14, 5, (-(-out // 128), size // 128))).to(device))


@pytest.mark.parametrize("size", [384, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_is_expanded_to_the_bit(size: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = powers_of_two(160, size, device)
    want = weight.dense()
    for expansion in TRIED_EXPANSIONS:
        out = torch.full((160, size), NAN, dtype=dtype, device=device)
        launch_expand(weight, out, expansion)
        assert torch.equal(out.float(), want)


def test_any_scale_is_rounded_once(device: torch.device) -> None:
    weight, out = weight_of(64, 256, device), torch.empty(64, 256, dtype=half(device), device=device)
    launch_expand(weight, out)
    assert torch.equal(out, weight.dense().to(out.dtype))


@pytest.mark.parametrize(
    ("has_parts", "groups", "most"), [(False, 1, 32), (True, 1, 96), (False, 4, 64), (False, 2, 999)]
)
@pytest.mark.parametrize("is_wide", [False, True])
def test_products_by_pieces(has_parts: bool, groups: int, most: int, is_wide: bool, device: torch.device) -> None:
    """``most``: outputs that are expanded at once."""
    weight = powers_of_two(160 if groups == 1 else 128, 256, device)
    outs, type_ = weight.shape[0], torch.float32 if is_wide else half(device)
    x = torch.randn(9, 256 * groups + 8, device=device, dtype=type_)[:, 8:]
    # Rows that lie in a larger piece of memory, and outputs that do.
    room = torch.full((*([1] * has_parts), 9, outs + 4), NAN, device=device)
    out, want = room[..., 4:], torch.empty((*room.shape[:-1], outs), device=device)
    linear_expanded(x, weight, out, groups, most=most * 256 * x.dtype.itemsize)
    fp8_linear_reference(x, weight, want, groups, False)
    torch.testing.assert_close(out, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)
    assert room[..., :4].isnan().all()


def test_the_same_room_is_filled_again(device: torch.device) -> None:
    assert expansion_room(device).data_ptr() == expansion_room(device).data_ptr()
    x, outs = torch.randn(5, 128, device=device), []
    for _ in range(2):
        weight = powers_of_two(32, 128, device)
        outs.append(torch.empty(5, 32, device=device))
        linear_expanded(x, weight, outs[-1])
        torch.testing.assert_close(outs[-1], x @ weight.dense().T, atol=1e-2, rtol=1e-4)
    assert not torch.equal(*outs)


def test_when_a_weight_is_expanded(device: torch.device) -> None:
    assert [is_expanded(4096, 4096, rows) for rows in (1, MANY - 1, MANY, 384)] == [False, False, True, True]
    assert not is_expanded(4096, 4096, MANY, is_rounded=True)
    # A group's outputs lie in the room together.
    assert is_expanded(4096, 4096, MANY, groups=4) and not is_expanded(1 << 17, 4096, MANY, groups=2)
    weight = weight_of(32, 1024, device)
    assert (weight.splits(MANY - 1), weight.splits(MANY)) == (plan_of(32, 1024).splits, 1) != (1, 1)
    assert weight.splits(MANY, is_rounded=True) > 1


@pytest.mark.parametrize("rows", [MANY - 1, MANY, 3 * MANY + 1])
def test_either_side_gives_what_the_reference_gives(rows: int, device: torch.device) -> None:
    weight = powers_of_two(32, 256, device)
    x = torch.randn(rows, 256, device=device, dtype=half(device))
    out = torch.full((weight.splits(rows), rows, 32), NAN, device=device)
    fp8_linear(x, weight, out)
    want = x.float() @ weight.dense().T
    torch.testing.assert_close(out.sum(0), want, atol=2e-3 * float(want.abs().max()), rtol=2e-3)


def test_a_joint_product_of_many_rows(device: torch.device) -> None:
    plain = torch.randn(72, 512, device=device, dtype=half(device)) * 0.05
    product = JointProduct(weight_of(32, 512, device), plain, 64)
    x = torch.randn(MANY, 512, device=device, dtype=half(device))
    out, parts, whole = product(x)
    assert (out.shape[0], parts.shape[0]) == (1, 1) and whole.stride(1) == 1
    torch.testing.assert_close(out[0], x.float() @ product.codes.dense().T, atol=0.5, rtol=1e-2)
    torch.testing.assert_close(parts[0, :, :64], x.float() @ plain[:64].float().T, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(whole, x.float() @ plain[64:].float().T, atol=1e-3, rtol=1e-3)
    # Where inputs are rounded, the launch that it was.
    assert product(x, is_rounded=True)[1].shape[0] == product.plan.plain_splits


@pytest.mark.parametrize(
    ("out", "size", "groups"), [(64640, 4096, 1), (4096, 12288, 1), (8192, 4096, 8), (32768, 4096, 4), (96, 128, 1)]
)
def test_pieces_cover_a_weight_and_have_room(out: int, size: int, groups: int) -> None:
    for itemsize in (2, 4):
        pieces = expanded_pieces(out, size, groups, itemsize)
        assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])] and pieces[-1][1] == out
        unit = 32 if groups == 1 else out // groups
        assert all(first % unit == 0 and 0 < (last - first) * size * itemsize <= 128 << 20 for first, last in pieces)
    assert len(expanded_pieces(64640, 4096, 1, 2)) == 4 and len(expanded_pieces(4096, 12288, 1, 2)) == 1
