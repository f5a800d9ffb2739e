"""The order in which codes of 4 and 8 bits lie in memory so that they enter the matrix instruction as they are loaded.

Same bytes, moved once when a weight is loaded. Outputs are cut into tiles of 16, inputs into steps of 128. A lane of a
warp needs, for the 16 x 16 instruction, outputs ``g`` and ``g + 8`` (g = lane / 4) and the inputs that belong to
``t = lane % 4``; which inputs those are is free as long as both operands agree. Here a lane's inputs are eight
neighbours, so that it loads 16 bytes of activations at once, and its codes are 16 bytes as well:

    fp4  tile [512 bytes] = 16 outputs x 64 inputs: [g 8][t 4][output half 2][32 inputs 2][word of 8 codes]
    fp8  tile [512 bytes] = 16 outputs x 32 inputs: [g 8][t 4][output half 2][4 inputs 2][word of 4 codes]

A word of 8 fp4 codes holds two halves of 16 bits, of inputs 0 2 4 6 and 1 3 5 7. Each has its four signs above its four
magnitudes: bits 15 to 12 are the signs of codes 0, 2, 3, 1 and bits 11 to 0 the magnitudes of codes 3, 0, 1, 2. Codes 0
and 1 become a bfloat16's sign and exponent by one shift and one mask, the others by two (``EXPAND_FP4``).
A word of 4 fp8 codes has codes 0 2 1 3 in bytes 0 to 3, so that a pair lies in matching places of the two halves.

Scales of fp4: [tile of outputs][step of 128 inputs][output 16] words of four bytes, one for each 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTS, STEP = 16, 128
"""Outputs of a tile, inputs of a step."""
FP4_BLOCK, FP8_BLOCK = (1, 32), (128, 128)
"""Outputs and inputs that share a scale."""
MOST_FP4_SCALE = 128
"""The largest e8m0 byte (2.0) that the product folds into bfloat16 without overflow."""

_SIGNS, _MAGNITUDES = (15, 12, 14, 13), (6, 3, 0, 9)
"""Bit of the sign and lowest bit of the magnitude of codes 0 to 3 of a half word."""


def pack_fp4(codes: Tensor) -> Tensor:
    """codes [..., out, in/2] int8 as published (even input in the low four bits) -> the same shape, as above."""
    *lead, out, width = codes.shape
    _check(out, 2 * width)
    raw = codes.view(torch.uint8).to(torch.int32)
    nibbles = torch.stack([raw & 15, raw >> 4], dim=-1).unflatten(-2, (width // 4, 4)).flatten(-2)
    halves = torch.zeros((*lead, out, width // 4, 2), dtype=torch.int32, device=codes.device)
    for code in range(4):
        for half in range(2):
            value = nibbles[..., 2 * code + half]
            halves[..., half] |= (value >> 3) << _SIGNS[code] | (value & 7) << _MAGNITUDES[code]
    words = torch.stack([halves & 255, halves >> 8], dim=-1).to(torch.uint8).flatten(-2)
    # [..., tile, half, g, 64 inputs, 32 inputs, t, byte]
    tiled = words.flatten(-2).unflatten(-1, (-1, 2, 4, 4)).unflatten(-5, (-1, 2, 8))
    return tiled.movedim((-7, -4, -5, -2, -6, -3, -1), _last(7)).reshape(codes.shape).view(torch.int8).contiguous()


def unpack_fp4(tiles: Tensor) -> Tensor:
    """What ``pack_fp4`` was given."""
    *lead, out, width = tiles.shape
    tiled = tiles.view(torch.uint8).reshape(*lead, out // OUTS, width // 32, 8, 4, 2, 2, 4)
    rows = tiled.movedim(_last(7), (-7, -4, -5, -2, -6, -3, -1)).reshape(*lead, out, width // 4, 2, 2).to(torch.int32)
    halves = rows[..., 0] | rows[..., 1] << 8
    nibbles = torch.zeros((*lead, out, width // 4, 4, 2), dtype=torch.int32, device=tiles.device)
    for code in range(4):
        nibbles[..., code, :] = (halves >> _SIGNS[code] & 1) << 3 | halves >> _MAGNITUDES[code] & 7
    # Input 2i is code i of half 0, input 2i + 1 of half 1: the low and the high four bits of byte i.
    return (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8).reshape(tiles.shape).view(torch.int8)


def pack_fp4_scales(scales: Tensor) -> Tensor:
    """scales [..., out, in/32] uint8 -> [..., out/16, in/128, 16] int32"""
    *lead, out, width = scales.shape
    tiled = scales.reshape(*lead, out // OUTS, OUTS, width // 4, 4).transpose(-3, -2)
    return tiled.contiguous().view(torch.int32).squeeze(-1)


def unpack_fp4_scales(tiles: Tensor) -> Tensor:
    """What ``pack_fp4_scales`` was given."""
    *lead, count, steps, outs = tiles.shape
    return tiles.unsqueeze(-1).view(torch.uint8).transpose(-3, -2).reshape(*lead, count * outs, steps * 4)


def pack_fp8(codes: Tensor) -> Tensor:
    """codes [..., out, in] float8_e4m3fn -> int8 of the same shape, as above."""
    _check(codes.shape[-2], codes.shape[-1])
    # [..., tile, half, g, 32 inputs, t, 4 inputs, pair, in pair]
    tiled = codes.view(torch.int8).unflatten(-1, (-1, 4, 2, 2, 2)).unflatten(-6, (-1, 2, 8))
    return tiled.movedim((-8, -5, -6, -4, -7, -3, -1, -2), _last(8)).reshape(codes.shape).contiguous()


def unpack_fp8(tiles: Tensor) -> Tensor:
    """What ``pack_fp8`` was given."""
    *lead, out, width = tiles.shape
    tiled = tiles.reshape(*lead, out // OUTS, width // 32, 8, 4, 2, 2, 2, 2)
    rows = tiled.movedim(_last(8), (-8, -5, -6, -4, -7, -3, -1, -2))
    return rows.reshape(tiles.shape).contiguous().view(torch.float8_e4m3fn)


def fits(out: int, size: int) -> bool:
    """Whether a weight of ``out`` outputs and ``size`` inputs can lie in tiles: programs take them in pairs."""
    return out % (2 * OUTS) == 0 and size % STEP == 0


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _check(out: int, size: int) -> None:
    if not fits(out, size):
        raise ValueError(f"a weight [{out}, {size}] does not lie in pairs of {OUTS} outputs and steps of {STEP} inputs")
