"""Products of few rows with pairs of tiles of 16 outputs whose codes lie as packing.py says; parts of other kernels.

The inputs of a tile are cut in SPLIT parts, every SPLIT-th step of 128 inputs being one; codes are expanded in
registers to bfloat16 and multiplied by the 16 x 8 x 16 instruction, whatever the number of rows is; the parts are added
at the end. So the order in which an output is summed depends on SPLIT alone, never on the rows beside it.

Tiles come to shared memory by asynchronous copies, STAGES deep, and from there in the order of the instruction's
operands: no exchange between lanes, and none of the weight between warps. What warps share are the products of a batch,
one for each part of each pair.

Shapes: P pairs, S parts (SPLIT), B = P * S products, R rows of a tile.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter has no assembly; there the same bits are taken apart by Triton's operations."""

# Codes 0 and 1 lie in the places of a bfloat16's bits, or four lower; two shifts and one choice of bits, 0x888C of a
# half word, bring codes 2 and 3 there. What is left is a bfloat16 too small by 2^126 (its exponent counts from 1 where
# e2m1's does), subnormal for a code of 0.5. A block's factor makes up for it exactly, before or after the product.
_TO_FOUR = """{
.reg .b32 a, b, c, d, r;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 4;
and.b32 b, b, 0x81C081C0;
shl.b32 d, $4, 2;
shr.u32 r, $4, 6;
lop3.b32 d, d, r, 0x888C888C, 0xE4;
and.b32 c, d, 0x81C081C0;
shl.b32 d, d, 4;
and.b32 d, d, 0x81C081C0;
"""
EXPAND_FP4 = (
    _TO_FOUR
    + """mov.b32 $0, a;
mov.b32 $1, b;
mov.b32 $2, c;
mov.b32 $3, d;
}"""
)
EXPAND_FP4_TIMES = (
    _TO_FOUR
    + """mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}"""
)
# e4m3 to bfloat16 in the same way: 2^120 too small.
EXPAND_FP8 = """{
.reg .b32 a, b, r;
and.b32 a, $2, 0x87F087F0;
shl.b32 b, $2, 4;
shr.u32 r, $2, 4;
lop3.b32 b, b, r, 0x80F080F0, 0xE4;
and.b32 b, b, 0x87F087F0;
mov.b32 $0, a;
mov.b32 $1, b;
}"""
_FP4_ASM, _FP4_TIMES_ASM = tl.constexpr(EXPAND_FP4), tl.constexpr(EXPAND_FP4_TIMES)
_FP8_ASM = tl.constexpr(EXPAND_FP8)
_CALL_ASM = tl.constexpr(
    "{ .reg .pred p; setp.eq.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)
_RAISED, _LACKING = tl.constexpr(2.0**100), tl.constexpr(2.0**20)
"""What inputs are multiplied by, so that products of codes which are too small lose no digits, and what factors of fp8
make up for. Inputs that are 2^28 or larger overflow, which shows."""


@triton.jit
def _taken_apart(word, PART: tl.constexpr, BATCH: tl.constexpr):
    """Codes of inputs 4 PART to 4 PART + 3 of words [B, 16, 4] -> [B, 16, 16] float32"""
    slot = tl.arange(0, 4)
    if PART == 1:
        word = _brought(word)
    half = word[:, :, :, None] >> (16 * (slot % 2))[None, None, None, :]
    half = tl.where((slot < 2)[None, None, None, :], half, half << 4)
    code = (half >> 6) & 7
    size = tl.where(code < 2, 0.5 * code, (2 + code % 2) * tl.exp2((code // 2 - 2).to(tl.float32)))
    value = tl.where(((half >> 15) & 1) == 1, -size, size)
    return tl.reshape(value, (BATCH, 16, 16))


@triton.jit
def _brought(word):
    """Codes 2 and 3 of either half of a word in the places of codes 0 and 1"""
    shifted = (word >> 6) & 0x3FFFFFF
    return ((word << 2) & ~0x77737773) | (shifted & 0x77737773)


@triton.jit
def _expand_fp4(words, BATCH: tl.constexpr, TYPE: tl.constexpr):
    """words [B, 16, 16] bytes of 32 inputs -> two [B, 16, 16], 2^126 too small but where interpreted"""
    if INTERPRETED:
        byte = tl.arange(0, 4)
        quads = tl.reshape(words, (BATCH, 16, 4, 4)).to(tl.int32) & 255
        word = tl.sum(quads << (8 * byte)[None, None, None, :], axis=3)
        low, high = _taken_apart(word, 0, BATCH).to(TYPE), _taken_apart(word, 1, BATCH).to(TYPE)
    else:
        low, high = tl.inline_asm_elementwise(_FP4_ASM, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), True, 4)
    return low, high


@triton.jit
def _expand_fp4_times(words, scale, BATCH: tl.constexpr, TYPE: tl.constexpr):
    """As ``_expand_fp4``, times the factors of the bytes scale [B, 16]"""
    scale = scale.to(tl.int32) & 255
    if INTERPRETED:
        factor = tl.exp2((scale - 127).to(tl.float32))[:, :, None]
        low, high = _expand_fp4(words, BATCH, tl.float32)
        low, high = (low * factor).to(TYPE), (high * factor).to(TYPE)
    else:
        # The factor's bfloat16 in both halves: its exponent is the byte, moved by 126.
        factor = tl.broadcast_to((scale * 0x00800080 + 0x3F003F00)[:, :, None], (BATCH, 16, 16))
        low, high = tl.inline_asm_elementwise(
            _FP4_TIMES_ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, factor], (tl.bfloat16, tl.bfloat16), True, 4
        )
    return low, high


@triton.jit
def _expand_fp8(words, BATCH: tl.constexpr, TYPE: tl.constexpr):
    """words [B, 16, 16] bytes of 16 inputs -> [B, 16, 16], 2^120 too small but where interpreted"""
    if INTERPRETED:
        byte = tl.arange(0, 4)
        quads = tl.reshape(words, (BATCH, 16, 4, 4)).to(tl.int32) & 255
        word = tl.sum(quads << (8 * byte)[None, None, None, :], axis=3)
        brought = ((word << 4) & ~0x7F0F7F0F) | ((word >> 4) & 0x7F0F7F0F)
        half = tl.where((byte < 2)[None, None, None, :], word[:, :, :, None], brought[:, :, :, None])
        half = tl.reshape(half >> (16 * (byte % 2))[None, None, None, :], (BATCH, 16, 16))
        power, rest = (half >> 7) & 15, (half >> 4) & 7
        size = tl.where(power == 0, rest * 0.001953125, (8 + rest) * tl.exp2((power - 10).to(tl.float32)))
        return tl.where(((half >> 15) & 1) == 1, -size, size).to(TYPE)
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
def _fp4_groups(codes, BATCH: tl.constexpr):
    """[B, 2048] bytes of a step -> eight [B, 16, 16], of either tile one for each 32 inputs"""
    codes = tl.permute(tl.reshape(codes, (BATCH, 2, 2, 8, 4, 2, 2, 4)), (0, 5, 3, 4, 7, 6, 2, 1))
    return _eighths(tl.reshape(codes, (BATCH, 16, 16, 2, 2, 2)))


@triton.jit
def _fp4_scales(scales, BATCH: tl.constexpr):
    """[B, 128] bytes of a step -> eight [B, 16], in the order of ``_fp4_groups``"""
    scales = tl.permute(tl.reshape(scales, (BATCH, 2, 16, 2, 2)), (0, 2, 4, 3, 1))
    return _eighths(scales)


@triton.jit
def _fp8_groups(codes, BATCH: tl.constexpr):
    """[B, 4096] bytes of a step -> of either tile eight [B, 16, 16], one for each 16 inputs, as ``_row_groups``"""
    codes = tl.permute(tl.reshape(codes, (BATCH, 2, 2, 2, 8, 4, 2, 2, 4)), (0, 6, 4, 5, 8, 7, 3, 2, 1))
    first, second = tl.split(tl.reshape(codes, (BATCH, 16, 16, 2, 2, 2, 2)))
    return _eighths(first), _eighths(second)


@triton.jit
def expand_pair(codes, scales, STEPS: tl.constexpr):
    """codes [STEPS * 4096] bytes of a pair of tiles and scales [STEPS * 2] -> their numbers [32, STEPS * 128] float32,
    in the order of outputs and inputs"""
    values = _expand_fp8(tl.reshape(codes, (STEPS * 16, 16, 16)), STEPS * 16, tl.float32).to(tl.float32)
    if not INTERPRETED:
        values, scales = values * _RAISED, scales * _LACKING
    values = tl.reshape(values, (STEPS * 2, 2048)) * scales[:, None]
    # In memory: step, tile, 32 inputs, output of a half, 8 inputs of a lane, half of the outputs, input (packing.py).
    values = tl.permute(tl.reshape(values, (STEPS, 2, 4, 8, 4, 2, 8)), (1, 5, 3, 0, 2, 4, 6))
    return tl.reshape(values, (32, STEPS * 128))


@triton.jit
def _step_of(x_rows, x_part):
    """Pointers [4, S * R, 32] to the first step of each row's part. Of all rows 32 inputs lie side by side in shared
    memory, so that eight lanes read from all its banks; with rows of 128 inputs they would read from half of them."""
    block, at = tl.arange(0, 4)[:, None, None], tl.arange(0, 32)[None, None, :]
    return (x_rows + x_part * 128)[None, :, None] + block * 32 + at


@triton.jit
def _row_groups(x, SPLIT: tl.constexpr, ROWS: tl.constexpr):
    """x [4, S * R, 32] -> eight [S, 16, R]: of each 32 inputs those that are first and second among a lane's eight"""
    x = tl.permute(tl.reshape(x, (2, 2, SPLIT, ROWS, 4, 2, 4)), (2, 4, 6, 3, 5, 1, 0))
    return _eighths(tl.reshape(x, (SPLIT, 16, ROWS, 2, 2, 2)))


@triton.jit
def round_e4m3(x):
    """x [4, n, 32] rounded as fp8 products round their input: e4m3, a power of two for each row's 128."""
    wide = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.max(tl.abs(wide), axis=2), axis=0), 1e-4)[None, :, None]
    bits = tl.div_rn(most, tl.full(most.shape, 448.0, tl.float32)).to(tl.int32, bitcast=True)
    power = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    scale, inverse = (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)
    y = wide * inverse
    # Adding and taking away 1.5 * 2^23 units of the last place of e4m3 rounds to it, ties to even.
    unit = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = ((unit + (20 << 23)) | 0x00400000).to(tl.float32, bitcast=True)
    y = (y + magic) - magic
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    # What is no number stays none.
    return tl.where(tl.abs(wide) < float("inf"), y * scale, wide).to(x.dtype)


