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
def chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, at):
    """(are there such rows of the item, which choices these are)"""
    place = first + at
    is_row = place < tl.load(counts_ptr + 1 + expert)
    # Not masked by is_row, so that neither load waits for the other.
    choice = tl.load(lists_ptr + expert.to(tl.int64) * list_size + tl.minimum(place, list_size - 1))
    return is_row, choice


@triton.jit
def rows_of_item(
    word, counts_ptr, lists_ptr, list_size, name,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Of an item's R rows, once for each part [S * R] and once [R]: are there such, which choices these are.

    CHOICES: of so many ``name`` [CHOICES] is the expert; 0 where lists are read.
    """
    expert, first = word & 0xFFFF, word >> 16
    out_at = tl.arange(0, ROWS)
    if CHOICES == 0:
        at = tl.arange(0, SPLIT * ROWS) % ROWS
        is_row, choice = chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, at)
        is_out, to = chosen_rows(expert, first, counts_ptr, lists_ptr, list_size, out_at)
    else:
        is_named = (name == expert).to(tl.int32)
        rank = tl.where(is_named == 1, tl.cumsum(is_named, axis=0) - 1, -1)
        is_it = rank[None, :] == (first + out_at)[:, None]
        found = tl.sum(tl.where(is_it, tl.arange(1, CHOICES + 1)[None, :], 0), axis=1)
        is_out, to = found > 0, tl.maximum(found - 1, 0)
        parts = tl.reshape(tl.broadcast_to(found[None, :], (SPLIT, ROWS)), (SPLIT * ROWS,))
        is_row, choice = parts > 0, tl.maximum(parts - 1, 0)
    return is_row, choice, is_out, to


@triton.jit
def activate(gate, up, limit):
    """silu(gate) * up, gate clamped above, up on both sides; what is no number stays none."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def word_of(item, items_ptr, shared_items, most_items):
    """Which expert an item is of, and the place of its first choice in the list; anything for the shared one's."""
    return tl.load(items_ptr + tl.minimum(tl.maximum(item - shared_items, 0), most_items - 1))


@triton.jit
def gate_up_values(
    tile, item, word, x_ptr, codes_ptr, scales_ptr, shared_codes, shared_scales, counts_ptr, lists_ptr, weights_ptr,
    name, num_rows, list_size, shared_items, x_stride, limit,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, SHARED_STAGES: tl.constexpr, LATE: tl.constexpr, ROUND: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """What a unit adds to inner: [P, 16, R] float32, to which of its rows [R], which of them there are."""
    # A pair of tiles is one of gate and one of up. Row n of part s lies at s * ROWS + n.
    at, out_at = tl.arange(0, SPLIT * ROWS) % ROWS, tl.arange(0, ROWS)
    if item < shared_items:
        row, to_row = item * ROWS + at, item * ROWS + out_at
        is_out = to_row < num_rows
        gate, up = fp8_pairs(
            x_ptr + row.to(tl.int64) * x_stride, row < num_rows, shared_codes + tile.to(tl.int64) * (STEPS * 4096),
            shared_scales + tile * (STEPS * 2), 0, STEPS, STEPS, ROWS, PAIRS, SPLIT, SHARED_STAGES, ROUND,
        )  # fmt: skip
        value = activate(gate, up, limit)
        to = num_rows * PER_ROW + to_row
    else:
        begin = ((word & 0xFFFF).to(tl.int64) * TILES + tile) * STEPS
        is_row, choice, is_out, to = rows_of_item(
            word, counts_ptr, lists_ptr, list_size, name, ROWS, SPLIT, CHOICES
        )  # fmt: skip
        weight = tl.load(weights_ptr + to, mask=is_out, other=0.0)
        gate, up = fp4_pairs(
            x_ptr + (choice // PER_ROW).to(tl.int64) * x_stride, is_row, codes_ptr + begin * 2048,
            scales_ptr + begin * 128, STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
        )  # fmt: skip
        value = activate(gate, up, limit) * weight[None, None, :]
    return value, to, is_out


@triton.jit
def store_inner(value, to, is_out, tile, inner_ptr, TILES: tl.constexpr, PAIRS: tl.constexpr):
    out_tile = tile + tl.arange(0, PAIRS)[:, None, None]
    out = inner_ptr + to[None, None, :].to(tl.int64) * (TILES * 16) + out_tile * 16 + tl.arange(0, 16)[None, :, None]
    tl.store(out, value.to(inner_ptr.dtype.element_ty), mask=is_out[None, None, :])


@triton.jit
def down_values(
    tile, item, word, inner_ptr, codes_ptr, scales_ptr, shared_codes, shared_scales, counts_ptr, lists_ptr,
    name, num_rows, list_size, shared_items,
    PER_ROW: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, SHARED_STAGES: tl.constexpr, LATE: tl.constexpr, ROUND: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    """What a unit leaves: [P, 16, R] float32 of first and of second tiles, in which row of parts [R], which there
    are."""
    at, out_at = tl.arange(0, SPLIT * ROWS) % ROWS, tl.arange(0, ROWS)
    if item < shared_items:
        row, to_row = item * ROWS + at, item * ROWS + out_at
        is_out = to_row < num_rows
        one, two = fp8_pairs(
            inner_ptr + (num_rows * PER_ROW + row).to(tl.int64) * (STEPS * 128), row < num_rows,
            shared_codes + tile.to(tl.int64) * (STEPS * 4096), shared_scales + tile * (STEPS * 2), 0,
            STEPS, STEPS, ROWS, PAIRS, SPLIT, SHARED_STAGES, ROUND,
        )  # fmt: skip
        to = PER_ROW * num_rows + to_row
    else:
        begin = ((word & 0xFFFF).to(tl.int64) * TILES + tile) * STEPS
        is_row, choice, is_out, out_choice = rows_of_item(
            word, counts_ptr, lists_ptr, list_size, name, ROWS, SPLIT, CHOICES
        )  # fmt: skip
        to = out_choice % PER_ROW * num_rows + out_choice // PER_ROW
        one, two = fp4_pairs(
            inner_ptr + choice.to(tl.int64) * (STEPS * 128), is_row, codes_ptr + begin * 2048, scales_ptr + begin * 128,
            STEPS, ROWS, PAIRS, SPLIT, STAGES, LATE, ROUND,
        )  # fmt: skip
    return one, two, to, is_out


@triton.jit
def store_parts(one, two, to, is_out, tile, parts_ptr, TILES: tl.constexpr, PAIRS: tl.constexpr):
    out_tile = tile + tl.arange(0, PAIRS)[:, None, None]
    out = parts_ptr + to[None, None, :].to(tl.int64) * (TILES * 32) + out_tile * 32 + tl.arange(0, 16)[None, :, None]
    tl.store(out, one, mask=is_out[None, None, :])
    tl.store(out + 16, two, mask=is_out[None, None, :])
