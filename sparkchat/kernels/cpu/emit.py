"""Vectors of 16 lanes in LLVM's own terms: they become AVX2, AVX-512 or NEON, whatever the processor has.

A lane never meets another one except in ``across``, whose order is fixed, and every multiply-add is fused on purpose:
so a number comes out the same, bit for bit, wherever a row lies in a batch. Addresses are int64, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
F32, I64, I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)
_ZERO_MASK = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.1219444005469057e-4
"""ln 2 in two parts, the first with few bits, so that n * LN2_HIGH is exact."""
LEAST_EXPONENT, LARGEST_EXPONENT = -87.0, 88.0
"""exp underflows below the first and is taken as 0; above the second it is held there."""


class Emitter:
    """Writes vector code at the builder's place."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder
        self.zero = ir.Constant(VECTOR, [0.0] * LANES)

    def at(self, address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """Address plus offsets in bytes."""
        for offset in offsets:
            address = self.builder.add(address, I64(offset) if isinstance(offset, int) else offset)
        return address

    def times(self, value: ir.Value, factor: ir.Value | int) -> ir.Value:
        return self.builder.mul(value, I64(factor) if isinstance(factor, int) else factor)

    def _pointer(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def scalar(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self._pointer(address, F32), align=4)

    def load(self, address: ir.Value, kind: str = "f32") -> ir.Value:
        """16 numbers from memory as float32: of f32, f16, bf16, i8."""
        b = self.builder
        if kind == "f32":
            return b.load(self._pointer(address, VECTOR), align=4)
        if kind == "f16":
            return b.fpext(b.load(self._pointer(address, ir.VectorType(ir.HalfType(), LANES)), align=2), VECTOR)
        if kind == "bf16":
            bits = b.load(self._pointer(address, ir.VectorType(ir.IntType(16), LANES)), align=2)
            return b.bitcast(b.shl(b.zext(bits, _WORDS), _words(16)), VECTOR)
        codes = b.load(self._pointer(address, ir.VectorType(ir.IntType(8), LANES)), align=1)
        return b.sitofp(b.sext(codes, _WORDS), VECTOR)

    def nibbles(self, address: ir.Value) -> tuple[ir.Value, ir.Value]:
        """16 bytes -> their low and their high halves as float32."""
        b = self.builder
        codes = b.load(self._pointer(address, ir.VectorType(ir.IntType(8), LANES)), align=1)
        words = b.zext(codes, _WORDS)
        return b.uitofp(b.and_(words, _words(15)), VECTOR), b.uitofp(b.lshr(words, _words(4)), VECTOR)

    def store(self, value: ir.Value, address: ir.Value, kind: str = "f32") -> None:
        """As float32, or rounded to the nearest bf16, ties to even; what is no number stays none."""
        b = self.builder
        if kind == "f32":
            b.store(value, self._pointer(address, VECTOR), align=4)
            return
        bits = b.bitcast(value, _WORDS)
        odd = b.and_(b.lshr(bits, _words(16)), _words(1))
        rounded = b.add(bits, b.add(odd, _words(0x7FFF)))
        is_none = b.fcmp_unordered("uno", value, value)
        bits = b.select(is_none, b.or_(bits, _words(0x400000)), rounded)
        half = ir.VectorType(ir.IntType(16), LANES)
        b.store(b.trunc(b.lshr(bits, _words(16)), half), self._pointer(address, half), align=2)

    def splat(self, value: ir.Value | float) -> ir.Value:
        if isinstance(value, float):
            return ir.Constant(VECTOR, [value] * LANES)
        b = self.builder
        first = b.insert_element(ir.Constant(VECTOR, ir.Undefined), value, I32(0))
        return b.shuffle_vector(first, ir.Constant(VECTOR, ir.Undefined), _ZERO_MASK)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v16f32"), [a, b, c]
        )

    def _floor(self, x: ir.Value) -> ir.Value:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, "llvm.floor.v16f32"), [x])

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger of each lane, of vectors of any width; ``b`` where ``a`` is no number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def root(self, x: ir.Value) -> ir.Value:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, "llvm.sqrt.v16f32"), [x])

    def across(self, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes joined into one number, halves upon halves."""
        b, width = self.builder, LANES
        while width > 1:
            width //= 2
            halves = [
                b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), list(range(s, s + width))))
                for s in (0, width)
            ]
            vector = join(*halves)
        return b.extract_element(vector, I32(0))

    def total(self, vector: ir.Value) -> ir.Value:
        return self.across(vector, self.builder.fadd)

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, and Taylor's series of e^r to the seventh power."""
        b = self.builder
        capped = self.larger(x, self.splat(LEAST_EXPONENT))
        capped = b.select(
            b.fcmp_ordered("<", capped, self.splat(LARGEST_EXPONENT)), capped, self.splat(LARGEST_EXPONENT)
        )
        n = self._floor(self.fma(capped, self.splat(LOG2_E), self.splat(0.5)))
        r = self.fma(n, self.splat(-LN2_LOW), self.fma(n, self.splat(-LN2_HIGH), capped))
        power = self.splat(1 / 5040)
        for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            power = self.fma(power, r, self.splat(coefficient))
        scale = b.bitcast(b.shl(b.add(b.fptosi(n, _WORDS), _words(127)), _words(23)), VECTOR)
        result = b.select(b.fcmp_ordered("<", x, self.splat(LEAST_EXPONENT)), self.zero, b.fmul(power, scale))
        return b.select(b.fcmp_unordered("uno", x, x), x, result)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * LANES)


def repeat(builder: ir.IRBuilder, count: ir.Value, start: list[ir.Value], body: Callable[..., list[ir.Value]]) -> Any:
    """``for i in range(count): values = body(i, *values)`` with the values in registers; returns them."""
    cells = [cgutils.alloca_once_value(builder, value) for value in start]
    with cgutils.for_range(builder, count) as loop:
        for cell, value in zip(cells, body(loop.index, *[builder.load(cell) for cell in cells]), strict=True):
            builder.store(value, cell)
    return [builder.load(cell) for cell in cells]
