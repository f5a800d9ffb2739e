"""The 4 bit product computes what its codes say, and packed products give every row the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkchat.models.layers import SwiGLU
from sparkchat.models.linear import Int4Linear, Int8Linear, PackedLinear, make_lanes, make_linear
from sparkchat.models.quant import GroupedWeight, dense, stack_rows, take_columns, take_rows

CPU = torch.device("cpu")


def random_codes(outputs: int, inputs: int, seed: int = 0) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // 32, generator=generator) * 0.02 + 0.002
    return GroupedWeight(codes, scale, -7.3 * scale)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("outputs", [16, 48, 64, 192, 960])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_int4_error_is_that_of_bf16(outputs: int, rows: int) -> None:
    weight = random_codes(outputs, 96)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1))
    linear = make_linear(weight, None, device=CPU, dtype=None)
    assert isinstance(linear, Int4Linear)
    exact = x @ weight.dense().T
    assert relative_error(linear(x.bfloat16()), exact) < 0.006
    assert relative_error(linear(x.bfloat16(), True), exact) < 0.006


def test_int4_bias() -> None:
    weight, bias = random_codes(64, 64), torch.randn(64)
    x = torch.randn(2, 64).bfloat16()
    linear = make_linear(weight, bias, device=CPU, dtype=None)
    exact = x.float() @ weight.dense().T + bias
    assert relative_error(linear(x), exact) < 0.01
    assert relative_error(linear(x, True), exact) < 0.01


def test_shapes_the_kernel_does_not_take_are_unpacked() -> None:
    weight = random_codes(40, 64)
    linear = make_linear(weight, None, device=CPU, dtype=None)
    assert not isinstance(linear, Int4Linear)
    x = torch.randn(2, 64)
    assert relative_error(linear(x.to(linear.dtype)), x @ weight.dense().T) < 0.01


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16", "float32"])
def test_rows_do_not_depend_on_their_number(kind: str) -> None:
    dtype = None if kind == "int4" else getattr(torch, kind)
    linear = make_linear(random_codes(192, 160), None, device=CPU, dtype=dtype)
    assert isinstance(linear, {"int4": Int4Linear, "int8": Int8Linear}.get(kind, PackedLinear))
    x = torch.randn(20, 160, generator=torch.Generator().manual_seed(1)).to(linear.dtype)
    whole = linear(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 11, 16):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[-count:]), whole[-count:])


def test_int8_error_is_small() -> None:
    weight, bias = torch.randn(48, 96, generator=torch.Generator().manual_seed(2)), torch.randn(48)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    exact = x @ weight.T + bias
    linear = make_linear(weight, bias, device=CPU, dtype=torch.int8)
    assert relative_error(linear(x.bfloat16()), exact) < 0.02


def test_codes_survive_reordering() -> None:
    weight = random_codes(32, 96)
    rows, blocks = torch.randperm(32), torch.tensor([2, 0, 1])
    columns = (blocks[:, None] * 32 + torch.arange(32)).flatten()
    moved = take_columns(take_rows(weight, rows), columns)
    assert isinstance(moved, GroupedWeight)
    assert torch.equal(moved.dense(), weight.dense()[rows][:, columns])
    shuffled = torch.randperm(96)
    unpacked = take_columns(weight, shuffled)
    assert isinstance(unpacked, Tensor)
    assert torch.equal(unpacked, weight.dense()[:, shuffled])


def test_stacking_mixes_kinds() -> None:
    codes, plain = random_codes(32, 64), torch.randn(16, 64)
    assert isinstance(stack_rows([codes, codes]), GroupedWeight)
    assert torch.equal(dense(stack_rows([codes, codes])), torch.cat([codes.dense()] * 2))
    mixed = stack_rows([codes, plain])
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed, torch.cat([codes.dense(), plain]))
    no_shift = GroupedWeight(codes.codes, codes.scale, None)
    assert torch.equal(dense(stack_rows([codes, no_shift])), torch.cat([codes.dense(), no_shift.dense()]))


@pytest.mark.parametrize(("hidden", "intermediate"), [(48, 128), (64, 100), (80, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_products_of_two_kinds_follow_each_other(hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    """A size that is no whole groups of 32 takes one of them to another kernel, in another number format."""
    generator = torch.Generator().manual_seed(hidden)
    up = torch.randn(2 * intermediate, hidden, generator=generator).div_(hidden**0.5).bfloat16()
    down = torch.randn(hidden, intermediate, generator=generator).div_(intermediate**0.5).bfloat16()
    x = torch.randn(5, hidden, generator=generator)
    gate, other = (x @ up.float().T).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate).mul_(other) @ down.float().T
    mlp = SwiGLU(*(make_lanes(weight, None, device=torch.device("cpu"), dtype=dtype) for weight in (up, down)))
    torch.testing.assert_close(mlp(x.to(mlp.dtype), False).float(), wanted, rtol=0.05, atol=0.05)
