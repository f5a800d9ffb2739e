"""What is done to single rows and heads: norms, softmax, scores, mixing. One call is one row or one head."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparkchat.kernels.cpu.emit import F32, I32, I64, LANES, Emitter, repeat

BYTES = 4 * LANES
"""Of a vector in float32."""
GROUP = 32
"""Inputs that share a scale."""
GROUP_ROW_BYTES = 2 * GROUP + 8
"""Of 32 inputs in a packed row."""
NARROW_ROW_BYTES = GROUP + 12
"""Of 32 inputs in a row packed to 8 bits."""
LARGEST, NARROW_LARGEST = 32767.0, 127.0
_SIZES = {"f32": 4, "bf16": 2}


def primitive(
    name: str, count: int, body: Callable[..., ir.Value | None], result: Any = types.void, floats: tuple[int, ...] = ()
) -> Any:
    """An intrinsic of ``count`` int64 arguments, those at ``floats`` float32, written by ``body(emitter, *values)``.

    It becomes one function of a module however often it is called: copies of tiles would fill the processor's
    instruction cache, and take long to compile.
    """
    kinds = [types.float32 if i in floats else types.int64 for i in range(count)]
    is_void = result is types.void
    shape = ir.FunctionType(ir.VoidType() if is_void else F32, [F32 if i in floats else I64 for i in range(count)])

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, shape, f"sparkchat_{name}")
        if function.is_declaration:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            value = body(Emitter(inner), *function.args)
            inner.ret_void() if value is None else inner.ret(value)
        value = builder.call(function, args)
        return context.get_dummy_value() if is_void else value

    def typed(typing: Any, *given: Any) -> Any:
        return result(*kinds), generate

    # Numba goes by the parameters' names.
    names = ["typing", *(f"value_{i}" for i in range(count))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _norm(e: Emitter, x: ir.Value, weight: ir.Value, eps: ir.Value, blocks: ir.Value, out: ir.Value) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over blocks * 16 numbers; out may be x."""
    b = e.builder

    def square(i: ir.Value, sums: ir.Value) -> list[ir.Value]:
        value = e.load(e.at(x, e.times(i, BYTES)))
        return [e.fma(value, value, sums)]

    (sums,) = repeat(b, blocks, [e.zero], square)
    size = b.sitofp(e.times(blocks, LANES), F32)
    mean = b.fadd(b.fdiv(e.total(sums), size), eps)
    root = b.fdiv(e.splat(1.0), e.root(e.splat(mean)))

    def scale(i: ir.Value) -> list[ir.Value]:
        offset = e.times(i, BYTES)
        e.store(b.fmul(b.fmul(e.load(e.at(x, offset)), root), e.load(e.at(weight, offset))), e.at(out, offset))
        return []

    repeat(b, blocks, [], scale)


def _pack(e: Emitter, x: ir.Value, groups: ir.Value, out: ir.Value, bits: int = 16) -> None:
    """A row as codes are multiplied with: 16 bit numbers, then the scale of each 32 of them, then the sums of each 32.

    The largest of 32 becomes 32767: a rounding of 1 part in 65,000 of it, a hundredth of bfloat16's. What is no number
    makes its scale none.

    8 bit numbers have 127 and, behind the sums, what the sums of codes begin with for each 32: two numbers of 16 bits,
    which together are the numbers' sum times -8.
    """
    b = e.builder
    largest, size = (LARGEST, 2) if bits == 16 else (NARROW_LARGEST, 1)
    scales = e.at(out, e.times(groups, size * GROUP))
    sums = e.at(scales, e.times(groups, 4))

    def one(g: ir.Value) -> list[ir.Value]:
        at = e.at(x, e.times(g, 2 * BYTES))
        halves = [e.load(at), e.load(e.at(at, BYTES))]
        sizes = [e.larger(half, b.fneg(half)) for half in halves]
        most = e.across(e.larger(*sizes), e.larger)
        total = e.total(b.fadd(*halves))
        # Neither infinity nor what is no number survives as 0.
        damage = e.total(b.fmul(b.fadd(*halves), e.zero))
        scale = b.fadd(b.fdiv(most, F32(largest)), damage)
        # Below this, largest / most is infinite or nearly so; nothing that follows would see such numbers.
        is_nothing = b.fcmp_ordered("<", most, F32(1e-30))
        inverse = e.splat(b.select(is_nothing, F32(0.0), b.fdiv(F32(largest), most)))
        near = [
            e.store_rounded(b.fmul(half, inverse), e.at(out, e.times(g, size * GROUP), i * size * LANES), bits)
            for i, half in enumerate(halves)
        ]
        for place, value in ((scales, scale), (sums, total)):
            b.store(value, b.inttoptr(e.at(place, e.times(g, 4)), F32.as_pointer()))
        if bits == 8:
            first = b.mul(e.across(b.add(*near), b.add), I32(-4))
            both = b.or_(b.shl(first, I32(16)), b.and_(first, I32(0xFFFF)))
            b.store(both, b.inttoptr(e.at(sums, e.times(groups, 4), e.times(g, 4)), I32.as_pointer()))
        return []

    repeat(b, groups, [], one)


def _pack_narrow(e: Emitter, x: ir.Value, groups: ir.Value, out: ir.Value) -> None:
    _pack(e, x, groups, out, 8)


