"""The roundings of models/deepseek_v4/rounding.py inside kernels: to 8 and 4 bit floats under power-of-two scales."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_E4M3 = tl.constexpr(1e-4)
MOST_E4M3 = tl.constexpr(448.0)
LEAST_E2M1 = tl.constexpr(6.0 * 2.0**-126)
MOST_E2M1 = tl.constexpr(6.0)


@triton.jit
def _power_above(x):
    # The least power of two that is not below x, for normal x > 0.
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits & 0x7F800000
    return tl.where(exponent == bits, exponent, exponent + 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def _to_steps(x, LEAST: tl.constexpr, STEP: tl.constexpr):
    # Nearest multiple of STEP times the power of two below |x|, LEAST at least; halves to even.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, LEAST) * STEP
    # Adding and taking away 1.5 * 2^23 leaves no room for a fraction.
    return ((tl.div_rn(x, step) + 12582912.0) - 12582912.0) * step


@triton.jit
def round_e4m3(x, amax):
    """x [...] float32 as e4m3 would keep it, under the scale for ``amax`` (which broadcasts to x)."""
    scale = _power_above(tl.div_rn(tl.maximum(amax, LEAST_E4M3), tl.full(amax.shape, MOST_E4M3, tl.float32)))
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return _to_steps(tl.minimum(tl.maximum(scaled, -MOST_E4M3), MOST_E4M3), 0.015625, 0.125) * scale


@triton.jit
def round_e2m1(x, amax):
    """x [...] float32 as e2m1 would keep it, under the scale for ``amax`` (which broadcasts to x)."""
    scale = _power_above(tl.div_rn(tl.maximum(amax, LEAST_E2M1), tl.full(amax.shape, MOST_E2M1, tl.float32)))
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return _to_steps(tl.minimum(tl.maximum(scaled, -MOST_E2M1), MOST_E2M1), 1.0, 0.5) * scale


@triton.jit
def round_pairs_e4m3(left, right, plain, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of dimensions, ``left`` and ``right`` [PAIRS], BLOCK pairs to a scale; those from ``plain`` on stay."""
    a, b = tl.reshape(left, (PAIRS // BLOCK, BLOCK)), tl.reshape(right, (PAIRS // BLOCK, BLOCK))
    amax = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1)[:, None]
    is_plain = tl.arange(0, PAIRS) < plain
    new_left = tl.reshape(round_e4m3(a, amax), (PAIRS,))
    new_right = tl.reshape(round_e4m3(b, amax), (PAIRS,))
    return tl.where(is_plain, new_left, left), tl.where(is_plain, new_right, right)
