"""Stored numbers: every code and scale, packing, blocks that are cut, sizes."""

from __future__ import annotations

import math

import pytest
import torch

from sparkchat.models.deepseek_v4.formats import (
    ScaledWeight,
    decode_scales,
    encode_scales,
    has_bad_numbers,
    num_bytes,
    pack_fp4,
    quantize,
    unpack_fp4,
)

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def test_every_scale_byte_is_the_power_of_two_of_its_exponent() -> None:
    values = decode_scales(EVERY_BYTE)
    assert values[:255].tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert values[255].isnan()
    assert torch.equal(values[:255], EVERY_BYTE[:255].view(torch.float8_e8m0fnu).float())


def test_the_low_four_bits_are_the_even_input() -> None:
    pairs = unpack_fp4(EVERY_BYTE.view(torch.int8)[:, None])
    for byte, (even, odd) in enumerate(pairs.tolist()):
        assert (even, odd) == (FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4])
        assert math.copysign(1, even) == math.copysign(1, FP4_VALUES[byte & 15])


def test_packing_undoes_unpacking_for_every_byte() -> None:
    packed = EVERY_BYTE.view(torch.int8)
    assert torch.equal(pack_fp4(unpack_fp4(packed)), packed)


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        *[(0.2, 0.0), (0.25, 0.0), (0.26, 0.5), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0)],
        *[(2.5, 2.0), (2.6, 3.0), (3.5, 4.0), (5.0, 4.0), (5.1, 6.0), (9.0, 6.0)],
    ],
)
def test_values_go_to_the_nearest_code_and_ties_to_the_even_one(value: float, nearest: float) -> None:
    assert unpack_fp4(pack_fp4(torch.tensor([value, -value]))).tolist() == [nearest, -nearest]


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_scales_are_the_smallest_that_fit(largest: float) -> None:
    amax = torch.tensor([largest, largest * 1.001, largest / 2, 1.0, 3e-5, 1e30, 0.0])
    scales = decode_scales(encode_scales(amax, largest))
    assert (amax <= largest * scales).all()
    assert (amax[:-1] > largest * scales[:-1] / 2).all()
    assert scales[-1] == 1.0


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 160), (3, 32), (1, 64)])
def test_a_weight_survives_packing_within_half_a_step(shape: tuple[int, int], fp4: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed = quantize(weight, fp4=fp4)
    assert packed.shape == shape
    relative = (packed.dense() - weight).abs() / weight.abs().max()
    assert relative.max() < (1 / 6 if fp4 else 1 / 16)
    again = quantize(packed.dense(), fp4=fp4)
    assert torch.equal(again.dense(), packed.dense())


def test_unpacking_takes_the_scale_of_the_elements_own_block() -> None:
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    wide = ScaledWeight(torch.ones(130, 131).to(torch.float8_e4m3fn), scales, (128, 128)).dense()
    corners = [wide[0, 0], wide[127, 127], wide[0, 128], wide[128, 0], wide[129, 130]]
    assert [c.item() for c in corners] == [1.0, 1.0, 2.0, 4.0, 8.0]
    narrow = ScaledWeight(torch.full((2, 32), 0x22, dtype=torch.int8), scales, (1, 32)).dense()
    assert [narrow[0, 31].item(), narrow[0, 32].item(), narrow[1, 63].item()] == [1.0, 2.0, 8.0]


def test_bfloat16_holds_every_code_exactly() -> None:
    packed = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)), fp4=True)
    assert torch.equal(packed.dense(torch.bfloat16).float(), packed.dense())
    codes = torch.arange(256, dtype=torch.uint8)[[b for b in range(256) if b & 0x7F != 0x7F]]
    eight = ScaledWeight(codes.view(torch.float8_e4m3fn)[None], torch.tensor([[120, 130]], dtype=torch.uint8), (1, 128))
    assert torch.equal(eight.dense(torch.bfloat16).float(), eight.dense())


def test_scales_that_do_not_match_their_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="needs scales"):
        ScaledWeight(torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.uint8), (1, 32))


def test_sizes_count_two_codes_to_a_byte() -> None:
    packed = quantize(torch.ones(64, 128), fp4=True)
    assert packed.nbytes == num_bytes("I8", (64, 64)) + num_bytes("F8_E8M0", (64, 4)) == 64 * 64 + 64 * 4
    assert (num_bytes("BF16", (3, 5)), num_bytes("F32", ()), num_bytes("I64", (2,))) == (30, 4, 16)


@pytest.mark.parametrize(
    ("tensor", "bad"),
    [
        (torch.tensor([0x7E, 0xFE], dtype=torch.uint8).view(torch.float8_e4m3fn), False),
        (torch.tensor([0x00, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn), True),
        (torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn), True),
        (torch.tensor([254], dtype=torch.uint8), False),
        (torch.tensor([255], dtype=torch.uint8), True),
        (torch.tensor([1.0, float("nan")], dtype=torch.bfloat16), True),
        (torch.tensor([float("inf")]), True),
        (torch.tensor([-1], dtype=torch.int8), False),
        (torch.tensor([7]), False),
    ],
)
def test_numbers_that_are_none_are_found_in_every_format(tensor: torch.Tensor, bad: bool) -> None:
    assert has_bad_numbers(tensor) is bad