def _scores(kind: str, heads: int) -> Callable[..., None]:
    def body(
        e: Emitter,
        q: ir.Value,
        q_stride: ir.Value,
        keys: ir.Value,
        count: ir.Value,
        blocks: ir.Value,
        scale: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
    ) -> None:
        """out[h, t] = scale * q[h] . keys[t] for ``count`` keys, one behind the other; every key is read once."""
        b = e.builder
        stride = e.times(blocks, LANES * _SIZES[kind])
        queries = [e.at(q, e.times(q_stride, h)) for h in range(heads)]

        def one(t: ir.Value) -> list[ir.Value]:
            key = e.at(keys, b.mul(t, stride))

            def multiply(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                part = e.load(e.at(key, e.times(i, LANES * _SIZES[kind])), kind)
                here = [e.load(e.at(query, e.times(i, BYTES))) for query in queries]
                return [e.fma(query, part, total) for query, total in zip(here, sums, strict=True)]

            for h, total in enumerate(repeat(b, blocks, [e.zero] * heads, multiply)):
                at = e.at(out, e.times(out_stride, h), e.times(t, 4))
                b.store(b.fmul(e.total(total), scale), b.inttoptr(at, F32.as_pointer()))
            return []

        repeat(b, count, [], one)

    return body


def _softmax(e: Emitter, scores: ir.Value, blocks: ir.Value) -> ir.Value:
    """scores = e^(scores - their largest), in place; returns the sum. What fills up the last block is -inf."""
    b = e.builder

    def larger(i: ir.Value, most: ir.Value) -> list[ir.Value]:
        return [e.larger(e.load(e.at(scores, e.times(i, BYTES))), most)]

    (most,) = repeat(b, blocks, [e.splat(float("-inf"))], larger)
    most = e.splat(e.across(most, e.larger))

    def power(i: ir.Value, sums: ir.Value) -> list[ir.Value]:
        at = e.at(scores, e.times(i, BYTES))
        value = e.exp(b.fsub(e.load(at), most))
        e.store(value, at)
        return [b.fadd(sums, value)]

    (sums,) = repeat(b, blocks, [e.zero], power)
    return e.total(sums)


def _mix(kind: str, heads: int, width: int) -> Callable[..., None]:
    def body(
        e: Emitter,
        weights: ir.Value,
        weight_stride: ir.Value,
        values: ir.Value,
        count: ir.Value,
        stride: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
    ) -> None:
        """out[h, :width * 16] += sum over t of weights[h, t] * values[t]; ``stride`` from one value to the next."""
        b = e.builder
        size = LANES * _SIZES[kind]
        outs = [e.at(out, e.times(out_stride, h), i * BYTES) for h in range(heads) for i in range(width)]

        def add(t: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            value = e.at(values, b.mul(t, stride))
            parts = [e.load(e.at(value, i * size), kind) for i in range(width)]
            new = []
            for h in range(heads):
                weight = e.splat(e.scalar(e.at(weights, e.times(weight_stride, h), e.times(t, 4))))
                new += [e.fma(weight, part, sums[h * width + i]) for i, part in enumerate(parts)]
            return new

        for at, total in zip(outs, repeat(b, count, [e.load(at) for at in outs], add), strict=True):
            e.store(total, at)

    return body


def _scale(e: Emitter, x: ir.Value, blocks: ir.Value, factor: ir.Value) -> None:
    def multiply(i: ir.Value) -> list[ir.Value]:
        at = e.at(x, e.times(i, BYTES))
        e.store(e.builder.fmul(e.load(at), e.splat(factor)), at)
        return []

    repeat(e.builder, blocks, [], multiply)


def _gate(e: Emitter, gate: ir.Value, up: ir.Value, out: ir.Value) -> None:
    """out = silu(gate) * up, 16 numbers."""
    b = e.builder
    value = e.load(gate)
    grown = b.fadd(e.splat(1.0), e.exp(b.fneg(value)))
    e.store(b.fmul(b.fdiv(value, grown), e.load(up)), out)


def _add(e: Emitter, x: ir.Value, out: ir.Value) -> None:
    """out += x, 16 numbers."""
    e.store(e.builder.fadd(e.load(out), e.load(x)), out)


def _copy(kind: str) -> Callable[..., None]:
    def body(e: Emitter, x: ir.Value, blocks: ir.Value, out: ir.Value) -> None:
        def move(i: ir.Value) -> list[ir.Value]:
            e.store(e.load(e.at(x, e.times(i, BYTES))), e.at(out, e.times(i, LANES * _SIZES[kind])), kind)
            return []

        repeat(e.builder, blocks, [], move)

    return body


norm = primitive("norm", 5, _norm, floats=(2,))
pack = primitive("pack", 3, _pack)
pack_narrow = primitive("pack_narrow", 3, _pack_narrow)
scores_f32_1, scores_f32_2, scores_f32_3, scores_f32_4 = (
    primitive(f"scores_f32_{h}", 8, _scores("f32", h), floats=(5,)) for h in (1, 2, 3, 4)
)
scores_bf16_1, scores_bf16_2, scores_bf16_3, scores_bf16_4 = (
    primitive(f"scores_bf16_{h}", 8, _scores("bf16", h), floats=(5,)) for h in (1, 2, 3, 4)
)
softmax = primitive("softmax", 2, _softmax, types.float32)
mix_f32_1, mix_f32_2, mix_f32_3, mix_f32_4 = (primitive(f"mix_f32_{h}", 7, _mix("f32", h, 1)) for h in (1, 2, 3, 4))
mix_bf16_1, mix_bf16_2, mix_bf16_3, mix_bf16_4 = (
    primitive(f"mix_bf16_{h}", 7, _mix("bf16", h, 1)) for h in (1, 2, 3, 4)
)
scale = primitive("scale", 3, _scale, floats=(2,))
gate = primitive("gate", 3, _gate)
add = primitive("add", 2, _add)
copy_f32 = primitive("copy_f32", 3, _copy("f32"))
copy_bf16 = primitive("copy_bf16", 3, _copy("bf16"))
