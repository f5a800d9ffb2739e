"""Looking up, spreading and joining rows: a program for a row, or for a piece of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.launch import launch, power_of_two, wait
from sparkchat.kernels.ranks import Meeting
from sparkchat.kernels.ranks.kernel import meet

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PIECE = 1024


@triton.jit
def _look_up(
    ids_ptr, table_ptr, mine_ptr, pads_ptr, first, held, size, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait(PDL)
    place = tl.load(ids_ptr + row).to(tl.int64) - first
    is_here = (place >= 0) & (place < held)
    x = tl.load(table_ptr + place * size + column, mask=inside & is_here, other=0.0)
    tl.store(mine_ptr + row.to(tl.int64) * size + column, x, mask=inside)
    meet(pads_ptr, row, rank, RANKS)


@triton.jit
def _spread_rows(
    addresses_ptr, out_ptr, size,
    PARTS: tl.constexpr, TYPE: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = tl.load(addresses_ptr + part).to(tl.pointer_type(TYPE)) + row * size + column
        # Another device may have written it: not from the cache of this multiprocessor.
        total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for stream in tl.static_range(STREAMS):
        to = out_ptr + (row * STREAMS + stream) * size + column
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _join_columns(
    addresses_ptr, out_ptr, size, TYPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait(PDL)
    at = tl.load(addresses_ptr + part).to(tl.pointer_type(TYPE)) + row * size + column
    x = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(out_ptr + (row * PARTS + part) * size + column, x.to(tl.float32), mask=inside)


def launch_look_up(table: Tensor, ids: Tensor, first: int, mine: Tensor, meeting: Meeting) -> None:
    """See ``look_up``."""
    (held, size), pads = table.shape, meeting.pads
    block = power_of_two(size)
    launch(
        _look_up, (ids.shape[0],), ids, table, mine, pads, first, held, size, meeting.rank,
        RANKS=pads.shape[0], BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip


def launch_spread_rows(parts: Sequence[Tensor], addresses: Tensor, out: Tensor) -> None:
    """See ``spread_rows``."""
    rows, streams, size = out.shape
    launch(
        _spread_rows, (rows, triton.cdiv(size, _PIECE)), addresses, out, size,
        PARTS=len(parts), TYPE=_TYPES[parts[0].dtype], STREAMS=streams, BLOCK=_PIECE, num_warps=4,
    )  # fmt: skip


def launch_join_columns(parts: Sequence[Tensor], addresses: Tensor, out: Tensor) -> None:
    """See ``join_columns``."""
    rows, size = parts[0].shape
    launch(
        _join_columns, (rows, len(parts), triton.cdiv(size, 4 * _PIECE)), addresses, out, size,
        TYPE=_TYPES[parts[0].dtype], PARTS=len(parts), BLOCK=4 * _PIECE, num_warps=8,
    )  # fmt: skip
