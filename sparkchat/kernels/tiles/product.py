"""Products of few rows with two tiles of 16 outputs whose codes lie as packing.py says; parts of other kernels.

Each warp of a program takes every WARPS-th step of 128 inputs, expands its codes in registers to bfloat16 and
multiplies by the 16 x 8 x 16 instruction, whatever the number of rows is; the warps' sums are added at the end. So the
order in which an output is summed depends on the weight's shape and WARPS alone, never on the rows beside it.

Tiles come to shared memory by asynchronous copies, STAGES deep, and from there in the order of the instruction's
operands: no exchange between lanes, and none of the weight between warps.

Shapes: W warps, R rows of a tile.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from sparkchat.kernels.launch import prefetch

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter has no assembly; there the same bits are taken apart by Triton's operations."""

# Codes 0 and 1 of a half word need one shift and one mask, 2 and 3 two. What is left is a bfloat16 too small by 2^126
# (its exponent counts from 1 where e2m1's does); the factor of the block, times 2^126, makes up for it exactly.
EXPAND_FP4 = """{
.reg .b32 a, b, c, d, m;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
shl.b32 c, $4, 1;
shl.b32 m, $4, 6;
and.b32 m, m, 0x01C001C0;
lop3.b32 c, c, 0x80008000, m, 0xEA;
shl.b32 d, $4, 2;
shr.u32 m, $4, 3;
and.b32 m, m, 0x01C001C0;
lop3.b32 d, d, 0x80008000, m, 0xEA;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}"""
# e4m3 to bfloat16 in the same way: 2^120 too small, which is 0x7B80 as a bfloat16.
EXPAND_FP8 = """{
.reg .b32 a, b, m, f;
shl.b32 a, $2, 8;
shl.b32 m, $2, 4;
and.b32 m, m, 0x07F007F0;
lop3.b32 a, a, 0x80008000, m, 0xEA;
shr.u32 m, $2, 4;
and.b32 m, m, 0x07F007F0;
lop3.b32 b, $2, 0x80008000, m, 0xEA;
mov.b32 f, 0x7B807B80;
mul.rn.bf16x2 $0, a, f;
mul.rn.bf16x2 $1, b, f;
}"""
_FP4_ASM, _FP8_ASM = tl.constexpr(EXPAND_FP4), tl.constexpr(EXPAND_FP8)


