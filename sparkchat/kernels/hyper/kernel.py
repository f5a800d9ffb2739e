"""Residual streams between two sub-blocks: the columns are shared out among programs.

The first half merges a program's columns of a row and multiplies them by the stream weights, which are in registers
before the kernel waits for the sub-block's output. The second half adds the sums of all programs, in order, and makes
of them what is read of each stream; a program then finishes its own columns, and one of them the next combination.

The sum of squares that the norm needs is found without a second meeting: among the sums are those of the products of
every two streams, and what is read is a combination of streams. It is the sum of what is read before rounding; over
thousands of columns the roundings, which go up as often as down, cancel to a fraction of one of them.

Between the halves every program of a row must have left its sums. Either all programs are on the card at once and wait
for each other (``Meeting``), or each half is a launch. All ways give the same bits, and a row's program is the same
whatever rows are beside it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.hyper.plan import MOST_STREAMS, PLAN, ConnectPlan, Meeting, rows_of_program, words_of
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

if TYPE_CHECKING:
    from sparkchat.kernels.hyper import HyperWorkspace, PartList, StreamWeights

MULTIPROCESSORS = 132
"""Of an H200: where kernels are compiled without a card."""
_MOST_ROWS_EACH = 4
"""Of a program whose rows come one after the other; of more, two launches were faster (64 rows on an H200)."""
_ROWS_APART = 8
"""Rows of a program where the halves are launches: the weights are read again for every so many."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _merge(
    row, column, streams_ptr, output_ptr, mix_ptr, part_stride, output_stride,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """The streams behind the sub-block, as they are stored: a [COLUMNS] of their type for each.

    What is loaded is on its way together, addresses first: a load that waits for one holds up all behind it.
    """
    ats = ()
    for part in tl.static_range(PARTS):
        if PLACED is None:
            at = output_ptr + part * part_stride
        else:
            at = tl.load(output_ptr + part).to(tl.pointer_type(PLACED))
        ats = ats + (at,)  # noqa: RUF005
    before = ()
    for stream in tl.static_range(STREAMS):
        before = before + (tl.load(streams_ptr + (row * STREAMS + stream) * SIZE + column),)  # noqa: RUF005
    if PARTS == 0:
        return before
    mix = ()
    for number in tl.static_range(STREAMS + STREAMS * STREAMS):
        mix = mix + (tl.load(mix_ptr + row * (STREAMS + STREAMS * STREAMS) + number),)  # noqa: RUF005
    brought = tl.zeros((COLUMNS,), tl.float32)
    for part in tl.static_range(PARTS):
        # Another device may have written it: not from the cache of this multiprocessor.
        where = ats[part] + row * output_stride + column
        brought += tl.load(where, cache_modifier=".cg").to(tl.float32)
    behind = ()
    for stream in tl.static_range(STREAMS):
        x = mix[stream] * brought
        for source in tl.static_range(STREAMS):
            # What this stream behind takes of that one before: the combination is used transposed.
            share = tl.zeros_like(x) + mix[STREAMS + source * STREAMS + stream]
            x = tl.fma(share, before[source].to(tl.float32), x)
        behind = behind + (x.to(streams_ptr.dtype.element_ty),)  # noqa: RUF005
    return behind


@triton.jit
def _word(x, turn):
    """x float32 and the number of the round in one word"""
    low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (turn.to(tl.int64) << 32) | low


