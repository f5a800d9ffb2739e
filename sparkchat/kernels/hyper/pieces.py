"""What a row's programs leave for each other, and what they make of it: the same steps however they meet."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word(x, turn):
    """x float32 and the number of the round in one word"""
    low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (turn.to(tl.int64) << 32) | low


@triton.jit
def leave_sums(
    xs, fn, sums_ptr, program, turn,
    STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr, NUMBERS: tl.constexpr,
    READ: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    # This program's share of the products with the stream weights, and of those of every two streams.
    number = tl.arange(0, NUMBERS)
    total = fn[0] * xs[0][None, :]
    for stream in tl.static_range(1, STREAMS):
        total = tl.fma(fn[stream], tl.zeros_like(total) + xs[stream][None, :], total)
    words = word(tl.sum(total, axis=1), turn)
    tl.store(sums_ptr + program * READ + number, words, mask=number < STREAMS)
    if COUNT > STREAMS:
        to = sums_ptr + PROGRAMS * READ + program * MIX + number - STREAMS
        tl.store(to, words, mask=(number >= STREAMS) & (number < COUNT))
    pair = tl.arange(0, STREAMS * STREAMS)
    first, second = pair // STREAMS, pair % STREAMS
    left = tl.zeros((STREAMS * STREAMS, COLUMNS), tl.float32) + xs[0][None, :]
    right = left
    for stream in tl.static_range(1, STREAMS):
        left = tl.where((first == stream)[:, None], xs[stream][None, :], left)
        right = tl.where((second == stream)[:, None], xs[stream][None, :], right)
    at = STREAMS + first * (2 * STREAMS - 1 - first) // 2 + second
    tl.store(sums_ptr + program * READ + at, word(tl.sum(left * right, axis=1), turn), mask=first <= second)


@triton.jit
def some_late(words, number, turn, USED: tl.constexpr):
    late = (number < USED) & ((words >> 32).to(tl.int32) != turn)
    return tl.max(tl.max(late.to(tl.int32), axis=1), axis=0) != 0


@triton.jit
def gather(
    sums_ptr, turn, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, MEETING: tl.constexpr
):  # fmt: skip
    """[WIDTH] float32: the sums of all programs, added"""
    number = tl.arange(0, WIDTH)[None, :]
    at = sums_ptr + tl.arange(0, PROGRAMS)[:, None] * WIDTH + number
    # Other multiprocessors write these: never from the cache of this one.
    words = tl.load(at, mask=number < USED, other=0, volatile=True)
    if MEETING == 2:
        while some_late(words, number, turn, USED):
            words = tl.load(at, mask=number < USED, other=0, volatile=True)
    return tl.sum(words.to(tl.int32).to(tl.float32, bitcast=True), axis=0)


@triton.jit
def _gather_both(
    sums_ptr, turn, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr,
    MEETING: tl.constexpr,
):  # fmt: skip
    """As ``gather`` of what is read of a row, and of its mix: both are on their way at once."""
    USED: tl.constexpr = STREAMS + STREAMS * (STREAMS + 1) // 2
    MIXED: tl.constexpr = STREAMS + STREAMS * STREAMS
    program, number, other = tl.arange(0, PROGRAMS)[:, None], tl.arange(0, READ)[None, :], tl.arange(0, MIX)[None, :]
    at, beside = sums_ptr + program * READ + number, sums_ptr + PROGRAMS * READ + program * MIX + other
    words = tl.load(at, mask=number < USED, other=0, volatile=True)
    mixed = tl.load(beside, mask=other < MIXED, other=0, volatile=True)
    if MEETING == 2:
        while some_late(words, number, turn, USED) | some_late(mixed, other, turn, MIXED):
            words = tl.load(at, mask=number < USED, other=0, volatile=True)
            mixed = tl.load(beside, mask=other < MIXED, other=0, volatile=True)
    totals = tl.sum(words.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
    return totals, tl.sum(mixed.to(tl.int32).to(tl.float32, bitcast=True), axis=0)


@triton.jit
def arrived(sums_ptr, turn, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr):
    """turn, when all programs have left the sums of that round"""
    number = tl.arange(0, WIDTH)[None, :]
    at = sums_ptr + tl.arange(0, PROGRAMS)[:, None] * WIDTH + number
    words = tl.load(at, mask=number < USED, other=0, volatile=True)
    while some_late(words, number, turn, USED):
        words = tl.load(at, mask=number < USED, other=0, volatile=True)
    # Of the words themselves: a loop whose outcome is not used is more than the compiler takes.
    turns = tl.where(number < USED, (words >> 32).to(tl.int32), -0x7FFFFFFF - 1)
    return tl.max(tl.max(turns, axis=1), axis=0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def one_of(numbers, index, which):
    return tl.sum(tl.where(index == which, numbers, 0.0), axis=0)


@triton.jit
def inverse(x, FAST: tl.constexpr):
    """1 / x of a normal number, to one unit in the last place: a division's care for all others takes as long again."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / x