@triton.jit
def _taken_apart(word, PART: tl.constexpr, WARPS: tl.constexpr):
    """Codes of inputs 4 PART to 4 PART + 3 of words [W, 16, 4] -> [W, 16, 16] float32"""
    slot = tl.arange(0, 4)
    half = word[:, :, :, None] >> (16 * (slot % 2))[None, None, None, :]
    if PART == 0:
        sign_at, at = tl.where(slot < 2, 15, 12), tl.where(slot < 2, 6, 3)
    else:
        sign_at, at = tl.where(slot < 2, 14, 13), tl.where(slot < 2, 0, 9)
    code = (half >> at[None, None, None, :]) & 7
    size = tl.where(code < 2, 0.5 * code, (2 + code % 2) * tl.exp2((code // 2 - 2).to(tl.float32)))
    value = tl.where(((half >> sign_at[None, None, None, :]) & 1) == 1, -size, size)
    return tl.reshape(value, (WARPS, 16, 16))


@triton.jit
def _expand_fp4(words, scale, WARPS: tl.constexpr, TYPE: tl.constexpr):
    """words [W, 16, 16] bytes of 32 inputs, scale [W, 16] bytes -> two [W, 16, 16]"""
    scale = scale.to(tl.int32) & 255
    if INTERPRETED:
        byte = tl.arange(0, 4)
        quads = tl.reshape(words, (WARPS, 16, 4, 4)).to(tl.int32) & 255
        word = tl.sum(quads << (8 * byte)[None, None, None, :], axis=3)
        factor = tl.exp2((scale - 127).to(tl.float32))[:, :, None]
        low = (_taken_apart(word, 0, WARPS) * factor).to(TYPE)
        high = (_taken_apart(word, 1, WARPS) * factor).to(TYPE)
    else:
        # The factor's bfloat16 in both halves: its exponent is the byte, moved by 126.
        factor = tl.broadcast_to((scale * 0x00800080 + 0x3F003F00)[:, :, None], (WARPS, 16, 16))
        low, high = tl.inline_asm_elementwise(
            _FP4_ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, factor], (tl.bfloat16, tl.bfloat16), True, 4
        )
    return low, high


@triton.jit
def _expand_fp8(words, WARPS: tl.constexpr, TYPE: tl.constexpr):
    """words [W, 16, 16] bytes of 16 inputs -> [W, 16, 16]"""
    if INTERPRETED:
        code = tl.reshape(tl.permute(tl.reshape(words, (WARPS, 16, 4, 2, 2)), (0, 1, 2, 4, 3)), (WARPS, 16, 16))
        code = code.to(tl.int32) & 255
        power, rest = (code >> 3) & 15, code & 7
        size = tl.where(power == 0, rest * 0.001953125, (8 + rest) * tl.exp2((power - 10).to(tl.float32)))
        return tl.where(code > 127, -size, size).to(TYPE)
    else:
        return tl.inline_asm_elementwise(_FP8_ASM, "=r,=r,r", [words], tl.bfloat16, True, 4)


@triton.jit
def _eighths(x):
    """x [..., 2, 2, 2] -> the eight [...], the last dimension counting most"""
    first, second = tl.split(x)
    ab, cd = tl.split(first)
    ef, gh = tl.split(second)
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    e, f = tl.split(ef)
    g, h = tl.split(gh)
    return a, b, c, d, e, f, g, h


@triton.jit
def _fp4_groups(codes, WARPS: tl.constexpr):
    """[W, 2048] bytes of a step -> eight [W, 16, 16], of either tile one for each 32 inputs"""
    codes = tl.permute(tl.reshape(codes, (WARPS, 2, 2, 8, 4, 2, 2, 4)), (0, 5, 3, 4, 7, 6, 2, 1))
    return _eighths(tl.reshape(codes, (WARPS, 16, 16, 2, 2, 2)))


@triton.jit
def _fp4_scales(scales, WARPS: tl.constexpr):
    """[W, 128] bytes of a step -> eight [W, 16], in the order of ``_fp4_groups``"""
    scales = tl.permute(tl.reshape(scales, (WARPS, 2, 16, 2, 2)), (0, 2, 4, 3, 1))
    return _eighths(scales)


@triton.jit
def _fp8_groups(codes, WARPS: tl.constexpr):
    """[W, 4096] bytes of a step -> of either tile eight [W, 16, 16], one for each 16 inputs, as ``_row_groups``"""
    codes = tl.permute(tl.reshape(codes, (WARPS, 2, 2, 2, 8, 4, 2, 2, 4)), (0, 6, 4, 5, 8, 7, 3, 2, 1))
    first, second = tl.split(tl.reshape(codes, (WARPS, 16, 16, 2, 2, 2, 2)))
    return _eighths(first), _eighths(second)


@triton.jit
def _row_groups(x, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """x [W * R, 128] -> eight [W, 16, R]: of each 32 inputs those that are first and second among a lane's eight"""
    x = tl.permute(tl.reshape(x, (WARPS, ROWS, 2, 2, 4, 2, 4)), (0, 4, 6, 1, 5, 3, 2))
    return _eighths(tl.reshape(x, (WARPS, 16, ROWS, 2, 2, 2)))


@triton.jit
def round_e4m3(x):
    """x [n, 128] rounded as fp8 products round their input: e4m3, a power of two for each row's 128."""
    wide = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-4)
    bits = tl.div_rn(most, tl.full(most.shape, 448.0, tl.float32)).to(tl.int32, bitcast=True)
    power = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    scale, inverse = (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)
    y = wide * inverse[:, None]
    # Adding and taking away 1.5 * 2^23 units of the last place of e4m3 rounds to it, ties to even.
    unit = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = ((unit + (20 << 23)) | 0x00400000).to(tl.float32, bitcast=True)
    y = (y + magic) - magic
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    # What is no number stays none.
    return tl.where(tl.abs(wide) < float("inf"), y * scale[:, None], wide).to(x.dtype)


@triton.jit
def call_ahead(codes, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """Call the fp8 codes of STEPS steps into L2, each thread its share."""
    EACH: tl.constexpr = STEPS * 4096 // (WARPS * 32)
    prefetch(codes + tl.arange(0, WARPS * 32) * EACH, EACH)


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def fp4_pair(
    x_rows, is_row, codes, scales, STEPS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """x_rows [W * R] pointers to rows (row n of warp w at w * R + n), is_row [W * R]; pointers to the codes and scales
    of a pair of tiles -> two sums [16, R] float32"""
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    warp = tl.arange(0, WARPS)
    x_warp = tl.arange(0, WARPS * ROWS) // ROWS
    x_at = (x_rows + x_warp * 128)[:, None] + tl.arange(0, 128)[None, :]
    codes_at = codes + warp[:, None] * 2048 + tl.arange(0, 2048)[None, :]
    scales_at = scales + warp[:, None] * 128 + tl.arange(0, 128)[None, :]
    one = tl.zeros((WARPS, 16, ROWS), tl.float32)
    two = tl.zeros((WARPS, 16, ROWS), tl.float32)
    WHOLE: tl.constexpr = STEPS % WARPS == 0
    for step in tl.range(0, STEPS, WARPS, num_stages=STAGES):
        is_step = (step + warp < STEPS)[:, None]
        words = _fp4_groups(_load(codes_at + step * 2048, is_step, WHOLE), WARPS)
        factors = _fp4_scales(_load(scales_at + step * 128, is_step, WHOLE), WARPS)
        x = tl.load(x_at + step * 128, mask=(is_row & (step + x_warp < STEPS))[:, None], other=0.0)
        if ROUND:
            x = round_e4m3(x)
        groups = _row_groups(x, WARPS, ROWS)
        for group in tl.static_range(4):
            low, high = _expand_fp4(words[group], factors[group], WARPS, TYPE)
            one = tl.dot(low, groups[2 * group], one, input_precision="ieee")
            one = tl.dot(high, groups[2 * group + 1], one, input_precision="ieee")
            low, high = _expand_fp4(words[4 + group], factors[4 + group], WARPS, TYPE)
            two = tl.dot(low, groups[2 * group], two, input_precision="ieee")
            two = tl.dot(high, groups[2 * group + 1], two, input_precision="ieee")
    return tl.sum(one, axis=0), tl.sum(two, axis=0)


@triton.jit
def fp8_pair(
    x_rows, is_row, codes, scales, begin, STEPS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """As ``fp4_pair``, over the PART steps from ``begin`` on."""
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    warp = tl.arange(0, WARPS)
    x_warp = tl.arange(0, WARPS * ROWS) // ROWS
    x_at = (x_rows + x_warp * 128)[:, None] + tl.arange(0, 128)[None, :]
    codes_at = codes + warp[:, None] * 4096 + tl.arange(0, 4096)[None, :]
    one = tl.zeros((WARPS, 16, ROWS), tl.float32)
    two = tl.zeros((WARPS, 16, ROWS), tl.float32)
    WHOLE: tl.constexpr = STEPS % PART == 0 and PART % WARPS == 0
    for ahead in tl.range(0, PART, WARPS, num_stages=STAGES):
        step = begin + ahead
        is_step = (step + warp < STEPS) & (ahead + warp < PART)
        one_words, two_words = _fp8_groups(_load(codes_at + step * 4096, is_step[:, None], WHOLE), WARPS)
        one_scale = _load(scales + 2 * (step + warp), is_step, WHOLE)
        two_scale = _load(scales + 2 * (step + warp) + 1, is_step, WHOLE)
        is_x = is_row & (step + x_warp < STEPS) & (ahead + x_warp < PART)
        x = tl.load(x_at + step * 128, mask=is_x[:, None], other=0.0)
        if ROUND:
            x = round_e4m3(x)
        groups = _row_groups(x, WARPS, ROWS)
        one_sum = tl.zeros((WARPS, 16, ROWS), tl.float32)
        two_sum = tl.zeros((WARPS, 16, ROWS), tl.float32)
        for group in tl.static_range(8):
            one_code, two_code = _expand_fp8(one_words[group], WARPS, TYPE), _expand_fp8(two_words[group], WARPS, TYPE)
            one_sum = tl.dot(one_code, groups[group], one_sum, input_precision="ieee")
            two_sum = tl.dot(two_code, groups[group], two_sum, input_precision="ieee")
        one += one_sum * one_scale[:, None, None]
        two += two_sum * two_scale[:, None, None]
    return tl.sum(one, axis=0), tl.sum(two, axis=0)
