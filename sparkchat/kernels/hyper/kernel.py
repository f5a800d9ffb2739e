"""Residual streams between two sub-blocks: the columns are shared out among programs, then a row is finished by one.

The first half merges its columns of 16 rows and multiplies them by the stream weights, which are in registers before
the kernel waits for the sub-block's output. The second half adds the sums of all columns, in order, and makes of them
what is read of each stream, the next combination and the normed input. Between the two every program of a tile of rows
must have left its sums: either all of them are on the card at once and those that go on wait for the others, or each
half is a launch. Both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait

if TYPE_CHECKING:
    from sparkchat.kernels.hyper import HyperWorkspace, PartList, StreamWeights

MOST_WAITING = 128
"""Programs that may wait for each other: no more than an H200 has multiprocessors."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _part_of(output_ptr, part, part_stride, PLACED: tl.constexpr):
    if PLACED is None:
        return output_ptr + part * part_stride
    else:
        return tl.load(output_ptr + part).to(tl.pointer_type(PLACED))


@triton.jit
def _sum_columns(
    streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn, sums_ptr, program, tile, num_rows,
    part_stride, output_stride, tap_stride,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr,
    NUMBERS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PLACED: tl.constexpr, HAS_TAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    # Merge COLUMNS columns of a tile of rows, and leave their share of the products and of the squares.
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < num_rows)[:, None]
    column = (program * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    number = tl.arange(0, NUMBERS)
    of_row = row[:, None] * (STREAMS * SIZE) + column
    brought = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        where = _part_of(output_ptr, part, part_stride, PLACED) + row[:, None] * output_stride + column
        # Another device may have written it: not from the cache of this multiprocessor.
        brought += tl.load(where, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    mixes = mix_ptr + row[:, None] * (STREAMS + STREAMS * STREAMS)
    sums = tl.zeros((ROWS, NUMBERS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    mean = tl.zeros((ROWS, COLUMNS), tl.float32)
    for stream in tl.static_range(STREAMS):
        if PARTS == 0:
            x = tl.load(streams_ptr + of_row + stream * SIZE, mask=inside, other=0.0).to(tl.float32)
        else:
            x = tl.load(mixes + stream, mask=inside, other=0.0) * brought
            for source in tl.static_range(STREAMS):
                # What this stream behind takes of that one before: the combination is used transposed.
                share = tl.load(mixes + STREAMS + source * STREAMS + stream, mask=inside, other=0.0)
                x += share * tl.load(streams_ptr + of_row + source * SIZE, mask=inside, other=0.0).to(tl.float32)
            stored = x.to(merged_ptr.dtype.element_ty)
            tl.store(merged_ptr + of_row + stream * SIZE, stored, mask=inside)
            x = stored.to(tl.float32)
        if EXACT:
            sums += tl.dot(x, fn[stream], input_precision="ieee")
        else:
            sums += tl.dot(x, fn[stream], input_precision="tf32x3")
        squares += x * x
        mean += x
    if HAS_TAP:
        to = tap_ptr + row[:, None] * tap_stride + column
        tl.store(to, (mean * (1.0 / STREAMS)).to(tap_ptr.dtype.element_ty), mask=inside)
    sums = tl.where(number[None, :] == COUNT, tl.sum(squares, axis=1)[:, None], sums)
    to = sums_ptr + (row[:, None] * PROGRAMS + program) * NUMBERS + number[None, :]
    tl.store(to, sums, mask=inside & (number[None, :] <= COUNT))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _total(sums_ptr, number, PROGRAMS: tl.constexpr, NUMBERS: tl.constexpr):
    # Other multiprocessors wrote these: not from the cache of this one.
    place = tl.arange(0, PROGRAMS) * NUMBERS
    return tl.sum(tl.load(sums_ptr + place + number, cache_modifier=".cg"), axis=0)


@triton.jit
def _finish_mix(
    sums_ptr, base_ptr, scale_ptr, mix_ptr, rate, eps,
    STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, NUMBERS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, PROGRAMS) * NUMBERS
    stream = tl.arange(0, STREAMS)
    number = STREAMS + stream
    post = tl.sum(tl.load(sums_ptr + place[:, None] + number[None, :], cache_modifier=".cg"), axis=0)
    post = post * rate * tl.load(scale_ptr + number) + tl.load(base_ptr + number)
    tl.store(mix_ptr + stream, 2.0 * _sigmoid(post))
    number = 2 * STREAMS + stream[:, None] * STREAMS + stream[None, :]
    at = sums_ptr + place[:, None, None] + number[None, :, :]
    c = tl.sum(tl.load(at, cache_modifier=".cg"), axis=0)
    c = c * rate * tl.load(scale_ptr + number) + tl.load(base_ptr + number)
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + eps
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    tl.store(mix_ptr + number - STREAMS, c)


@triton.jit
def _finish_row(
    row, streams_ptr, base_ptr, scale_ptr, sums_ptr, mix_ptr, norm_ptr, out_ptr, taken_ptr, rms_eps, eps, norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr, NUMBERS: tl.constexpr,
    ITERATIONS: tl.constexpr, HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, HAS_MIX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Make of a row's sums what is read, the next combination and the normed input.
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    sums_ptr += row * (PROGRAMS * NUMBERS)
    squares = _total(sums_ptr, COUNT, PROGRAMS, NUMBERS)
    rate = tl.rsqrt(squares / (STREAMS * SIZE) + rms_eps)
    x = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        number = _total(sums_ptr, stream, PROGRAMS, NUMBERS) * rate
        read = _sigmoid(number * tl.load(scale_ptr + stream) + tl.load(base_ptr + stream)) + eps
        at = streams_ptr + (row * STREAMS + stream) * SIZE + column
        x += read * tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    x = x.to(streams_ptr.dtype.element_ty)
    if HAS_TAKEN:
        tl.store(taken_ptr + row * SIZE + column, x.to(taken_ptr.dtype.element_ty), mask=inside)
    if HAS_OUT:
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + norm_eps)
        out = x * scale * tl.load(norm_ptr + column, mask=inside, other=0.0)
        tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_MIX:
        to = mix_ptr + row * (STREAMS + STREAMS * STREAMS)
        _finish_mix(sums_ptr, base_ptr, scale_ptr, to, rate, eps, STREAMS, PROGRAMS, NUMBERS, ITERATIONS)


@triton.jit
def _meet(arrived_ptr, PROGRAMS: tl.constexpr, GOES_ON: tl.constexpr):
    # Count this program; the ones that go on wait until all of the round have come. The count only grows, and wraps.
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if GOES_ON:
        wanted = (before & (-PROGRAMS)) + PROGRAMS
        while tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu") - wanted < 0:
            pass
        tl.debug_barrier()


@triton.jit
def _connect_streams(
    streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, base_ptr, scale_ptr, sums_ptr, arrived_ptr,
    next_mix_ptr, norm_ptr, out_ptr, taken_ptr, num_rows, part_stride, output_stride, tap_stride, rms_eps, eps,
    norm_eps,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr,
    NUMBERS: tl.constexpr, ROWS: tl.constexpr, ITERATIONS: tl.constexpr, PARTS: tl.constexpr, PLACED: tl.constexpr,
    HAS_TAP: tl.constexpr, HAS_OUT: tl.constexpr, HAS_TAKEN: tl.constexpr, HAS_MIX: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = tl.program_id(1)
    if FIRST:
        # [COLUMNS, NUMBERS] of each stream, as the products take it; weights never change, so before the wait.
        column = (program * COLUMNS + tl.arange(0, COLUMNS))[:, None]
        number = tl.arange(0, NUMBERS)[None, :]
        fn = ()
        for stream in tl.static_range(STREAMS):
            at = fn_ptr + number * (STREAMS * SIZE) + stream * SIZE + column
            fn = fn + (tl.load(at, mask=(number < COUNT) & (column < SIZE), other=0.0),)  # noqa: RUF005
    wait(PDL)
    if FIRST:
        _sum_columns(
            streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn, sums_ptr, program, tile, num_rows,
            part_stride, output_stride, tap_stride, SIZE, STREAMS, COLUMNS, PROGRAMS, COUNT, NUMBERS, ROWS, PARTS,
            PLACED, HAS_TAP, EXACT,
        )  # fmt: skip
    if SECOND:
        last = tl.minimum((tile + 1) * ROWS, num_rows)
        if FIRST:
            if tile * ROWS + program < last:
                _meet(arrived_ptr + tile, PROGRAMS, True)
            else:
                _meet(arrived_ptr + tile, PROGRAMS, False)
        if PARTS > 0:
            read_ptr = merged_ptr
        else:
            read_ptr = streams_ptr
        for row in range(tile * ROWS + program, last, PROGRAMS):
            _finish_row(
                row, read_ptr, base_ptr, scale_ptr, sums_ptr, next_mix_ptr, norm_ptr, out_ptr, taken_ptr,
                rms_eps, eps, norm_eps, SIZE, STREAMS, PROGRAMS, COUNT, NUMBERS, ITERATIONS, HAS_OUT, HAS_TAKEN,
                HAS_MIX, BLOCK,
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
    is_one: bool | None = None,
) -> None:
    """See ``connect_streams``. ``is_one``: one launch, whose programs wait for each other, or two; None: by size."""
    from sparkchat.kernels.hyper import NUMBERS, ROW_TILE, column_programs

    _check(streams, weights, merged, next_mix, norm, out, taken)
    num_rows, size, width = streams.shape
    programs, count = column_programs(width), weights.fn.shape[0]
    tiles = -(-num_rows // ROW_TILE)
    if num_rows > workspace.sums.shape[0] or programs != workspace.sums.shape[1]:
        raise ValueError(f"the workspace of {tuple(workspace.sums.shape)} has no room for {num_rows} rows of {width}")
    if is_one is None:
        is_one = streams.is_cuda and tiles * programs <= MOST_WAITING
    parts, part_stride, row_stride, source, placed = _parts_of(output, streams)

    def start(is_first: bool, is_second: bool) -> None:
        launch(
            _connect_streams, (programs if is_first else min(programs, ROW_TILE), tiles),
            streams, source, mix if mix is not None else streams, merged if merged is not None else streams,
            tap if tap is not None else streams, weights.fn, weights.base, weights.scale, workspace.sums,
            workspace.arrived, next_mix if next_mix is not None else streams,
            norm if norm is not None else weights.base, out if out is not None else streams,
            taken if taken is not None else streams, num_rows, part_stride, row_stride,
            0 if tap is None else tap.stride(0), weights.rms_eps, weights.eps, norm_eps,
            SIZE=width, STREAMS=size, COLUMNS=width // programs, PROGRAMS=programs, COUNT=count, NUMBERS=NUMBERS,
            ROWS=ROW_TILE, ITERATIONS=weights.iterations, PARTS=parts, PLACED=placed, HAS_TAP=tap is not None,
            HAS_OUT=out is not None, HAS_TAKEN=taken is not None,
            HAS_MIX=next_mix is not None and not weights.is_head, BLOCK=power_of_two(width),
            EXACT=streams.dtype == torch.float32, FIRST=is_first, SECOND=is_second, num_warps=8,
        )  # fmt: skip

    if is_one:
        start(True, True)
    else:
        start(True, False)
        start(False, True)


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
    from sparkchat.kernels.hyper import NUMBERS, column_programs

    size, width = streams.shape[1:]
    columns = width // column_programs(width)
    if size != power_of_two(size) or columns != power_of_two(columns) or weights.fn.shape[0] >= NUMBERS:
        raise ValueError(f"no kernel for {size} residual streams of {width}")
    if merged is not None and merged.data_ptr() == streams.data_ptr():
        raise ValueError("merged streams cannot take the place of those that they are made of")
    check_flat(streams, merged, next_mix, norm, out, taken, weights.fn, weights.base, weights.scale)
