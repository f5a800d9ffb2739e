"""Residual streams between two sub-blocks in one launch, with the sum over the ranks in it: columns are shared out.

What a launch of this kind costs is its chain of steps that wait for each other, not bytes. Here that is: this rank's
parts are loaded, added and pushed to the others; theirs come; what is merged of some columns is multiplied by the
stream weights, and the sums are left as words that carry the number of their round; those of all programs are gathered;
columns are finished from registers. The combination is balanced while the message is on its way: a connection leaves
the numbers of its mix as they are, and the launch that merges by it balances them.

The sum of squares that the norm needs is found without a second meeting: among the sums are those of the products of
every two streams, and what is read is a combination of streams. It is the sum of what is read before rounding; over
thousands of columns the roundings, which go up as often as down, cancel to a fraction of one of them.

A program waits for its row's others, and for its like on other ranks. Programs start in the order of their rows, so
those of the first row that is not done are on the card. Of many rows each half has launches of its own (many.py); the
bits are the same, and a row's program is the same whatever rows are beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.hyper.many import launch_merge_rows
from sparkchat.kernels.hyper.pieces import (
    arrived,
    balance,
    finish_columns,
    gather,
    leave_sums,
    merge,
    numbers_of,
    sigmoid,
)
from sparkchat.kernels.hyper.plan import MOST_STREAMS, PLAN, ConnectPlan, words_of
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.ranks.exchange import MOST_PROGRAMS, MOST_ROWS, Sent
from sparkchat.kernels.ranks.exchange_kernel import add_all, find_inboxes, push

if TYPE_CHECKING:
    from sparkchat.kernels.hyper import HyperWorkspace, PartList, StreamWeights

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _merge_columns(
    row, program, column, streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, sums_ptr, inboxes_ptr,
    turns_ptr, part_stride, output_stride, tap_stride, rank, round_, eps,
    TYPE: tl.constexpr, SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
    COUNT: tl.constexpr, NUMBERS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr, ITERATIONS: tl.constexpr,
    PARTS: tl.constexpr, PLACED: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr, HAS_TAP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Some columns of a row behind the sub-block, of every stream float32; their sums are left, they are kept."""
    turn = round_
    if RANKS > 1:
        turns_ptr += row * MOST_PROGRAMS + program
        turn = 2 * tl.load(turns_ptr) + 1
        places = find_inboxes(inboxes_ptr, rank, turn, row, RANKS, MOST_ROWS, SIZE)
    # What is waited for first is asked for first.
    loaded = ()
    for part in tl.static_range(PARTS):
        if PLACED is None:
            at = output_ptr + part * part_stride
        else:
            at = tl.load(output_ptr + part).to(tl.pointer_type(PLACED))
        # Another device may have written it: not from the cache of this multiprocessor.
        loaded = loaded + (tl.load(at + row * output_stride + column, cache_modifier=".cg"),)  # noqa: RUF005
    numbers = ()
    if PARTS > 0:
        for number in tl.static_range(STREAMS + STREAMS * STREAMS):
            numbers = numbers + (tl.load(mix_ptr + row * (STREAMS + STREAMS * STREAMS) + number),)  # noqa: RUF005
    behind = ()
    for stream in tl.static_range(STREAMS):
        behind = behind + (tl.load(streams_ptr + (row * STREAMS + stream) * SIZE + column),)  # noqa: RUF005
    number = tl.arange(0, NUMBERS)[:, None]
    fn = ()
    for stream in tl.static_range(STREAMS):
        at = fn_ptr + number * (STREAMS * SIZE) + stream * SIZE + column[None, :]
        fn = fn + (tl.load(at, mask=number < COUNT, other=0.0),)  # noqa: RUF005
    if PARTS > 0:
        brought = tl.zeros((COLUMNS,), tl.float32)
        for part in tl.static_range(PARTS):
            brought += loaded[part].to(tl.float32)
        if RANKS > 1:
            push(brought, column, places, rank, turn, RANKS)
            # What does not depend on the message is not to be done before it is on its way.
            tl.debug_barrier()
        mix = ()
        for stream in tl.static_range(STREAMS):
            mix = mix + (2.0 * sigmoid(numbers[stream]),)  # noqa: RUF005
        c = ()
        for place in tl.static_range(STREAMS * STREAMS):
            c = c + (numbers[STREAMS + place],)  # noqa: RUF005
        mix = mix + balance(c, eps, STREAMS, ITERATIONS, FAST)
        if RANKS > 1:
            brought = add_all(brought, column, places, rank, turn, RANKS)
            tl.store(turns_ptr, (turn >> 1) + 1)
        behind = merge(mix, behind, brought, TYPE, STREAMS)
    xs = ()
    for stream in tl.static_range(STREAMS):
        xs = xs + (behind[stream].to(tl.float32),)  # noqa: RUF005
    leave_sums(xs, fn, sums_ptr, program, round_, STREAMS, COLUMNS, PROGRAMS, COUNT, NUMBERS, READ, MIX)
    if PARTS > 0:
        for stream in tl.static_range(STREAMS):
            tl.store(merged_ptr + (row * STREAMS + stream) * SIZE + column, behind[stream])
    if HAS_TAP:
        mean = xs[0]
        for stream in tl.static_range(1, STREAMS):
            mean += xs[stream]
        tl.store(tap_ptr + row * tap_stride + column, (mean * (1.0 / STREAMS)).to(tap_ptr.dtype.element_ty))
    return xs


