"""What one program does for a few pairs of tiles of one item: part of the launches of kernel.py and whole.py.

An item is up to ROWS of the rows that go to one expert; the items in front are those of the expert of all rows. Every
choice of a row has a place of its own in what is written, so nothing is added in memory and nothing depends on who
comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkchat.kernels.tiles.product import fp4_pairs, fp8_pairs


@triton.jit
def _chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, at):
    """(are there such rows of the item, which choices these are)"""
    place = first + at
    is_row = place < tl.load(counts_ptr + 1 + expert)
    # Not masked by is_row, so that neither load waits for the other.
    choice = tl.load(lists_ptr + expert.to(tl.int64) * list_size + tl.minimum(place, list_size - 1))
    return is_row, choice


@triton.jit
def _activate(gate, up, limit):
    """silu(gate) * up, gate clamped above, up on both sides; what is no number stays none."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def word_of(item, items_ptr, shared_items, most_items):
    """Which expert an item is of, and the place of its first choice in the list; anything for the shared one's."""
    return tl.load(items_ptr + tl.minimum(tl.maximum(item - shared_items, 0), most_items - 1))


@triton.jit
def shared_gate_up(
    tile, item, x_ptr, codes, scales, num_rows, x_stride, limit,
    PER_ROW: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Of the expert of all rows: [P, 16, R] float32 for inner, in which of its rows [R], which of them there are."""
    # A pair of tiles is one of gate and one of up. Row n of part s lies at s * ROWS + n.
    row, to_row = item * ROWS + tl.arange(0, SPLIT * ROWS) % ROWS, item * ROWS + tl.arange(0, ROWS)
    gate, up = fp8_pairs(
        x_ptr + row.to(tl.int64) * x_stride, row < num_rows, codes + tile.to(tl.int64) * (STEPS * 4096),
        scales + tile * (STEPS * 2), 0, STEPS, STEPS, ROWS, PAIRS, SPLIT, STAGES, ROUND,
    )  # fmt: skip
    return _activate(gate, up, limit), num_rows * PER_ROW + to_row, to_row < num_rows


@triton.jit
def routed_gate_up(
    tile, word, x_ptr, codes, scales, counts_ptr, lists_ptr, weights_ptr, list_size, x_stride, limit,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The same of an expert that rows are sent to."""
    expert, first = word & 0xFFFF, word >> 16
    begin = (expert.to(tl.int64) * TILES + tile) * STEPS
    at = tl.arange(0, SPLIT * ROWS) % ROWS
    is_row, choice = _chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, at)
    is_out, to = _chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, tl.arange(0, ROWS))
    weight = tl.load(weights_ptr + to, mask=is_out, other=0.0)
    gate, up = fp4_pairs(
        x_ptr + (choice // PER_ROW).to(tl.int64) * x_stride, is_row, codes + begin * 2048, scales + begin * 128,
        STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
    )  # fmt: skip
    return _activate(gate, up, limit) * weight[None, None, :], to, is_out


@triton.jit
def store_inner(value, to, is_out, tile, inner_ptr, TILES: tl.constexpr, PAIRS: tl.constexpr):
    out_tile = tile + tl.arange(0, PAIRS)[:, None, None]
    out = inner_ptr + to[None, None, :].to(tl.int64) * (TILES * 16) + out_tile * 16 + tl.arange(0, 16)[None, :, None]
    tl.store(out, value.to(inner_ptr.dtype.element_ty), mask=is_out[None, None, :])


@triton.jit
def shared_down(
    tile, item, inner_ptr, codes, scales, num_rows,
    PER_ROW: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Of the expert of all rows: [P, 16, R] float32 of first and of second tiles, in which row of parts [R], which of
    them there are."""
    row, to_row = item * ROWS + tl.arange(0, SPLIT * ROWS) % ROWS, item * ROWS + tl.arange(0, ROWS)
    one, two = fp8_pairs(
        inner_ptr + (num_rows * PER_ROW + row).to(tl.int64) * (STEPS * 128), row < num_rows,
        codes + tile.to(tl.int64) * (STEPS * 4096), scales + tile * (STEPS * 2), 0,
        STEPS, STEPS, ROWS, PAIRS, SPLIT, STAGES, ROUND,
    )  # fmt: skip
    return one, two, PER_ROW * num_rows + to_row, to_row < num_rows


@triton.jit
def routed_down(
    tile, word, inner_ptr, codes, scales, counts_ptr, lists_ptr, num_rows, list_size,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The same of an expert that rows are sent to."""
    expert, first = word & 0xFFFF, word >> 16
    begin = (expert.to(tl.int64) * TILES + tile) * STEPS
    at = tl.arange(0, SPLIT * ROWS) % ROWS
    is_row, choice = _chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, at)
    is_out, out_choice = _chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, tl.arange(0, ROWS))
    one, two = fp4_pairs(
        inner_ptr + choice.to(tl.int64) * (STEPS * 128), is_row, codes + begin * 2048, scales + begin * 128,
        STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
    )  # fmt: skip
    return one, two, out_choice % PER_ROW * num_rows + out_choice // PER_ROW, is_out


@triton.jit
def store_parts(one, two, to, is_out, tile, parts_ptr, TILES: tl.constexpr, PAIRS: tl.constexpr):
    out_tile = tile + tl.arange(0, PAIRS)[:, None, None]
    out = parts_ptr + to[None, None, :].to(tl.int64) * (TILES * 32) + out_tile * 32 + tl.arange(0, 16)[None, :, None]
    tl.store(out, one, mask=is_out[None, None, :])
    tl.store(out + 16, two, mask=is_out[None, None, :])
