"""Streams of many rows: what all programs of a row would do alike is done once, and stream weights serve several rows.

Three launches in the place of one (kernel.py), with the same steps for a row: its mix is balanced by one warp; some
columns are merged and their sums left; columns are finished. Balancing is some 1,400 instructions of a warp, more than
all else, and each of a row's programs did it in each of its warps; 1.5 MB of stream weights were read for every row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.hyper.pieces import balance, leave_sums, merge, sigmoid
from sparkchat.kernels.launch import launch, wait


@triton.jit
def _balance_rows(
    mix_ptr, to_ptr, eps, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * (STREAMS + STREAMS * STREAMS)
    wait(PDL)
    c = ()
    for place in tl.static_range(STREAMS * STREAMS):
        c = c + (tl.load(mix_ptr + row + STREAMS + place),)  # noqa: RUF005
    for stream in tl.static_range(STREAMS):
        tl.store(to_ptr + row + stream, 2.0 * sigmoid(tl.load(mix_ptr + row + stream)))
    c = balance(c, eps, STREAMS, ITERATIONS, FAST)
    for place in tl.static_range(STREAMS * STREAMS):
        tl.store(to_ptr + row + STREAMS + place, c[place])


@triton.jit
def _inputs_of(
    row, places, column, streams_ptr, mix_ptr, rounds_ptr, output_stride,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All that depends on a row: parts, mix, streams in some columns, the number of its last round."""
    loaded, mix, before = (), (), ()
    for part in tl.static_range(PARTS):
        at = places[part] + row * output_stride + column
        # Another device may have written it: not from the cache of this multiprocessor.
        loaded = loaded + (tl.load(at, cache_modifier=".cg"),)  # noqa: RUF005
    for stream in tl.static_range(STREAMS):
        before = before + (tl.load(streams_ptr + (row * STREAMS + stream) * SIZE + column),)  # noqa: RUF005
    if PARTS > 0:
        for number in tl.static_range(STREAMS + STREAMS * STREAMS):
            mix = mix + (tl.load(mix_ptr + row * (STREAMS + STREAMS * STREAMS) + number),)  # noqa: RUF005
    return loaded, mix, before, tl.load(rounds_ptr + row)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_rows(
    streams_ptr, output_ptr, mix_ptr, merged_ptr, tap_ptr, fn_ptr, sums_ptr, rounds_ptr, num_rows, part_stride,
    output_stride, tap_stride,
    SIZE: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, COUNT: tl.constexpr,
    NUMBERS: tl.constexpr, READ: tl.constexpr, MIX: tl.constexpr, PARTS: tl.constexpr, PLACED: tl.constexpr,
    HAS_TAP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    TYPE: tl.constexpr = streams_ptr.dtype.element_ty
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, NUMBERS)[:, None]
    fn, places = (), ()
    for stream in tl.static_range(STREAMS):
        at = fn_ptr + number * (STREAMS * SIZE) + stream * SIZE + column[None, :]
        fn = fn + (tl.load(at, mask=number < COUNT, other=0.0),)  # noqa: RUF005
    wait(PDL)
    for part in tl.static_range(PARTS):
        if PLACED is None:
            places = places + (output_ptr + part * part_stride,)  # noqa: RUF005
        else:
            places = places + (tl.load(output_ptr + part).to(tl.pointer_type(PLACED)),)  # noqa: RUF005
    for step in range(tl.minimum(num_rows - first, ROWS)):
        row = (first + step).to(tl.int64)
        loaded, mix, behind, last = _inputs_of(
            row, places, column, streams_ptr, mix_ptr, rounds_ptr, output_stride, SIZE, STREAMS, PARTS
        )  # fmt: skip
        if PARTS > 0:
            brought = tl.zeros((COLUMNS,), tl.float32)
            for part in tl.static_range(PARTS):
                brought += loaded[part].to(tl.float32)
            behind = merge(mix, behind, brought, TYPE, STREAMS)
            for stream in tl.static_range(STREAMS):
                tl.store(merged_ptr + (row * STREAMS + stream) * SIZE + column, behind[stream])
        xs = ()
        for stream in tl.static_range(STREAMS):
            xs = xs + (behind[stream].to(tl.float32),)  # noqa: RUF005
        leave_sums(
            xs, fn, sums_ptr + row * (PROGRAMS * (READ + MIX)), program, 2 * last + 1, STREAMS, COLUMNS, PROGRAMS,
            COUNT, NUMBERS, READ, MIX,
        )  # fmt: skip
        if HAS_TAP:
            mean = xs[0]
            for stream in tl.static_range(1, STREAMS):
                mean += xs[stream]
            tl.store(tap_ptr + row * tap_stride + column, (mean * (1.0 / STREAMS)).to(tap_ptr.dtype.element_ty))


def launch_merge_rows(
    streams: Tensor,
    source: Tensor,
    mix: Tensor | None,
    merged: Tensor,
    tap: Tensor | None,
    fn: Tensor,
    sums: Tensor,
    rounds: Tensor,
    strides: tuple[int, int],
    eps: float,
    iterations: int,
    tile_rows: int,
    **constants: Any,
) -> None:
    """The first half of ``launch_connect_streams``; ``strides`` of parts and of rows of the output in ``source``."""
    rows, size = streams.shape[:2]
    if constants["PARTS"] > 0:
        assert mix is not None
        # Its own memory: what the connection before left may be looked at again.
        numbers, mix = mix, torch.empty_like(mix)
        launch(
            _balance_rows, (rows,), numbers, mix, eps, STREAMS=size, ITERATIONS=iterations,
            FAST=not triton.knobs.runtime.interpret, num_warps=1,
        )  # fmt: skip
    launch(
        _merge_rows, (constants["PROGRAMS"], -(-rows // tile_rows)),
        streams, source, streams if mix is None else mix, merged, streams if tap is None else tap, fn, sums, rounds,
        rows, *strides, 0 if tap is None else tap.stride(0), HAS_TAP=tap is not None, ROWS=tile_rows, **constants,
    )  # fmt: skip
