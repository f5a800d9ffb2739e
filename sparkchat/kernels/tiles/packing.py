"""The order in which codes of 4 and 8 bits lie in memory so that they enter the matrix instruction as they are loaded.

Same bytes, moved once when a weight is loaded. Outputs are cut into tiles of 16, inputs into steps of 128. A lane of a
warp needs, for the 16 x 16 instruction, outputs ``g`` and ``g + 8`` (g = lane / 4) and the inputs that belong to
``t = lane % 4``; which inputs those are is free as long as both operands agree. Here a lane's inputs are eight
neighbours, so that it loads 16 bytes of activations at once, and its codes are 16 bytes as well:

    fp4  tile [512 bytes] = 16 outputs x 64 inputs: [g 8][t 4][output half 2][32 inputs 2][word of 8 codes]
    fp8  tile [512 bytes] = 16 outputs x 32 inputs: [g 8][t 4][output half 2][4 inputs 2][word of 4 codes]

A word of 8 fp4 codes holds two halves of 16 bits, of inputs 0 2 4 6 and 1 3 5 7. Code 0 has its sign and magnitude
where a bfloat16 has its sign and the end of its exponent (bit 15, bits 8 to 6), code 1 lies four bits lower. The bits
of codes 2 and 3 stand in what is left so that two shifts bring both to those same places (``EXPAND_FP4``): nine
instructions for eight codes.
A word of 4 fp8 codes holds two halves too, of inputs 0 2 and 1 3. Code 0 has its bits where a bfloat16 has them (15 and
10 to 4), code 1 in what is left so that two shifts bring it there (``EXPAND_FP8``).

Two tiles lie side by side, step by step, so that a program reads one stream:

    codes          [out/32 pairs][in/128 steps][2 tiles][1024 bytes of fp4, 2048 of fp8] int8
    scales of fp4  [pairs][steps][2 tiles][16 outputs][4 blocks of 32 inputs] uint8
    scales of fp8  [pairs][steps][2 tiles] float32
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

_FP4_BITS = ((6, 7, 8, 15), (2, 3, 4, 11), (12, 5, 14, 13), (0, 1, 10, 9))
_FP8_BITS = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))
"""Where the bits of the codes of a half word lie, lowest first; the last is the sign."""


def pack_fp4(codes: Tensor) -> Tensor:
    """codes [..., out, in/2] int8 as published (even input in the low four bits) -> [..., pairs, steps, 2, 1024]"""
    *lead, out, width = codes.shape
    _check(out, 2 * width)
    bits = [(half + [16 + at for at in half]) for half in map(list, _FP4_BITS)]
    words = _words(codes.view(torch.uint8), bits)
    # [..., pair, tile, output half, g, step, 64 inputs, 32 inputs, t, byte]
    rows = words.view(torch.uint8).reshape(*lead, out // 32, 2, 2, 8, width // 64, 2, 2, 4, 4)
    return _moved(rows, _FP4_ORDER).flatten(-6).view(torch.int8)


def _words(raw: Tensor, bits: list[list[int]]) -> Tensor:
    """raw [..., 4 n] uint8 -> [..., n] int32: in word n the bits of byte 4 n + i, lowest first, at ``bits[i]``"""
    byte = torch.arange(256, dtype=torch.int32, device=raw.device)
    fours = raw.unflatten(-1, (-1, 4))
    words = torch.zeros(fours.shape[:-1], dtype=torch.int32, device=raw.device)
    for number, places in enumerate(bits):
        table = torch.zeros_like(byte)
        for bit, at in enumerate(places):
            table |= (byte >> bit & 1) << at
        words |= table[fours[..., number].int()]
    return words


def unpack_fp4(tiles: Tensor) -> Tensor:
    """What ``pack_fp4`` was given."""
    *lead, pairs, steps, _, _ = tiles.shape
    tiled = tiles.view(torch.uint8).reshape(*lead, pairs, steps, 2, 2, 8, 4, 2, 2, 4)
    rows = _moved_back(tiled, _FP4_ORDER).reshape(*lead, pairs * 32, steps * 16, 2, 2).to(torch.int32)
    halves = rows[..., 0] | rows[..., 1] << 8
    nibbles = torch.zeros((*lead, pairs * 32, steps * 16, 4, 2), dtype=torch.int32, device=tiles.device)
    for code in range(4):
        for bit, at in enumerate(_FP4_BITS[code]):
            nibbles[..., code, :] |= (halves >> at & 1) << bit
    # Input 2i is code i of half 0, input 2i + 1 of half 1: the low and the high four bits of byte i.
    return (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8).flatten(-2).view(torch.int8)


def pack_fp4_scales(scales: Tensor) -> Tensor:
    """scales [..., out, in/32] uint8 -> [..., pairs, steps, 2, 16, 4]"""
    *lead, out, width = scales.shape
    return scales.reshape(*lead, out // 32, 2, OUTS, width // 4, 4).movedim(-2, -4).contiguous()


def unpack_fp4_scales(tiles: Tensor) -> Tensor:
    """What ``pack_fp4_scales`` was given."""
    *lead, pairs, steps, _, _, _ = tiles.shape
    return tiles.movedim(-4, -2).reshape(*lead, pairs * 32, steps * 4)


def pack_fp8(codes: Tensor) -> Tensor:
    """codes [..., out, in] float8_e4m3fn -> [..., pairs, steps, 2, 2048] int8"""
    *lead, out, size = codes.shape
    _check(out, size)
    first, second = map(list, _FP8_BITS)
    words = _words(codes.view(torch.uint8), [first, [16 + at for at in first], second, [16 + at for at in second]])
    # [..., pair, tile, output half, g, step, 32 inputs, t, 4 inputs, byte]
    rows = words.view(torch.uint8).reshape(*lead, out // 32, 2, 2, 8, size // STEP, 4, 4, 2, 4)
    return _moved(rows, _FP8_ORDER).flatten(-6).view(torch.int8)


def unpack_fp8(tiles: Tensor) -> Tensor:
    """What ``pack_fp8`` was given."""
    *lead, pairs, steps, _, _ = tiles.shape
    rows = _moved_back(tiles.view(torch.uint8).reshape(*lead, pairs, steps, 2, 4, 8, 4, 2, 2, 4), _FP8_ORDER)
    halves = rows.reshape(*lead, pairs * 32, steps * 32, 2, 2).to(torch.int32)
    halves = halves[..., 0] | halves[..., 1] << 8
    codes = torch.zeros((*lead, pairs * 32, steps * 32, 2, 2), dtype=torch.int32, device=tiles.device)
    for code in range(2):
        for bit, at in enumerate(_FP8_BITS[code]):
            codes[..., code, :] |= (halves >> at & 1) << bit
    return codes.to(torch.uint8).flatten(-3).view(torch.float8_e4m3fn)


def pack_fp8_scales(scales: Tensor, out: int) -> Tensor:
    """scales [ceil(out/128), in/128] float32 of a weight of ``out`` outputs -> [pairs, steps, 2]"""
    tiles = scales.repeat_interleave(FP8_BLOCK[0] // OUTS, dim=0)[: out // OUTS]
    return tiles.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


def interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Two weights [..., out, n] as one [..., 2 out, n] whose pairs of tiles are one of each."""
    cut = [weight.unflatten(-2, (-1, OUTS)) for weight in (first, second)]
    return torch.stack(cut, dim=-3).flatten(-4, -2)


