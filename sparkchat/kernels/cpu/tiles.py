"""Products of a few rows with one lane block of a packed matrix: 16 outputs, all inputs.

A matrix lies in lane blocks (``matrix.py``): for each input, or each two of them, 16 codes side by side, one for each
output, so that a vector of codes is multiplied by one number, or pair, of the row. Codes are expanded in registers once
for all rows of a tile. Products of codes are summed as whole numbers, 32 at a time (at most 127 * 32767 each), and
those sums in float32 in one order, whatever the tile's height.

Narrow products have rows of 8 bits, a rounding of half of 1 / 127: enough to find what is then computed again. Their
codes lie four inputs side by side, and each lane has two sums of 16 bits, which begin at -4 times the sum of the 32
numbers: 16 * (11 + 4) * 127 = 30,480 at most.
"""

from __future__ import annotations

import functools
from types import FunctionType

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from sparkchat.kernels.cpu.emit import LANES, WORD_ZERO, Emitter, repeat
from sparkchat.kernels.cpu.rows import BYTES, GROUP, primitive

Q4, Q8, BF16, NARROW = 0, 1, 2, 3
"""Formats: 4 bit codes with scale and shift, 8 bit codes with scale, bfloat16; 4 bit codes for rows of 8 bits."""
_CODE_BYTES = {Q4: GROUP * LANES // 2, Q8: GROUP * LANES, BF16: GROUP * LANES * 2, NARROW: GROUP * LANES // 2}
"""Of 32 inputs without their scales."""
_SCALE_BYTES = {Q4: 4 * LANES, Q8: 2 * LANES, BF16: 0, NARROW: 4 * LANES}
GROUP_BYTES = {kind: _CODE_BYTES[kind] + _SCALE_BYTES[kind] for kind in _CODE_BYTES}
"""Bytes of 32 inputs of a lane block."""
_INPUT_BYTES = {Q4: 2, Q8: 2, BF16: 4, NARROW: 1}
"""Of a number of a row."""
_LINE = 64
_ARGUMENTS = 8
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
        out: ir.Value,
        out_stride: ir.Value,
        ahead: ir.Value,
    ) -> None:
        """out [rows, width * 16] float32 = x [rows, groups * 32] times the blocks at ``codes``.

        x is float32 for bfloat16 weights and packed (``rows.pack``) for codes, to 8 bits (``rows.pack_narrow``) for
        narrow products. ``ahead``: the block that is read next.
        """
        blocks = [e.at(codes, e.times(block_bytes, j)) for j in range(self.width)]
        rows = [e.at(x, e.times(x_stride, r)) for r in range(self.rows)]
        scales = [e.at(row, e.times(groups, _INPUT_BYTES[self.kind] * GROUP)) for row in rows]

        def group(g: ir.Value, *totals: ir.Value) -> Values:
            at = [e.at(block, e.times(g, GROUP_BYTES[self.kind])) for block in blocks]
            # The same place of the next block: the processor does not look ahead so far by itself.
            for j in range(self.width):
                behind = e.at(ahead, e.times(block_bytes, j), e.times(g, GROUP_BYTES[self.kind]))
                for line in range(0, GROUP_BYTES[self.kind], _LINE):
                    e.prefetch(e.at(behind, line))
            here = [e.at(row, e.times(g, GROUP * _INPUT_BYTES[self.kind])) for row in rows]
            if self.kind == BF16:
                return self._multiply(e, at, here, list(totals))
            own = [e.at(scale, e.times(g, 4)) for scale in scales]
            start = [WORD_ZERO] * len(totals)
            if self.kind == NARROW:
                firsts = [e.pair(e.at(scale, e.times(groups, 8))) for scale in own]
                start = [first for first in firsts for _ in blocks]
            sums = self._multiply(e, at, here, start)
            if self.kind == NARROW:
                sums = [e.joined(both) for both in sums]
            return self._scale(e, at, sums, list(totals), own, groups)

        totals = repeat(e.builder, groups, [e.zero] * (self.rows * self.width), group)
        for r in range(self.rows):
            for j in range(self.width):
                e.store(totals[r * self.width + j], e.at(out, e.times(out_stride, r), j * BYTES))

    def _multiply(self, e: Emitter, at: Values, rows: Values, sums: Values) -> Values:
        """Add 32 inputs: sums[r * width + j] += codes of block j times row r."""
        block_step, row_step = _CODE_BYTES[self.kind] // _PARTS, GROUP * _INPUT_BYTES[self.kind] // _PARTS

        def part(p: ir.Value, *sums: ir.Value) -> Values:
            blocks = [e.at(block, e.times(p, block_step)) for block in at]
            here = [e.at(row, e.times(p, row_step)) for row in rows]
            add = {BF16: self._add_floats, NARROW: self._add_quads}.get(self.kind, self._add_pairs)
            return add(e, blocks, here, list(sums))

        return repeat(e.builder, ir.Constant(ir.IntType(64), _PARTS), sums, part)

    def _add_floats(self, e: Emitter, blocks: Values, rows: Values, sums: Values) -> Values:
        for k in range(GROUP // _PARTS):
            weights = [e.load(e.at(block, k * LANES * 2), "bf16") for block in blocks]
            for r, row in enumerate(rows):
                value = e.splat(e.scalar(e.at(row, 4 * k)))
                for j, weight in enumerate(weights):
                    sums[r * self.width + j] = e.fma(value, weight, sums[r * self.width + j])
        return sums

    def _add_pairs(self, e: Emitter, blocks: Values, rows: Values, sums: Values) -> Values:
        words = [e.pairs(block, "i16") for block in blocks] if self.kind == Q4 else []
        for k in range(GROUP // _PARTS // 2):
            if self.kind == Q4:
                codes = [e.nibble(word, k) for word in words]
            else:
                codes = [e.pairs(e.at(block, k * LANES * 2), "i8") for block in blocks]
            for r, row in enumerate(rows):
                pair = e.pair(e.at(row, 4 * k))
                for j, code in enumerate(codes):
                    sums[r * self.width + j] = e.dot_pairs(code, pair, sums[r * self.width + j])
        return sums

    def _add_quads(self, e: Emitter, blocks: Values, rows: Values, sums: Values) -> Values:
        step = 4 * LANES
        for k in range(_CODE_BYTES[NARROW] // _PARTS // step):
            quads = [e.quads(e.at(block, k * step)) for block in blocks]
            for place in (0, 1):
                codes = [e.half_byte(both, place) for both in quads]
                for r, row in enumerate(rows):
                    quad = e.quad(e.at(row, 8 * k + 4 * place))
                    for j, code in enumerate(codes):
                        sums[r * self.width + j] = e.dot_quads(code, quad, sums[r * self.width + j])
        return sums

    def _scale(self, e: Emitter, at: Values, sums: Values, totals: Values, scales: Values, groups: ir.Value) -> Values:
        """totals += sums * scale of the codes * scale of the row, and, of 4 bits, shift * sum of the row."""
        for j, block in enumerate(at):
            scale = e.load(e.at(block, _CODE_BYTES[self.kind]), "f16")
            shift = e.load(e.at(block, _CODE_BYTES[self.kind] + 2 * LANES), "f16") if self.kind != Q8 else None
            for r, row_scale in enumerate(scales):
                place = r * self.width + j
                if shift is not None:
                    row_sum = e.splat(e.scalar(e.at(row_scale, e.times(groups, 4))))
                    totals[place] = e.fma(shift, row_sum, totals[place])
                both = e.builder.fmul(scale, e.splat(e.scalar(row_scale)))
                totals[place] = e.fma(both, e.whole(sums[place]), totals[place])
        return totals


def _call(codes, block_bytes, groups, x, x_stride, out, out_stride, ahead):  # type: ignore[no-untyped-def]
    _tile(codes, block_bytes, groups, x, x_stride, out, out_stride, ahead)  # type: ignore[name-defined]  # noqa: F821


def _compile(kind: int, rows: int, width: int = 1) -> int:
    """The address of a tile's machine code."""
    name = f"tile_{kind}_{rows}_{width}"
    tile = primitive(name, _ARGUMENTS, Tile(kind, rows, width))
    # The tile as a global of its own copy of the function: Numba keeps code under the function's name and the contents
    # of its closure, and an intrinsic in that is another one in every process.
    call = FunctionType(_call.__code__, {"_tile": tile, "__name__": __name__}, name)
    call.__qualname__ = name
    return cfunc(types.void(*[types.int64] * _ARGUMENTS), cache=True)(call).address


@functools.cache
def tile_addresses(kind: int) -> tuple[int, ...]:
    """Addresses of the tiles of 1, 2, 3 and 4 rows and of the one of one row and two blocks.

    Two blocks for a single row: as many sums at a time as the processor needs to be kept busy.
    """
    return (*(_compile(kind, rows) for rows in (1, 2, 3, 4)), _compile(kind, 1, 2))


@intrinsic
def call_tile(typing, tile, codes, block_bytes, groups, x, x_stride, out, out_stride, ahead):  # type: ignore[no-untyped-def]
    """Call the tile at an address."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * _ARGUMENTS)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (_ARGUMENTS + 1)), generate
