"""All of it in one launch: a row looks for its request among all of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.row_places import RowPlaces

_ROWS, _REQUESTS = 64, 64
"""Rows of a program, and requests that it looks at in a step."""


@triton.jit(do_not_specialize=["num_rows", "requests", "window"])
def _place_rows(
    tokens_ptr, positions_ptr, cache_rows_ptr, ends_ptr, starts_ptr, to_tokens, to_positions, to_cache_rows, to_ends,
    to_span_starts, to_first_seen, num_rows, requests, window,
    ROWS: tl.constexpr, REQUESTS: tl.constexpr, IS_BLOCK: tl.constexpr, REPEATS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    wait(PDL)
    last = num_rows - 1
    if REPEATS:
        last = tl.minimum(tl.maximum(tl.load(starts_ptr + requests) - 1, 0), last)
    source = tl.minimum(row, last)
    position = tl.load(positions_ptr + source, mask=inside, other=0)
    tl.store(to_tokens + row, tl.load(tokens_ptr + source, mask=inside, other=0), mask=inside)
    tl.store(to_positions + row, position, mask=inside)
    tl.store(to_cache_rows + row, tl.load(cache_rows_ptr + source, mask=inside, other=0), mask=inside)
    tl.store(to_ends + row, tl.load(ends_ptr + source, mask=inside, other=0), mask=inside)
    # Where a row's request begins: the last start that is not behind it. That of rows of nobody is the last request's,
    # whose own start is looked at, not the end behind it.
    first = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, requests, REQUESTS):
        request = begin + tl.arange(0, REQUESTS)
        start = tl.load(starts_ptr + request, mask=request < requests, other=0)
        first = tl.maximum(first, tl.max(tl.where(start[None, :] <= row[:, None], start[None, :], 0), axis=1))
    span_start = tl.load(positions_ptr + tl.minimum(first, last), mask=inside, other=0)
    tl.store(to_span_starts + row, span_start, mask=inside)
    if IS_BLOCK:
        tl.store(to_first_seen + row, span_start - window, mask=inside)
    else:
        tl.store(to_first_seen + row, position - window + 1, mask=inside)


def launch_place_rows(
    token_ids: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    ends: Tensor,
    starts: Tensor,
    places: RowPlaces,
    window: int,
    is_block: bool,
    repeats_last: bool,
) -> None:
    """See ``place_rows``; fills ``places``."""
    check_flat(token_ids, positions, cache_rows, ends, starts)
    count, requests = positions.shape[0], starts.shape[0] - 1
    rows = min(_ROWS, power_of_two(count))
    launch(
        _place_rows, (-(-count // rows),),
        token_ids, positions, cache_rows, ends, starts, places.token_ids, places.positions, places.cache_rows,
        places.ends, places.span_starts, places.first_seen, count, requests, window,
        ROWS=rows, REQUESTS=min(_REQUESTS, power_of_two(requests)), IS_BLOCK=is_block, REPEATS=repeats_last,
        num_warps=1 if rows * min(_REQUESTS, power_of_two(requests)) <= 1024 else 4,
    )  # fmt: skip
