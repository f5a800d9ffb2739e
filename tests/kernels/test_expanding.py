"""The assembly that expands codes, followed instruction by instruction, and the order of codes in memory.

The interpreter cannot run it, and takes codes apart by other means; here its own text is what is tested.
"""

from __future__ import annotations

import re

import pytest
import torch

from sparkchat.kernels.tiles.packing import (
    fits,
    pack_fp4,
    pack_fp4_scales,
    pack_fp8,
    unpack_fp4,
    unpack_fp4_scales,
    unpack_fp8,
)
from sparkchat.kernels.tiles.product import EXPAND_FP4, EXPAND_FP4_TIMES, EXPAND_FP8
from sparkchat.models.deepseek_v4.formats import unpack_fp4 as values_of

WORD = 0xFFFFFFFF


def run(text: str, given: dict[str, int]) -> dict[str, int]:
    """What the few instructions that ``text`` may hold leave in its registers, which are of 32 bits."""
    registers = dict(given)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^(?!\.reg|[{}]).+;$", text, re.MULTILINE):
        operation, operands = line.rstrip(";").split(" ", 1)
        to, *names = operands.split(", ")
        a, *more = (value(name) for name in names)
        if operation == "mov.b32":
            result = a
        elif operation == "and.b32":
            result = a & more[0]
        elif operation == "shl.b32":
            result = a << more[0]
        elif operation == "shr.u32":
            result = a >> more[0]
        elif operation == "lop3.b32":
            assert more[2] == 0xE4  # from a where c, from b elsewhere
            result = a & more[1] | more[0] & ~more[1]
        elif operation == "mul.rn.bf16x2":
            pair = torch.tensor([[x & 0xFFFF, x >> 16] for x in (a, more[0])], dtype=torch.int32).to(torch.uint16)
            product = (pair[0].view(torch.bfloat16).float() * pair[1].view(torch.bfloat16).float()).to(torch.bfloat16)
            low, high = product.view(torch.uint16).tolist()
            result = low | high << 16
        else:
            raise AssertionError(f"the test does not know {operation}")
        registers[to] = result & WORD
    return registers


def numbers(registers: dict[str, int], count: int) -> list[float]:
    """Of the pairs $0, $1, ..."""
    halves = [half for i in range(count) for half in (registers[f"${i}"] & 0xFFFF, registers[f"${i}"] >> 16)]
    return torch.tensor(halves, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).tolist()


@pytest.mark.parametrize("scale", [0, 1, 99, 120, 127, 128])
def test_fp4_codes_and_scales_give_their_numbers(scale: int) -> None:
    # Every code in every place of a word, beside all others.
    packed = torch.stack([torch.arange(16).roll(turn) for turn in range(16)]).to(torch.uint8)
    codes = (packed[:, ::2] | packed[:, 1::2] << 4).view(torch.int8)
    weight = torch.zeros(32, 64, dtype=torch.int8)
    weight[:16, :8] = codes
    assert torch.equal(unpack_fp4(pack_fp4(weight)), weight)
    want = values_of(weight[:16, :8]) * 2.0 ** (scale - 127)
    tiles = pack_fp4(weight).view(torch.int32).view(-1)[:128].view(8, 4, 2, 2)
    for row in range(16):
        for lane in range(2):
            word = int(tiles[row % 8, lane, row // 8, 0]) & WORD
            after = run(EXPAND_FP4_TIMES, {"$4": word, "$5": scale * 0x00800080 + 0x3F003F00})
            assert numbers(after, 4) == want[row, 8 * lane : 8 * lane + 8].tolist()
            # Without the factor, 2^126 too small.
            raw = torch.tensor(numbers(run(EXPAND_FP4, {"$4": word}), 4), dtype=torch.float64)
            assert torch.equal(raw * 2.0 ** (scale - 1), want[row, 8 * lane : 8 * lane + 8].double())


def test_fp8_codes_give_their_numbers() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    weight = torch.zeros(32, 128, dtype=torch.uint8)
    weight[:16, :16] = raw.view(16, 16).T
    weight[(weight & 0x7F) == 0x7F] = 0  # those that are no numbers
    codes = weight.view(torch.float8_e4m3fn)
    tiles = pack_fp8(codes).view(torch.int32).view(-1)[:128].view(8, 4, 2, 2)
    for row in range(16):
        for lane in range(2):
            for half in range(2):
                after = run(EXPAND_FP8, {"$2": int(tiles[row % 8, lane, row // 8, half]) & WORD})
                at = 8 * lane + 4 * half
                raw = torch.tensor(numbers(after, 2), dtype=torch.float64)
                assert torch.equal(raw * 2.0**120, codes[row, at : at + 4].double())


def test_packing_is_undone_by_unpacking() -> None:
    codes = torch.randint(-128, 128, (3, 64, 128), dtype=torch.int8)
    scales = torch.randint(0, 256, (3, 64, 8)).to(torch.uint8)
    assert torch.equal(unpack_fp4(pack_fp4(codes)), codes)
    assert not torch.equal(pack_fp4(codes).view(3, 64, 128), codes)
    assert torch.equal(unpack_fp4_scales(pack_fp4_scales(scales)), scales)
    fp8 = codes.view(torch.float8_e4m3fn)
    assert torch.equal(unpack_fp8(pack_fp8(fp8)).view(torch.int8), codes)
    assert fits(32, 128) and not fits(16, 128) and not fits(32, 64)