def taken_apart(both: Tensor) -> tuple[Tensor, Tensor]:
    """What ``interleaved`` was given."""
    cut = both.unflatten(-2, (-1, 2, OUTS))
    return cut.select(-3, 0).flatten(-3, -2), cut.select(-3, 1).flatten(-3, -2)


def fits(out: int, size: int) -> bool:
    """Whether a weight of ``out`` outputs and ``size`` inputs can lie in tiles: programs take them in pairs."""
    return out % (2 * OUTS) == 0 and size % STEP == 0


_FP4_ORDER = (0, 4, 1, 5, 3, 7, 2, 6, 8)
_FP8_ORDER = (0, 4, 1, 5, 3, 6, 2, 7, 8)
"""Which of the dimensions of rows come first in memory."""


def _moved(rows: Tensor, order: tuple[int, ...]) -> Tensor:
    lead = rows.dim() - len(order)
    return rows.permute(*range(lead), *(lead + at for at in order)).contiguous()


def _moved_back(tiled: Tensor, order: tuple[int, ...]) -> Tensor:
    lead = tiled.dim() - len(order)
    return tiled.permute(*range(lead), *(lead + order.index(at) for at in range(len(order))))


def _check(out: int, size: int) -> None:
    if not fits(out, size):
        raise ValueError(f"a weight [{out}, {size}] does not lie in pairs of {OUTS} outputs and steps of {STEP} inputs")