@triton.jit(do_not_specialize=["rank"])
def _connect_streams(
    streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, base_ptr, scale_ptr, sums_ptr, rounds_ptr,
    next_mix_ptr, norm_ptr, out_ptr, taken_ptr, inboxes_ptr, turns_ptr, part_stride, output_stride, tap_stride, rank,
    rms_eps, eps, norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr,
    NUMBERS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr,
    PLACED: tl.constexpr, RANKS: tl.constexpr, MOST_ROWS: tl.constexpr, MOST_PROGRAMS: tl.constexpr,
    HAS_TAP: tl.constexpr, HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, HAS_MIX: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Where the halves are launches, the first of them mostly those of many.py, nothing is waited for.
    MEETING: tl.constexpr = 2 if FIRST and SECOND else 0
    TYPE: tl.constexpr = streams_ptr.dtype.element_ty
    wait(PDL)
    sums_ptr += row * (PROGRAMS * (READ + MIX))
    # Odd, so never 0; all programs of a row have read it when the last program has gathered their sums.
    round_ = 2 * tl.load(rounds_ptr + row, volatile=True) + 1
    if program < PROGRAMS:
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        if FIRST:
            xs = _merge_columns(
                row, program, column, streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, sums_ptr,
                inboxes_ptr, turns_ptr, part_stride, output_stride, tap_stride, rank, round_, eps, TYPE, SIZE, STREAMS,
                COLUMNS, PROGRAMS, COUNT, NUMBERS, READ, MIX, ITERATIONS, PARTS, PLACED, RANKS, MOST_ROWS,
                MOST_PROGRAMS, HAS_TAP, FAST,
            )  # fmt: skip
        else:
            xs = ()
            for stream in tl.static_range(STREAMS):
                at = (merged_ptr if PARTS > 0 else streams_ptr) + (row * STREAMS + stream) * SIZE + column
                xs = xs + (tl.load(at).to(tl.float32),)  # noqa: RUF005
        if SECOND and (HAS_OUT or HAS_TAKEN):
            index = tl.arange(0, READ)
            scale = tl.load(scale_ptr + index, mask=index < STREAMS, other=0.0)
            base = tl.load(base_ptr + index, mask=index < STREAMS, other=0.0)
            factors = tl.load(norm_ptr + column) if HAS_OUT else xs[0]
            totals = gather(sums_ptr, round_, PROGRAMS, READ, STREAMS + STREAMS * (STREAMS + 1) // 2, MEETING)
            finish_columns(
                row, column, xs, factors, totals, scale, base, out_ptr, taken_ptr, rms_eps, eps, norm_eps, TYPE, SIZE,
                STREAMS, READ, HAS_OUT, HAS_TAKEN,
            )  # fmt: skip
    elif SECOND:
        if HAS_MIX:
            made = numbers_of(
                sums_ptr, base_ptr, scale_ptr, round_, rms_eps, SIZE, STREAMS, PROGRAMS, READ, MIX, MEETING
            )  # fmt: skip
            place = tl.arange(0, MIX)
            to = next_mix_ptr + row * (STREAMS + STREAMS * STREAMS) + place
            tl.store(to, made, mask=place < STREAMS + STREAMS * STREAMS)
        elif FIRST:
            round_ = arrived(sums_ptr, round_, PROGRAMS, READ, STREAMS + STREAMS * (STREAMS + 1) // 2)
        # All threads have seen the sums of all programs, which have read the number of the round before.
        tl.debug_barrier()
        tl.store(rounds_ptr + row, (round_ >> 1) + 1)


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
) -> None:
    """See ``connect_streams``. ``plan`` stands in for the tuned one; the workspace must be made for it."""
    num_rows, size, width = streams.shape
    plan = (plan or PLAN).of_width(width)
    _check(streams, weights, plan, merged, next_mix, norm, out, taken)
    programs, count = plan.programs, weights.fn.shape[0]
    read, mixed = words_of(size)
    if num_rows > workspace.sums.shape[0] or workspace.sums.shape[1] != programs * (read + mixed):
        raise ValueError(f"the workspace of {tuple(workspace.sums.shape)} has no room for {num_rows} rows of {width}")
    exchange, output = (output.exchange, output.parts) if isinstance(output, Sent) else (None, output)
    if exchange is not None and num_rows > MOST_ROWS:
        raise ValueError(f"ranks exchange up to {MOST_ROWS} rows in a launch, not {num_rows}")
    parts, part_stride, row_stride, source, placed = _parts_of(output, streams)

    sizes = {
        "SIZE": width, "STREAMS": size, "COLUMNS": width // programs, "PROGRAMS": programs, "COUNT": count,
        "NUMBERS": power_of_two(count), "READ": read, "MIX": mixed, "PARTS": parts, "PLACED": placed,
        "num_warps": plan.warps,
    }  # fmt: skip

    def start(is_first: bool, is_second: bool = True) -> None:
        launch(
            _connect_streams, (programs + 1, num_rows),
            streams, source, streams if mix is None else mix, streams if merged is None else merged,
            streams if tap is None else tap, weights.fn, weights.base, weights.scale, workspace.sums, workspace.rounds,
            streams if next_mix is None else next_mix, weights.base if norm is None else norm,
            streams if out is None else out, streams if taken is None else taken,
            streams if exchange is None else exchange.inboxes, streams if exchange is None else exchange.turns,
            part_stride, row_stride, 0 if tap is None else tap.stride(0), 0 if exchange is None else exchange.rank,
            weights.rms_eps, weights.eps, norm_eps,
            ITERATIONS=weights.iterations,
            RANKS=1 if exchange is None else exchange.ranks, MOST_ROWS=MOST_ROWS, MOST_PROGRAMS=MOST_PROGRAMS,
            HAS_TAP=tap is not None, HAS_OUT=out is not None, HAS_TAKEN=taken is not None,
            HAS_MIX=next_mix is not None and not weights.is_head, FIRST=is_first, SECOND=is_second,
            # The interpreter runs no instructions of the card.
            FAST=not triton.knobs.runtime.interpret, lets_next=True, **sizes,
        )  # fmt: skip

    # The interpreter runs one program after the other, so that none may wait for another of its row.
    is_interpreted = triton.knobs.runtime.interpret and not streams.is_cuda
    if is_interpreted and exchange is not None:
        start(True, False)
        start(False)
    elif num_rows > MOST_ROWS or is_interpreted:
        launch_merge_rows(
            streams, source, mix, streams if merged is None else merged, tap, weights.fn, workspace.sums,
            workspace.rounds, (part_stride, row_stride), weights.eps, weights.iterations, plan.tile_rows, **sizes,
        )  # fmt: skip
        start(False)
    else:
        start(True)


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
    plan: ConnectPlan,
    merged: Tensor | None,
    next_mix: Tensor | None,
    norm: Tensor | None,
    out: Tensor | None,
    taken: Tensor | None,
) -> None:
    size, width = streams.shape[1:]
    columns = width // plan.programs
    if size != power_of_two(size) or size > MOST_STREAMS or columns != power_of_two(columns):
        raise ValueError(f"no kernel for {size} residual streams of {width}")
    if merged is not None and merged.data_ptr() == streams.data_ptr():
        raise ValueError("merged streams cannot take the place of those that they are made of")
    check_flat(streams, merged, next_mix, norm, out, taken, weights.fn, weights.base, weights.scale)