@triton.jit
def balance(c, eps, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr):
    """c, STREAMS^2 scalars, row after row: softmax of each row, then columns and rows scaled in turn, columns last.

    Scalars, which every thread has for itself: nothing is said between threads in forty steps of one after the other.
    """
    made = ()
    for j in tl.static_range(STREAMS):
        most = c[j * STREAMS]
        for k in tl.static_range(1, STREAMS):
            most = tl.maximum(most, c[j * STREAMS + k])
        total = 0.0
        row = ()
        for k in tl.static_range(STREAMS):
            row = row + (tl.exp(c[j * STREAMS + k] - most),)  # noqa: RUF005
            total += row[k]
        for k in tl.static_range(STREAMS):
            made = made + (row[k] / total + eps,)  # noqa: RUF005
    c = scale_columns(made, eps, STREAMS, FAST)
    for _ in range(ITERATIONS - 1):
        c = scale_columns(scale_rows(c, eps, STREAMS, FAST), eps, STREAMS, FAST)
    return c


@triton.jit
def scale_rows(c, eps, STREAMS: tl.constexpr, FAST: tl.constexpr):
    made = ()
    for j in tl.static_range(STREAMS):
        total = c[j * STREAMS]
        for k in tl.static_range(1, STREAMS):
            total += c[j * STREAMS + k]
        factor = inverse(total + eps, FAST)
        for k in tl.static_range(STREAMS):
            made = made + (c[j * STREAMS + k] * factor,)  # noqa: RUF005
    return made


@triton.jit
def scale_columns(c, eps, STREAMS: tl.constexpr, FAST: tl.constexpr):
    factors = ()
    for k in tl.static_range(STREAMS):
        total = c[k]
        for j in tl.static_range(1, STREAMS):
            total += c[j * STREAMS + k]
        factors = factors + (inverse(total + eps, FAST),)  # noqa: RUF005
    made = ()
    for j in tl.static_range(STREAMS):
        for k in tl.static_range(STREAMS):
            made = made + (c[j * STREAMS + k] * factors[k],)  # noqa: RUF005
    return made


@triton.jit
def rate_of(totals, index, rms_eps, SIZE: tl.constexpr, STREAMS: tl.constexpr, READ: tl.constexpr):
    """What products with a row's streams are multiplied by, from the squares among its sums."""
    squares = tl.zeros((READ,), tl.float32)
    for stream in tl.static_range(STREAMS):
        squares = tl.where(index == STREAMS + stream * (2 * STREAMS + 1 - stream) // 2, totals, squares)
    return tl.rsqrt(tl.sum(squares, axis=0) / (STREAMS * SIZE) + rms_eps)


@triton.jit
def numbers_of(
    sums_ptr, base_ptr, scale_ptr, turn, rms_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr,
    MEETING: tl.constexpr,
):  # fmt: skip
    """[MIX] the numbers that the next mix is made of."""
    USED: tl.constexpr = STREAMS + STREAMS * STREAMS
    index = tl.arange(0, MIX)
    inside = index < USED
    scale = tl.load(scale_ptr + STREAMS + index, mask=inside, other=0.0)
    base = tl.load(base_ptr + STREAMS + index, mask=inside, other=0.0)
    totals, numbers = _gather_both(sums_ptr, turn, STREAMS, PROGRAMS, READ, MIX, MEETING)
    rate = rate_of(totals, tl.arange(0, READ), rms_eps, SIZE, STREAMS, READ)
    return tl.fma(numbers * rate, scale, base)


@triton.jit
def finish_columns(
    row, column, before, factors, totals, scale, base, out_ptr, taken_ptr, rms_eps, eps, norm_eps,
    TYPE: tl.constexpr, SIZE: tl.constexpr, STREAMS: tl.constexpr, READ: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr,
):  # fmt: skip
    """What is read of a row in a program's columns, normed. before: of every stream float32, as they are stored."""
    index = tl.arange(0, READ)
    rate = rate_of(totals, index, rms_eps, SIZE, STREAMS, READ)
    reads = sigmoid(tl.fma(totals * rate, scale, base)) + eps
    read = ()
    for stream in tl.static_range(STREAMS):
        read = read + (one_of(reads, index, stream),)  # noqa: RUF005
    x = read[0] * before[0]
    for stream in tl.static_range(1, STREAMS):
        x = tl.fma(tl.zeros_like(x) + read[stream], before[stream], x)
    x = x.to(TYPE)
    if HAS_TAKEN:
        tl.store(taken_ptr + row * SIZE + column, x.to(taken_ptr.dtype.element_ty))
    if HAS_OUT:
        shares = tl.zeros((READ,), tl.float32)
        for first in tl.static_range(STREAMS):
            for second in tl.static_range(first, STREAMS):
                share = read[first] * read[second]
                if first != second:
                    share = 2.0 * share
                shares = tl.where(index == STREAMS + first * (2 * STREAMS - 1 - first) // 2 + second, share, shares)
        squared = tl.sum(tl.where(index >= STREAMS, shares * totals, 0.0), axis=0)
        out = x.to(tl.float32) * tl.rsqrt(tl.maximum(squared, 0.0) / SIZE + norm_eps) * factors
        tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty))


@triton.jit
def merge(mix, before, brought, TYPE: tl.constexpr, STREAMS: tl.constexpr):
    """The streams behind a sub-block that brought [COLUMNS], as they are stored; mix: S + S^2 scalars."""
    behind = ()
    for stream in tl.static_range(STREAMS):
        x = mix[stream] * brought
        for source in tl.static_range(STREAMS):
            # What this stream behind takes of that one before: the combination is used transposed.
            share = tl.zeros_like(x) + mix[STREAMS + source * STREAMS + stream]
            x = tl.fma(share, before[source].to(tl.float32), x)
        behind = behind + (x.to(TYPE),)  # noqa: RUF005
    return behind
