"""Vectors of 16 lanes in LLVM's own terms: they become AVX2, AVX-512 or NEON, whatever the processor has.

A lane never meets another one except in ``across``, whose order is fixed, and every multiply-add is fused on purpose:
so a number comes out the same, bit for bit, wherever a row lies in a batch. Addresses are int64, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

LANES = 16
F32, I64, I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)
_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
_QUADS = ir.VectorType(ir.IntType(8), 4 * LANES)
WORD_ZERO = ir.Constant(_WORDS, [0] * LANES)
_ZERO_MASK = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
_IS_X86 = binding.get_process_triple().startswith("x86_64")
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

    def prefetch(self, address: ir.Value) -> None:
        """Ask for a line of memory that will be read soon."""
        i8 = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [i8, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        # To be read, to be kept near, data.
        self.builder.call(function, [self.builder.inttoptr(address, i8), I32(0), I32(3), I32(1)])

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

    def pairs(self, address: ir.Value, kind: str) -> ir.Value:
        """32 whole numbers of 16 bits, two for each lane, from memory: of i16 or i8."""
        b = self.builder
        width = 16 if kind == "i16" else 8
        values = b.load(self._pointer(address, ir.VectorType(ir.IntType(width), 2 * LANES)), align=width // 8)
        return values if kind == "i16" else b.sext(values, _PAIRS)

    def nibble(self, words: ir.Value, place: int) -> ir.Value:
        """The 4 bits at ``place`` (0 to 3) of each of 32 words."""
        b = self.builder
        if place:
            words = b.lshr(words, ir.Constant(_PAIRS, [4 * place] * 2 * LANES))
        return words if place == 3 else b.and_(words, ir.Constant(_PAIRS, [15] * 2 * LANES))

    def pair(self, address: ir.Value) -> ir.Value:
        """Two whole numbers of 16 bits from memory, for every lane."""
        return self.builder.bitcast(self._spread(address, 2), _PAIRS)

    def _spread(self, address: ir.Value, align: int) -> ir.Value:
        """32 bits from memory, for every lane."""
        b = self.builder
        first = b.insert_element(
            ir.Constant(_WORDS, ir.Undefined), b.load(self._pointer(address, I32), align=align), I32(0)
        )
        return b.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), _ZERO_MASK)

    def dot_pairs(self, a: ir.Value, b: ir.Value, sums: ir.Value) -> ir.Value:
        """sums [16] + the products of each lane's two numbers."""
        if _IS_X86:
            # LLVM finds this instruction by itself in some places and takes five others in the rest.
            halves = [self._pmaddwd(*(self._half(v, i) for v in (a, b))) for i in (0, 1)]
            both = self.builder.shuffle_vector(*halves, ir.Constant(_WORDS, list(range(LANES))))
            return self._settled(self.builder.add(sums, both))
        products = []
        for odd in (0, 1):
            mask = ir.Constant(_WORDS, list(range(odd, 2 * LANES, 2)))
            left, right = (self.builder.sext(self.builder.shuffle_vector(v, v, mask), _WORDS) for v in (a, b))
            products.append(self.builder.mul(left, right))
        return self.builder.add(sums, self.builder.add(*products))

    def quads(self, address: ir.Value) -> ir.Value:
        """64 bytes from memory, four for each lane."""
        return self.builder.load(self._pointer(address, _QUADS), align=1)

    def half_byte(self, quads: ir.Value, place: int) -> ir.Value:
        """The low or high 4 bits of each of 64 bytes."""
        b = self.builder
        if place:
            # As words, of which the processor can move bits.
            quads = b.bitcast(b.lshr(b.bitcast(quads, _PAIRS), ir.Constant(_PAIRS, [4] * 2 * LANES)), _QUADS)
        return b.and_(quads, ir.Constant(_QUADS, [15] * 4 * LANES))

    def quad(self, address: ir.Value) -> ir.Value:
        """Four bytes from memory, for every lane."""
        return self.builder.bitcast(self._spread(address, 1), _QUADS)

    def dot_quads(self, codes: ir.Value, quad: ir.Value, sums: ir.Value) -> ir.Value:
        """sums [32] of 16 bits, two for each lane, + the products of each lane's first and last two numbers: codes
        without a sign, 0 to 15, and bytes with one. Sums wrap around."""
        b = self.builder
        if _IS_X86:
            halves = [self._pmaddubsw(*(self._half(v, i, 2 * LANES) for v in (codes, quad))) for i in (0, 1)]
            both = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES))))
            return self._settled(b.add(sums, both))
        for odd in (0, 1):
            mask = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(odd, 4 * LANES, 2)))
            parts = [b.shuffle_vector(v, v, mask) for v in (codes, quad)]
            sums = b.add(sums, b.mul(b.zext(parts[0], _PAIRS), b.sext(parts[1], _PAIRS)))
        return sums

    def joined(self, sums: ir.Value) -> ir.Value:
        """[16] the sum of each lane's two numbers of 16 bits."""
        return self.dot_pairs(sums, ir.Constant(_PAIRS, [1] * 2 * LANES), WORD_ZERO)

    def _half(self, values: ir.Value, half: int, width: int = LANES) -> ir.Value:
        places = list(range(half * width, (half + 1) * width))
        return self.builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(I32, width), places))

    def _pmaddwd(self, a: ir.Value, b: ir.Value) -> ir.Value:
        kind = ir.FunctionType(ir.VectorType(I32, LANES // 2), [ir.VectorType(ir.IntType(16), LANES)] * 2)
        name = "llvm.x86.avx2.pmadd.wd"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b])

    def _pmaddubsw(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Saturates, which 2 * 15 * 128 is far from."""
        kind = ir.FunctionType(ir.VectorType(ir.IntType(16), LANES), [ir.VectorType(ir.IntType(8), 2 * LANES)] * 2)
        name = "llvm.x86.avx2.pmadd.ub.sw"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b])

    def _settled(self, sums: ir.Value) -> ir.Value:
        """The same numbers, of which LLVM knows nothing: it would make trees of a tile's sums, and have no registers
        for their leaves."""
        count = sums.type.count
        half = ir.VectorType(sums.type.element, count // 2)
        kind = ir.FunctionType(half, [half])
        halves = [self.builder.asm(kind, "", "=x,0", [self._half(sums, i, count // 2)], False) for i in (0, 1)]
        return self.builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, count), list(range(count))))

    def whole(self, sums: ir.Value) -> ir.Value:
        """[16] whole numbers as float32."""
        return self.builder.sitofp(sums, VECTOR)

    def store_rounded(self, value: ir.Value, address: ir.Value, bits: int = 16) -> ir.Value:
        """As whole numbers of so many bits, rounded to the nearest; what is no number becomes the smallest. Returns
        them in 32 bits."""
        b = self.builder
        held = self.larger(value, self.splat(-float(1 << bits - 1)))
        kind = ir.VectorType(ir.IntType(bits), LANES)
        near = b.fptosi(self._whole_number(held), _WORDS)
        b.store(b.trunc(near, kind), self._pointer(address, kind), align=bits // 8)
        return near

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

    def _whole_number(self, x: ir.Value) -> ir.Value:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        name = "llvm.nearbyint.v16f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [x])

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