@triton.jit
def _leave_sums(
    xs, fn, sums_ptr, program, turn,
    STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr, NUMBERS: tl.constexpr,
    READ: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    # This program's share of the products with the stream weights, and of those of every two streams.
    number = tl.arange(0, NUMBERS)
    total = fn[0] * xs[0][None, :]
    for stream in tl.static_range(1, STREAMS):
        total = tl.fma(fn[stream], tl.zeros_like(total) + xs[stream][None, :], total)
    words = _word(tl.sum(total, axis=1), turn)
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
    tl.store(sums_ptr + program * READ + at, _word(tl.sum(left * right, axis=1), turn), mask=first <= second)


@triton.jit
def _some_late(words, number, turn, USED: tl.constexpr):
    late = (number < USED) & ((words >> 32).to(tl.int32) != turn)
    return tl.max(tl.max(late.to(tl.int32), axis=1), axis=0) != 0


@triton.jit
def _gather(
    sums_ptr, turn, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, MEETING: tl.constexpr
):  # fmt: skip
    """[WIDTH] float32: the sums of all programs, added"""
    number = tl.arange(0, WIDTH)[None, :]
    at = sums_ptr + tl.arange(0, PROGRAMS)[:, None] * WIDTH + number
    # Other multiprocessors write these: never from the cache of this one.
    words = tl.load(at, mask=number < USED, other=0, volatile=True)
    if MEETING == 2:
        while _some_late(words, number, turn, USED):
            words = tl.load(at, mask=number < USED, other=0, volatile=True)
    return tl.sum(words.to(tl.int32).to(tl.float32, bitcast=True), axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _one(numbers, index, which):
    return tl.sum(tl.where(index == which, numbers, 0.0), axis=0)


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """1 / x of a normal number, to one unit in the last place: a division's care for all others takes as long again."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / x


@triton.jit
def _balance(c, eps, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr):
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
    c = _scale_columns(made, eps, STREAMS, FAST)
    for _ in range(ITERATIONS - 1):
        c = _scale_columns(_scale_rows(c, eps, STREAMS, FAST), eps, STREAMS, FAST)
    return c


@triton.jit
def _scale_rows(c, eps, STREAMS: tl.constexpr, FAST: tl.constexpr):
    made = ()
    for j in tl.static_range(STREAMS):
        total = c[j * STREAMS]
        for k in tl.static_range(1, STREAMS):
            total += c[j * STREAMS + k]
        factor = _inverse(total + eps, FAST)
        for k in tl.static_range(STREAMS):
            made = made + (c[j * STREAMS + k] * factor,)  # noqa: RUF005
    return made


@triton.jit
def _scale_columns(c, eps, STREAMS: tl.constexpr, FAST: tl.constexpr):
    factors = ()
    for k in tl.static_range(STREAMS):
        total = c[k]
        for j in tl.static_range(1, STREAMS):
            total += c[j * STREAMS + k]
        factors = factors + (_inverse(total + eps, FAST),)  # noqa: RUF005
    made = ()
    for j in tl.static_range(STREAMS):
        for k in tl.static_range(STREAMS):
            made = made + (c[j * STREAMS + k] * factors[k],)  # noqa: RUF005
    return made


@triton.jit
def _rate(totals, index, rms_eps, SIZE: tl.constexpr, STREAMS: tl.constexpr, READ: tl.constexpr):
    """What products with a row's streams are multiplied by, from the squares among its sums."""
    squares = tl.zeros((READ,), tl.float32)
    for stream in tl.static_range(STREAMS):
        squares = tl.where(index == STREAMS + stream * (2 * STREAMS + 1 - stream) // 2, totals, squares)
    return tl.rsqrt(tl.sum(squares, axis=0) / (STREAMS * SIZE) + rms_eps)


@triton.jit
def _finish_mix(
    sums_ptr, base_ptr, scale_ptr, mix_ptr, turn, rms_eps, eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr,
    ITERATIONS: tl.constexpr, MEETING: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    USED: tl.constexpr = STREAMS + STREAMS * STREAMS
    index = tl.arange(0, MIX)
    inside = index < USED
    scale = tl.load(scale_ptr + STREAMS + index, mask=inside, other=0.0)
    base = tl.load(base_ptr + STREAMS + index, mask=inside, other=0.0)
    totals = _gather(sums_ptr, turn, PROGRAMS, READ, STREAMS + STREAMS * (STREAMS + 1) // 2, MEETING)
    rate = _rate(totals, tl.arange(0, READ), rms_eps, SIZE, STREAMS, READ)
    numbers = _gather(sums_ptr + PROGRAMS * READ, turn, PROGRAMS, MIX, USED, MEETING) * rate * scale + base
    tl.store(mix_ptr + index, 2.0 * _sigmoid(numbers), mask=index < STREAMS)
    c = ()
    for place in tl.static_range(STREAMS * STREAMS):
        c = c + (_one(numbers, index, STREAMS + place),)  # noqa: RUF005
    c = _balance(c, eps, STREAMS, ITERATIONS, FAST)
    for place in tl.static_range(STREAMS * STREAMS):
        tl.store(mix_ptr + STREAMS + place, c[place])


@triton.jit
def _finish_columns(
    row, column, streams_ptr, base_ptr, scale_ptr, sums_ptr, norm_ptr, out_ptr, taken_ptr, turn, rms_eps, eps, norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, MEETING: tl.constexpr,
):  # fmt: skip
    """What is read of a row in a program's columns, normed."""
    PAIRS: tl.constexpr = STREAMS * (STREAMS + 1) // 2
    index = tl.arange(0, READ)
    scale = tl.load(scale_ptr + index, mask=index < STREAMS, other=0.0)
    base = tl.load(base_ptr + index, mask=index < STREAMS, other=0.0)
    before = ()
    for stream in tl.static_range(STREAMS):
        at = streams_ptr + (row * STREAMS + stream) * SIZE + column
        before = before + (tl.load(at, cache_modifier=".cg").to(tl.float32),)  # noqa: RUF005
    if HAS_OUT:
        factors = tl.load(norm_ptr + column)
    totals = _gather(sums_ptr, turn, PROGRAMS, READ, STREAMS + PAIRS, MEETING)
    rate = _rate(totals, index, rms_eps, SIZE, STREAMS, READ)
    reads = _sigmoid(totals * rate * scale + base) + eps
    read = ()
    for stream in tl.static_range(STREAMS):
        read = read + (_one(reads, index, stream),)  # noqa: RUF005
    x = read[0] * before[0]
    for stream in tl.static_range(1, STREAMS):
        x = tl.fma(tl.zeros_like(x) + read[stream], before[stream], x)
    x = x.to(streams_ptr.dtype.element_ty)
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
def _turn(arrived_ptr, PROGRAMS: tl.constexpr):
    """The number of a row's round, never 0: programs are counted when they need it no more, so it is the same for all
    until the round is over. A round counts twice as many as there are programs; the count only grows, and wraps."""
    return (tl.load(arrived_ptr, volatile=True) & (-2 * PROGRAMS)) + 1


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _connect_streams(
    streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, base_ptr, scale_ptr, sums_ptr, arrived_ptr,
    next_mix_ptr, norm_ptr, out_ptr, taken_ptr, num_rows, rows_each, part_stride, output_stride, tap_stride, rms_eps,
    eps, norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr,
    NUMBERS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr,
    PLACED: tl.constexpr, HAS_TAP: tl.constexpr, HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, HAS_MIX: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, MEETING: tl.constexpr, IS_APART: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program more where the next combination is made apart; else the program does that whose number is the row's.
    program = tl.program_id(0)
    is_mixing = program == PROGRAMS
    column = tl.where(is_mixing, 0, program) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    ROOM: tl.constexpr = PROGRAMS * (READ + MIX)
    COUNTED: tl.constexpr = 1 if IS_APART else 2
    if FIRST:
        # [NUMBERS, COLUMNS] of each stream; weights never change, so before the wait.
        number = tl.arange(0, NUMBERS)[:, None]
        fn = ()
        for stream in tl.static_range(STREAMS):
            at = fn_ptr + number * (STREAMS * SIZE) + stream * SIZE + column[None, :]
            fn = fn + (tl.load(at, mask=(number < COUNT) & (program < PROGRAMS), other=0.0),)  # noqa: RUF005
    wait(PDL)
    if FIRST:  # noqa: SIM102
        if program < PROGRAMS:
            for place in range(end - begin):
                row = begin.to(tl.int64) + place
                turn = tl.cast(0, tl.int32)
                if MEETING == 2:
                    turn = _turn(arrived_ptr + row, PROGRAMS)
                behind = _merge(
                    row, column, streams_ptr, output_ptr, mix_ptr, part_stride, output_stride, SIZE, STREAMS, COLUMNS,
                    PARTS, PLACED,
                )  # fmt: skip
                xs = ()
                for stream in tl.static_range(STREAMS):
                    xs = xs + (behind[stream].to(tl.float32),)  # noqa: RUF005
                _leave_sums(
                    xs, fn, sums_ptr + row * ROOM, program, turn, STREAMS, COLUMNS, PROGRAMS, COUNT, NUMBERS, READ, MIX
                )  # fmt: skip
                if PARTS > 0:
                    for stream in tl.static_range(STREAMS):
                        tl.store(merged_ptr + (row * STREAMS + stream) * SIZE + column, behind[stream])
                if HAS_TAP:
                    mean = xs[0]
                    for stream in tl.static_range(1, STREAMS):
                        mean += xs[stream]
                    mean = mean * (1.0 / STREAMS)
                    tl.store(tap_ptr + row * tap_stride + column, mean.to(tap_ptr.dtype.element_ty))
                if MEETING == 1:
                    # All threads of this program have left their sums when it is counted.
                    tl.debug_barrier()
                    tl.atomic_add(arrived_ptr + row, COUNTED, sem="release", scope="gpu")
    if SECOND:
        if PARTS > 0:
            read_ptr = merged_ptr
            # Threads read columns that others of this program have written.
            tl.debug_barrier()
        else:
            read_ptr = streams_ptr
        for place in range(end - begin):
            row = begin.to(tl.int64) + place
            turn = tl.cast(0, tl.int32)
            if MEETING == 1:
                if is_mixing:
                    tl.atomic_add(arrived_ptr + row, PROGRAMS, sem="relaxed", scope="gpu")
                while tl.atomic_add(arrived_ptr + row, 0, sem="acquire", scope="gpu") % (2 * PROGRAMS) != 0:
                    pass
                tl.debug_barrier()
            if MEETING == 2:
                turn = _turn(arrived_ptr + row, PROGRAMS)
            if program < PROGRAMS:
                _finish_columns(
                    row, column, read_ptr, base_ptr, scale_ptr, sums_ptr + row * ROOM, norm_ptr, out_ptr, taken_ptr,
                    turn, rms_eps, eps, norm_eps, SIZE, STREAMS, COLUMNS, PROGRAMS, READ, HAS_OUT, HAS_TAKEN, MEETING,
                )  # fmt: skip
            if HAS_MIX:
                if IS_APART:
                    mixes = is_mixing
                else:
                    mixes = row % PROGRAMS == program
                if mixes:
                    to = next_mix_ptr + row * (STREAMS + STREAMS * STREAMS)
                    _finish_mix(
                        sums_ptr + row * ROOM, base_ptr, scale_ptr, to, turn, rms_eps, eps, SIZE, STREAMS, PROGRAMS,
                        READ, MIX, ITERATIONS, MEETING, FAST,
                    )  # fmt: skip
            if MEETING == 2:
                tl.atomic_add(
                    arrived_ptr + row, tl.where(is_mixing, PROGRAMS, COUNTED), sem="relaxed", scope="gpu"
                )  # fmt: skip


def launch_connect_streams(
    streams: Tensor,
    weights: StreamWeights,
    workspace: HyperWorkspace,
    output: Tensor | PartList | None,
    mix: Tensor | None,
    merged: Tensor | None,
    next_mix: Tensor | None,
    norm: Tensor | None,
    norm_eps: float,
    out: Tensor | None,
    taken: Tensor | None,
    tap: Tensor | None,
    plan: ConnectPlan | None = None,
) -> None:
    """See ``connect_streams``. ``plan`` stands in for the tuned one; the workspace must be made for it."""
    _check(streams, weights, merged, next_mix, norm, out, taken)
    num_rows, size, width = streams.shape
    plan = (plan or PLAN).of_width(width)
    programs, count = plan.programs, weights.fn.shape[0]
    read, mixed = words_of(size)
    if num_rows > workspace.sums.shape[0] or workspace.sums.shape[1] != programs * (read + mixed):
        raise ValueError(f"the workspace of {tuple(workspace.sums.shape)} has no room for {num_rows} rows of {width}")
    rows_each = None
    # The interpreter runs one program after the other: none could wait for the others.
    if plan.meeting != Meeting.LAUNCH and (streams.is_cuda or not triton.knobs.runtime.interpret):
        rows_each = rows_of_program(num_rows, plan, _multiprocessors(streams.device))
    parts, part_stride, row_stride, source, placed = _parts_of(output, streams)

    has_mix = next_mix is not None and not weights.is_head

    def start(is_first: bool, is_second: bool, meeting: Meeting, rows: int) -> None:
        # The balancing takes longer than all else behind the meeting: no program does both, unless it has several rows.
        is_apart = has_mix and is_second and rows == 1
        launch(
            _connect_streams, (programs + is_apart, -(-num_rows // rows)),
            streams, source, mix if mix is not None else streams, merged if merged is not None else streams,
            tap if tap is not None else streams, weights.fn, weights.base, weights.scale, workspace.sums,
            workspace.arrived, next_mix if next_mix is not None else streams,
            norm if norm is not None else weights.base, out if out is not None else streams,
            taken if taken is not None else streams, num_rows, rows, part_stride, row_stride,
            0 if tap is None else tap.stride(0), weights.rms_eps, weights.eps, norm_eps,
            SIZE=width, STREAMS=size, COLUMNS=width // programs, PROGRAMS=programs, COUNT=count,
            NUMBERS=power_of_two(count), READ=read, MIX=mixed, ITERATIONS=weights.iterations, PARTS=parts,
            PLACED=placed, HAS_TAP=tap is not None, HAS_OUT=out is not None, HAS_TAKEN=taken is not None,
            HAS_MIX=has_mix, FIRST=is_first, SECOND=is_second,
            # The interpreter runs no instructions of the card.
            MEETING=int(meeting), IS_APART=is_apart, FAST=not triton.knobs.runtime.interpret, num_warps=plan.warps,
        )  # fmt: skip

    if rows_each is not None and rows_each <= _MOST_ROWS_EACH:
        start(True, True, plan.meeting, rows_each)
    else:
        start(True, False, Meeting.LAUNCH, min(num_rows, _ROWS_APART))
        start(False, True, Meeting.LAUNCH, 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parts_of(output: Tensor | PartList | None, streams: Tensor) -> tuple[int, int, int, Tensor, Any]:
    """Number of parts, stride between them and between rows, where they begin, and their type where that is a list."""
    if output is None:
        return 0, 0, 0, streams, None
    if isinstance(output, Tensor):
        is_single = output.dim() == 2
        return (
            1 if is_single else output.shape[0],
            0 if is_single else output.stride(0),
            output.stride(-2),
            output,
            None,
        )
    first = output.tensors[0]
    return len(output.tensors), 0, first.stride(0), output.addresses, _TYPES[first.dtype]


def _check(
    streams: Tensor,
    weights: StreamWeights,
    merged: Tensor | None,
    next_mix: Tensor | None,
    norm: Tensor | None,
    out: Tensor | None,
    taken: Tensor | None,
) -> None:
    size, width = streams.shape[1:]
    columns = width // PLAN.of_width(width).programs
    if size != power_of_two(size) or size > MOST_STREAMS or columns != power_of_two(columns):
        raise ValueError(f"no kernel for {size} residual streams of {width}")
    if merged is not None and merged.data_ptr() == streams.data_ptr():
        raise ValueError("merged streams cannot take the place of those that they are made of")
    check_flat(streams, merged, next_mix, norm, out, taken, weights.fn, weights.base, weights.scale)