@triton.jit
def call_bytes(at, size, lane):
    """Call ``size`` bytes from ``at`` on into L2, where there are any, by the first lane of every warp."""
    if not INTERPRETED:
        # The instruction takes its address from the warp, so that of every lane alike it would take 32 turns.
        tl.inline_asm_elementwise(
            _CALL_ASM, "=r,l,r,r", [at.to(tl.uint64), size, tl.where(size > 0, lane, 1)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def call_ahead(codes, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """Call the fp8 codes of STEPS steps into L2, each warp its share."""
    thread = tl.arange(0, WARPS * 32)
    EACH: tl.constexpr = STEPS * 4096 // WARPS
    call_bytes(codes + thread // 32 * EACH, tl.full((WARPS * 32,), EACH, tl.int32), thread % 32)


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _for_pairs(x, PAIRS: tl.constexpr):
    """x [S, m, n] -> [PAIRS * S, m, n], the same for every pair"""
    if PAIRS == 1:
        return x
    else:
        shape: tl.constexpr = (PAIRS * x.shape[0], x.shape[1], x.shape[2])
        return tl.reshape(tl.broadcast_to(x[None], (PAIRS, x.shape[0], x.shape[1], x.shape[2])), shape)


@triton.jit
def _added_up(sums, PAIRS: tl.constexpr, SPLIT: tl.constexpr):
    """sums [P * S, 16, R] -> [P, 16, R], the parts of the inputs added"""
    if SPLIT == 1:
        return sums
    else:
        return tl.sum(tl.reshape(sums, (PAIRS, SPLIT, sums.shape[1], sums.shape[2])), axis=1)


@triton.jit
def fp4_pairs(
    x_rows, is_row, codes, scales, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, LATE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """x_rows [S * R] pointers to rows (row n of part s at s * R + n), is_row [S * R]; pointers to the codes and scales
    of P pairs of tiles -> two sums [P, 16, R] float32, of the pairs' first and second tiles. LATE: blocks are
    multiplied by their factors after the product."""
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    BATCH: tl.constexpr = PAIRS * SPLIT
    part = tl.arange(0, BATCH) % SPLIT
    at = (tl.arange(0, BATCH) // SPLIT * STEPS + part)[:, None]
    x_part = tl.arange(0, SPLIT * ROWS) // ROWS
    x_at = _step_of(x_rows, x_part)
    codes_at = codes + at * 2048 + tl.arange(0, 2048)[None, :]
    scales_at = scales + at * 128 + tl.arange(0, 128)[None, :]
    one = tl.zeros((BATCH, 16, ROWS), tl.float32)
    two = tl.zeros((BATCH, 16, ROWS), tl.float32)
    none = tl.zeros((BATCH, 16, ROWS), tl.float32)
    WHOLE: tl.constexpr = STEPS % SPLIT == 0
    for step in tl.range(0, STEPS, SPLIT, num_stages=STAGES):
        is_step = (step + part < STEPS)[:, None]
        words = _fp4_groups(_load(codes_at + step * 2048, is_step, WHOLE), BATCH)
        factors = _fp4_scales(_load(scales_at + step * 128, is_step, WHOLE), BATCH)
        is_x = is_row if WHOLE else is_row & (step + x_part < STEPS)
        x = tl.load(x_at + step * 128, mask=is_x[None, :, None], other=0.0)
        if ROUND:
            x = round_e4m3(x)
        if LATE and not INTERPRETED:
            x = x * _RAISED
        groups = _row_groups(x, SPLIT, ROWS)
        for group in tl.static_range(4):
            first, second = _for_pairs(groups[2 * group], PAIRS), _for_pairs(groups[2 * group + 1], PAIRS)
            if LATE:
                low, high = _expand_fp4(words[group], BATCH, TYPE)
                sums = tl.dot(low, first, none, input_precision="ieee")
                sums = tl.dot(high, second, sums, input_precision="ieee")
                one += sums * _late_factor(factors[group])
                low, high = _expand_fp4(words[4 + group], BATCH, TYPE)
                sums = tl.dot(low, first, none, input_precision="ieee")
                sums = tl.dot(high, second, sums, input_precision="ieee")
                two += sums * _late_factor(factors[4 + group])
            else:
                low, high = _expand_fp4_times(words[group], factors[group], BATCH, TYPE)
                one = tl.dot(low, first, one, input_precision="ieee")
                one = tl.dot(high, second, one, input_precision="ieee")
                low, high = _expand_fp4_times(words[4 + group], factors[4 + group], BATCH, TYPE)
                two = tl.dot(low, first, two, input_precision="ieee")
                two = tl.dot(high, second, two, input_precision="ieee")
    return _added_up(one, PAIRS, SPLIT), _added_up(two, PAIRS, SPLIT)


@triton.jit
def _late_factor(scale):
    """Bytes [B, 16] of e8m0 -> [B, 16, 1] float32: their powers, times 2^26 which codes and raised inputs lack"""
    scale = scale.to(tl.int32) & 255
    if INTERPRETED:
        return tl.exp2((scale - 127).to(tl.float32))[:, :, None]
    else:
        return ((scale + 26) << 23).to(tl.float32, bitcast=True)[:, :, None]


@triton.jit
def fp8_pairs(
    x_rows, is_row, codes, scales, begin, STEPS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """As ``fp4_pairs``, over the PART steps from ``begin`` on."""
    TYPE: tl.constexpr = x_rows.dtype.element_ty
    BATCH: tl.constexpr = PAIRS * SPLIT
    part = tl.arange(0, BATCH) % SPLIT
    at = tl.arange(0, BATCH) // SPLIT * STEPS + part
    x_part = tl.arange(0, SPLIT * ROWS) // ROWS
    x_at = _step_of(x_rows, x_part)
    codes_at = codes + at[:, None] * 4096 + tl.arange(0, 4096)[None, :]
    one = tl.zeros((BATCH, 16, ROWS), tl.float32)
    two = tl.zeros((BATCH, 16, ROWS), tl.float32)
    WHOLE: tl.constexpr = STEPS % PART == 0 and PART % SPLIT == 0
    # A loop of four turns is unrolled if conditions are left in it that are settled by that. Since it was none, queries
    # of six rows took 8.8 us instead of 7.1 (benchmarks/results/2026-11-30-v4-machine-code.md).
    SHORT: tl.constexpr = PART <= 4 * SPLIT
    for ahead in tl.range(0, PART, SPLIT, num_stages=STAGES):
        step = begin + ahead
        is_step = (step + part < STEPS) & (ahead + part < PART)
        one_words, two_words = _fp8_groups(_load(codes_at + step * 4096, is_step[:, None], WHOLE), BATCH)
        one_scale = _load(scales + 2 * (step + at), is_step, WHOLE)
        two_scale = _load(scales + 2 * (step + at) + 1, is_step, WHOLE)
        if WHOLE and not SHORT:
            is_x = is_row
        else:
            is_x = is_row & (step + x_part < STEPS) & (ahead + x_part < PART)
        x = tl.load(x_at + step * 128, mask=is_x[None, :, None], other=0.0)
        if ROUND:
            x = round_e4m3(x)
        if not INTERPRETED:
            x = x * _RAISED
            one_scale, two_scale = one_scale * _LACKING, two_scale * _LACKING
        groups = _row_groups(x, SPLIT, ROWS)
        one_sum = tl.zeros((BATCH, 16, ROWS), tl.float32)
        two_sum = tl.zeros((BATCH, 16, ROWS), tl.float32)
        for group in tl.static_range(8):
            rows = _for_pairs(groups[group], PAIRS)
            one_code, two_code = _expand_fp8(one_words[group], BATCH, TYPE), _expand_fp8(two_words[group], BATCH, TYPE)
            one_sum = tl.dot(one_code, rows, one_sum, input_precision="ieee")
            two_sum = tl.dot(two_code, rows, two_sum, input_precision="ieee")
        one += one_sum * one_scale[:, None, None]
        two += two_sum * two_scale[:, None, None]
    return _added_up(one, PAIRS, SPLIT), _added_up(two, PAIRS, SPLIT)
