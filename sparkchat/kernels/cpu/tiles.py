"""Products of a few rows with one lane block of a packed matrix: 16 outputs, all inputs.

A matrix lies in lane blocks (``matrix.pack``): for each input 16 codes side by side, one for each output, so that a
vector of codes is multiplied by one number of the row. Codes are expanded in registers once for all rows of a tile; a
row's sums run in the same order in every tile, whatever its height.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from sparkchat.kernels.cpu.emit import LANES, Emitter, repeat
from sparkchat.kernels.cpu.rows import BYTES, primitive

GROUP = 32
"""Inputs that share a scale."""
Q4, Q8, BF16 = 0, 1, 2
"""Formats: 4 bit codes with scale and shift, 8 bit codes with scale, bfloat16."""
GROUP_BYTES = {Q4: GROUP * LANES // 2 + 4 * LANES, Q8: GROUP * LANES + 2 * LANES, BF16: GROUP * LANES * 2}
"""Bytes of 32 inputs of a lane block."""

_PARTS = 4
"""In which 32 inputs are multiplied: whole, the code would be long."""

Values = list[ir.Value]


class Tile:
    """``rows`` rows times ``width`` lane blocks."""

    def __init__(self, kind: int, rows: int, width: int) -> None:
        self.kind, self.rows, self.width = kind, rows, width

    def __call__(
        self,
        e: Emitter,
        codes: ir.Value,
        block_bytes: ir.Value,
        groups: ir.Value,
        x: ir.Value,
        x_stride: ir.Value,
        sums: ir.Value,
        sums_stride: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
    ) -> None:
        """out [rows, width * 16] = x [rows, groups * 32] times the blocks at ``codes``; ``sums`` of x by group."""
        blocks = [e.at(codes, e.times(block_bytes, j)) for j in range(self.width)]
        rows = [e.at(x, e.times(x_stride, r)) for r in range(self.rows)]
        row_sums = [e.at(sums, e.times(sums_stride, r)) for r in range(self.rows)]

        def group(g: ir.Value, *totals: ir.Value) -> Values:
            at = [e.at(block, e.times(g, GROUP_BYTES[self.kind])) for block in blocks]
            here = [e.at(row, e.times(g, 2 * BYTES)) for row in rows]
            inner = self._multiply(e, at, here, list(totals) if self.kind == BF16 else [e.zero] * len(totals))
            if self.kind == BF16:
                return inner
            shifts = [e.splat(e.scalar(e.at(s, e.times(g, 4)))) for s in row_sums] if self.kind == Q4 else []
            return self._scale(e, at, inner, list(totals), shifts)

        totals = repeat(e.builder, groups, [e.zero] * (self.rows * self.width), group)
        for r in range(self.rows):
            for j in range(self.width):
                e.store(totals[r * self.width + j], e.at(out, e.times(out_stride, r), j * BYTES))

    def _multiply(self, e: Emitter, at: Values, rows: Values, sums: Values) -> Values:
        """Add 32 inputs: sums[r * width + j] += codes of block j times row r."""
        at_once = GROUP // _PARTS
        block_step, row_step = self._code_bytes // _PARTS, 4 * at_once

        def part(p: ir.Value, *sums: ir.Value) -> Values:
            blocks = [e.at(block, e.times(p, block_step)) for block in at]
            return self._multiply_part(
                e, blocks, [e.at(row, e.times(p, row_step)) for row in rows], list(sums), at_once
            )

        return repeat(e.builder, e.times(ir.Constant(ir.IntType(64), 1), _PARTS), sums, part)

    def _multiply_part(self, e: Emitter, at: Values, rows: Values, sums: Values, count: int) -> Values:
        step = 2 if self.kind == Q4 else 1
        for k in range(0, count, step):
            codes = [self._codes(e, block, k) for block in at]
            for half in range(step):
                for r, row in enumerate(rows):
                    value = e.splat(e.scalar(e.at(row, 4 * (k + half))))
                    for j in range(self.width):
                        place = r * self.width + j
                        sums[place] = e.fma(value, codes[j][half], sums[place])
        return sums

    @property
    def _code_bytes(self) -> int:
        """Of 32 inputs, without scale and shift."""
        return GROUP * LANES * {Q4: 1, Q8: 2, BF16: 4}[self.kind] // 2

    def _codes(self, e: Emitter, block: ir.Value, k: int) -> tuple[ir.Value, ...]:
        if self.kind == Q4:
            return e.nibbles(e.at(block, k * LANES // 2))
        if self.kind == Q8:
            return (e.load(e.at(block, k * LANES), "i8"),)
        return (e.load(e.at(block, k * LANES * 2), "bf16"),)

    def _scale(self, e: Emitter, at: Values, inner: Values, totals: Values, shifts: Values) -> Values:
        for j, block in enumerate(at):
            scale = e.load(e.at(block, self._code_bytes), "f16")
            shift = e.load(e.at(block, self._code_bytes + 2 * LANES), "f16") if shifts else None
            for r in range(self.rows):
                place = r * self.width + j
                if shift is not None:
                    totals[place] = e.fma(shift, shifts[r], totals[place])
                totals[place] = e.fma(scale, inner[place], totals[place])
        return totals


def _compile(kind: int, rows: int, width: int = 1) -> int:
    """The address of a tile's machine code."""
    tile = primitive(f"tile_{kind}_{rows}_{width}", 9, Tile(kind, rows, width))

    def call(codes, block_bytes, groups, x, x_stride, sums, sums_stride, out, out_stride):  # type: ignore[no-untyped-def]
        tile(codes, block_bytes, groups, x, x_stride, sums, sums_stride, out, out_stride)

    # What is compiled is kept under the function's name.
    call.__name__ = call.__qualname__ = f"tile_{kind}_{rows}_{width}"
    return cfunc(types.void(*[types.int64] * 9), cache=True)(call).address


@functools.cache
def tile_addresses(kind: int) -> tuple[int, ...]:
    """Addresses of the tiles of 1, 2, 3 and 4 rows and of the one of one row and two blocks.

    Two blocks for a single row: as many sums at a time as the processor needs to be kept busy.
    """
    return (*(_compile(kind, rows) for rows in (1, 2, 3, 4)), _compile(kind, 1, 2))


@intrinsic
def call_tile(typing, tile, codes, block_bytes, groups, x, x_stride, sums, sums_stride, out, out_stride):  # type: ignore[no-untyped-def]
    """Call the tile at an address."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 9)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate
