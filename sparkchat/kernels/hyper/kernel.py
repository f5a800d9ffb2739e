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

from sparkchat.kernels.hyper.pieces import (
    balance,
    finish_columns,
    gather,
    leave_sums,
    merge,
    numbers_of,
    one_of,
    sigmoid,
)
from sparkchat.kernels.hyper.plan import MOST_STREAMS, PLAN, ConnectPlan, Meeting, rows_of_program, words_of
from sparkchat.kernels.hyper.quick import launch_connect_rows
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.ranks.exchange import MOST_ROWS, Sent

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
    return merge(mix, before, brought, streams_ptr.dtype.element_ty, STREAMS)


@triton.jit
def _finish_mix(
    sums_ptr, base_ptr, scale_ptr, mix_ptr, turn, rms_eps, eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr,
    ITERATIONS: tl.constexpr, MEETING: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, MIX)
    numbers = numbers_of(
        sums_ptr, base_ptr, scale_ptr, turn, rms_eps, SIZE, STREAMS, PROGRAMS, READ, MIX, MEETING
    )  # fmt: skip
    tl.store(mix_ptr + index, 2.0 * sigmoid(numbers), mask=index < STREAMS)
    c = ()
    for place in tl.static_range(STREAMS * STREAMS):
        c = c + (one_of(numbers, index, STREAMS + place),)  # noqa: RUF005
    c = balance(c, eps, STREAMS, ITERATIONS, FAST)
    for place in tl.static_range(STREAMS * STREAMS):
        tl.store(mix_ptr + STREAMS + place, c[place])


@triton.jit
def _finish_columns(
    row, column, streams_ptr, base_ptr, scale_ptr, sums_ptr, norm_ptr, out_ptr, taken_ptr, turn, rms_eps, eps, norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, READ: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, MEETING: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, READ)
    scale = tl.load(scale_ptr + index, mask=index < STREAMS, other=0.0)
    base = tl.load(base_ptr + index, mask=index < STREAMS, other=0.0)
    before = ()
    for stream in tl.static_range(STREAMS):
        at = streams_ptr + (row * STREAMS + stream) * SIZE + column
        before = before + (tl.load(at, cache_modifier=".cg").to(tl.float32),)  # noqa: RUF005
    factors = tl.load(norm_ptr + column) if HAS_OUT else before[0]
    totals = gather(sums_ptr, turn, PROGRAMS, READ, STREAMS + STREAMS * (STREAMS + 1) // 2, MEETING)
    finish_columns(
        row, column, before, factors, totals, scale, base, out_ptr, taken_ptr, rms_eps, eps, norm_eps,
        streams_ptr.dtype.element_ty, SIZE, STREAMS, READ, HAS_OUT, HAS_TAKEN,
    )  # fmt: skip


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
                leave_sums(
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
                    turn, rms_eps, eps, norm_eps, SIZE, STREAMS, PROGRAMS, READ, HAS_OUT, HAS_TAKEN, MEETING,
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
    output: Tensor | PartList | Sent | None,
    mix: Tensor | None,
    merged: Tensor | None,
    next_mix: Tensor | None,
    norm: Tensor | None,
    norm_eps: float,
    out: Tensor | None,
    taken: Tensor | None,
    tap: Tensor | None,
    plan: ConnectPlan | None = None,
    iterations: int = 0,
) -> None:
    """See ``connect_streams``. ``plan`` stands in for the tuned one; the workspace must be made for it."""
    _check(streams, weights, merged, next_mix, norm, out, taken)
    num_rows, size, width = streams.shape
    plan = (plan or PLAN).of_width(width)
    programs, count = plan.programs, weights.fn.shape[0]
    read, mixed = words_of(size)
    if num_rows > workspace.sums.shape[0] or workspace.sums.shape[1] != programs * (read + mixed):
        raise ValueError(f"the workspace of {tuple(workspace.sums.shape)} has no room for {num_rows} rows of {width}")
    exchange, output = (output.exchange, output.parts) if isinstance(output, Sent) else (None, output)
    if exchange is not None and not (plan.is_quick and num_rows <= MOST_ROWS):
        raise ValueError(f"ranks exchange up to {MOST_ROWS} rows in a launch, not {num_rows}")
    if plan.is_quick:
        launch_connect_rows(
            streams, weights, workspace, parts_of(output, streams), exchange, mix, merged, next_mix, norm, norm_eps,
            out, taken, tap, iterations, plan,
        )  # fmt: skip
        return
    rows_each = None
    # The interpreter runs one program after the other: none could wait for the others.
    if plan.meeting != Meeting.LAUNCH and (streams.is_cuda or not triton.knobs.runtime.interpret):
        rows_each = rows_of_program(num_rows, plan, _multiprocessors(streams.device))
    parts, part_stride, row_stride, source, placed = parts_of(output, streams)

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


def parts_of(output: Tensor | PartList | None, streams: Tensor) -> tuple[int, int, int, Tensor, Any]:
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
