"""Products with weights in lane blocks: what the codes say, and the same bits for a row whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparkchat.kernels import cpu

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes, pack_narrow, quantize
from sparkchat.kernels.cpu.product import share_start
from sparkchat.models.native import RowWriter
from sparkchat.models.quant import GroupedWeight

KINDS = ("q4", "q8", "bf16")
ALL_KINDS = (*KINDS, "narrow")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def make_matrix(kind: str, outputs: int, inputs: int, bias: Tensor | None = None) -> tuple[PackedMatrix, Tensor]:
    """A matrix, and the float32 weight it stands for."""
    random = torch.Generator().manual_seed(outputs * 1000 + inputs)
    shape = (outputs, inputs)
    if kind in ("q4", "narrow"):
        codes = torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)
        scale = (torch.rand(outputs, inputs // 32, generator=random) * 0.02 + 0.002).half().float()
        shift = (-7.3 * scale).half().float()
        dense = codes.view(outputs, -1, 32) * scale[..., None] + shift[..., None]
        pack = pack_codes if kind == "q4" else pack_narrow
        return PackedMatrix(*pack(codes, scale, shift), shape, bias), dense.view(shape)
    weight = torch.randn(shape, generator=random)
    if kind == "q8":
        codes, scale = quantize(weight)
        assert float((codes.view(outputs, -1, 32) * scale[..., None] - weight.view(outputs, -1, 32)).abs().max()) < 0.02
        dense = codes.view(outputs, -1, 32) * scale[..., None]
        return PackedMatrix(*pack_codes(codes, scale, None), shape, bias), dense.view(shape)
    return PackedMatrix(*pack_bf16(weight), shape, bias), weight.bfloat16().float()


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (50, 64), (1, 96), (400, 576)])
def test_against_float32(kind: str, outputs: int, inputs: int, threads: int) -> None:
    matrix, dense = make_matrix(kind, outputs, inputs)
    x = rows(37, inputs)
    # Codes are multiplied by rows of 16 bit numbers: half of 1 / 32767 of the largest of 32 inputs, at random signs.
    rounding = 0.0 if kind == "bf16" else 4 * 0.5 / 32767 * dense.norm(dim=1).max()
    torch.testing.assert_close(matrix(x), x @ dense.T, rtol=1e-5, atol=float(rounding) * 3.5 / 2 + 1e-5 * inputs**0.5)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_row_has_its_own_bits(kind: str) -> None:
    matrix, _ = make_matrix(kind, 200, 160, torch.randn(200))
    x = rows(80, 160)
    whole = matrix(x)
    for first, count in [(0, 1), (3, 1), (5, 2), (6, 3), (1, 4), (2, 5), (0, 7), (9, 33), (79, 1)]:
        assert torch.equal(matrix(x[first : first + count]), whole[first : first + count])
    for size in (2, 4):
        torch.set_num_threads(size)
        assert torch.equal(matrix(x), whole)
        assert torch.equal(matrix(x[:1]), whole[:1])
    torch.set_num_threads(1)


def test_bias_and_rows_that_lie_apart() -> None:
    bias = torch.randn(50)
    matrix, dense = make_matrix("q8", 50, 64, bias)
    x = rows(12, 128)[::2, ::2]
    torch.testing.assert_close(matrix(x), x @ dense.T + bias, rtol=1e-5, atol=1e-3)
    assert matrix(x[:0]).shape == (0, 50)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_stay_in_their_row(kind: str, bad: float) -> None:
    matrix, _ = make_matrix(kind, 48, 64)
    x = rows(6, 64)
    clean = matrix(x)
    x[2, 7] = bad
    dirty = matrix(x)
    assert not dirty[2].isfinite().any()
    assert torch.equal(dirty[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (50, 64), (400, 576)])
def test_narrow_products_are_those_of_rows_of_8_bits(outputs: int, inputs: int, threads: int) -> None:
    matrix, dense = make_matrix("narrow", outputs, inputs)
    x = rows(9, inputs)
    error = (matrix(x) - x @ dense.T).norm() / (x @ dense.T).norm()
    # At most half of 1 / 127 of the largest of 32 inputs, about 2 of them, evenly spread.
    assert 1e-3 < float(error) < 1e-2


def test_narrow_sums_hold_the_largest_codes_and_rows() -> None:
    """Sums of 16 bits are full where all signs agree: codes 0 and 15, halves of a row or every second pair turned."""
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (60, 32), generator=generator) * 2.0 - 1
    patterns = torch.stack([torch.ones(32), *(torch.arange(32) // step % 2 * 2.0 - 1 for step in (1, 2, 4, 16))])
    x = torch.cat([signs, patterns, -patterns])
    codes = torch.cat([(x > 0) * 15, (x <= 0) * 15, torch.zeros(1, 32), torch.full((1, 32), 15)]).to(torch.uint8)
    scale, shift = torch.full((len(codes), 1), 0.5), torch.full((len(codes), 1), -4.0)
    matrix = PackedMatrix(*pack_narrow(codes, scale, shift), (len(codes), 32), None)
    torch.testing.assert_close(matrix(x), x @ (codes * 0.5 - 4.0).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_where_it_belongs(kind: str) -> None:
    matrix, dense = make_matrix(kind, 40, 64)
    torch.testing.assert_close(matrix(torch.eye(64)), dense.T.contiguous(), rtol=1e-6, atol=1e-7)


def test_every_narrow_code_is_where_it_belongs() -> None:
    matrix, dense = make_matrix("narrow", 40, 64)
    # The shift is moved by eight codes and rounded to 11 bits.
    torch.testing.assert_close(matrix(torch.eye(64)), dense.T.contiguous(), rtol=0, atol=1e-5)


def test_rows_far_apart_in_size_are_each_as_exact() -> None:
    """One scale for 32 inputs: small ones beside large ones lose digits, small groups beside large ones don't."""
    matrix, dense = make_matrix("q8", 48, 64)
    x = rows(2, 64)
    x[0] *= 1e-20
    x[1, :32] *= 1e6
    exact = x.double() @ dense.T.double()
    assert float((matrix(x)[0] - exact[0]).norm() / exact[0].norm()) < 1e-4
    x[1, :32] = 0.0
    exact = x.double() @ dense.T.double()
    assert float((matrix(x)[1] - exact[1]).norm() / exact[1].norm()) < 1e-4


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_are_all_of_a_product_and_the_last_ones_small(threads: int) -> None:
    for units in (1, 2, 3, 36, 97, 3072):
        starts = [share_start(i, units, threads) for i in range(20 * threads)]
        sizes = [b - a for a, b in pairwise(starts)]
        assert starts[0] == 0 and starts[-1] == units
        taken = [size for size in sizes if size]
        assert sum(taken) == units and sizes[: len(taken)] == taken, "nobody stops while there is work"
        assert taken == sorted(taken, reverse=True) and max(taken[-threads:]) <= 2
        # Two blocks at a time are taken from where a share begins.
        assert all(start % 2 == 0 for start in starts[: len(taken)])


@pytest.mark.parametrize("form", ["q4", "q8", "plain"])
def test_a_written_row_is_that_of_the_weight(form: str) -> None:
    random = torch.Generator().manual_seed(4)
    weight = torch.randn((9, 64), generator=random).bfloat16()
    if form != "plain":
        low, high, kind = (0, 16, torch.uint8) if form == "q4" else (-127, 128, torch.int8)
        codes = torch.randint(low, high, (9, 64), generator=random).to(kind)
        shift = torch.randn(9, 2, generator=random) if form == "q4" else None
        weight = GroupedWeight(codes, torch.rand(9, 2, generator=random), shift)
    writer, out = RowWriter(weight), torch.zeros(1, 64)
    dense = weight.dense() if isinstance(weight, GroupedWeight) else weight.float()
    for row in (3, 8, 3):
        writer.write(row, out.numpy())
        assert torch.equal(out[0], dense[row])
