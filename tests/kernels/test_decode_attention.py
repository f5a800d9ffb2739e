"""Decode attention against its reference: odd lengths, groups, windows, rings, pages, and independence of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.agreement import assert_same_sums
from sparkchat.kernels.attention import UNIT, attention_workspace, spans_of
from sparkchat.kernels.attention.kernel import EXACT_TILE, Tile, launch_decode_attention
from sparkchat.kernels.attention.reference import decode_attention_reference

NAN = float("nan")
CAPACITY = 640


def make(device: torch.device, heads: int, kv_heads: int, dim: int, spans: list[tuple[int, int, int]]) -> dict:
    """A batch of ``spans`` (cache row, position of the first query row, rows); what was never written is NaN."""
    starts, rows, positions = [0], [], []
    for row, start, count in spans:
        rows += [row] * count
        positions += range(start, start + count)
        starts.append(len(rows))
    num_rows = len(rows)
    cache = torch.full((4, 2 * kv_heads, CAPACITY, dim), NAN, device=device)
    for row, start, count in spans:
        written = min(CAPACITY, start + count)
        cache[row, :, :written] = torch.randn(2 * kv_heads, written, dim, device=device)
    return {
        "q": torch.randn(num_rows, heads, dim, device=device),
        "cache": cache,
        "starts": torch.tensor(starts, device=device, dtype=torch.int32),
        "rows": torch.tensor(rows, device=device, dtype=torch.int32),
        "positions": torch.tensor(positions, device=device),
        "ends": torch.tensor(positions, device=device) + 1,
    }


def both(
    batch: dict, most: int, window: int | None = None, pages: Tensor | None = None, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, heads, dim = batch["q"].shape
    outs = torch.full((2, num_rows, heads, dim), NAN, device=batch["q"].device)
    # Room for 1024 positions where a test looks further; the interpreter runs every program, whatever it finds to do.
    context = next(room for room in (128, 512, 1024) if int(batch["positions"].max()) < room - 16)
    space = attention_workspace(num_rows, heads, dim, context, batch["q"].device)
    space.mixed.fill_(NAN)
    space.stats.fill_(NAN)
    launch_decode_attention(**batch, out=outs[0], workspace=space, max_rows=most, window=window, pages=pages,
                            tile=tile)  # fmt: skip
    decode_attention_reference(**batch, out=outs[1], window=window, pages=pages)
    return outs[0], outs[1]


@pytest.mark.parametrize(
    ("start", "heads", "kv_heads", "dim", "count"),
    [(0, 6, 2, 64, 3), (63, 2, 1, 16, 16), (UNIT - 2, 4, 1, 16, 3), (600, 8, 1, 32, 1)],
)
def test_one_request(start: int, heads: int, kv_heads: int, dim: int, count: int, device: torch.device) -> None:
    got, want = both(make(device, heads, kv_heads, dim, [(2, start, count)]), 16)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


# One program a group; a second launch the spans; a program its bundle, and a second launch the bundles.
NEVER = 1 << 20
FOLDS = (
    Tile(32, 4, 1, many_groups=1),
    Tile(32, 4, 1, many_groups=NEVER, some_groups=NEVER),
    Tile(32, 4, 1, many_groups=NEVER, some_groups=1),
)


@pytest.mark.parametrize("tile", FOLDS)
@pytest.mark.parametrize("window", [None, 100])
def test_whoever_folds_the_spans(tile: Tile, window: int | None, device: torch.device) -> None:
    batch = make(device, 6, 2, 16, [(0, 200, 3), (1, 0, 1), (2, 63, 2), (3, 300, 1)])
    got, want = both(batch, 4, window, tile=tile)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)
    assert torch.equal(got, both(batch, 4, window, tile=FOLDS[0])[0])


def test_fewer_programs_than_spans(device: torch.device) -> None:
    batch = make(device, 2, 1, 16, [(0, 400, 2)])
    few = replace(EXACT_TILE, programs=3)
    assert torch.equal(both(batch, 2, tile=few)[0], both(batch, 2)[0])


def test_spans_grow_with_the_position() -> None:
    assert [spans_of(n) for n in (1, 64, 65, 2048, 2049, 4096, 4097, 32768)] == [1, 1, 2, 32, 33, 48, 49, 96]


def test_long_spans(device: torch.device) -> None:
    """Beyond 2048 keys a span has more than one unit."""
    start, heads, dim = 2200, 1, 16
    batch = {
        "q": torch.randn(2, heads, dim, device=device),
        "cache": torch.randn(1, 2, start + 2, dim, device=device),
        "starts": torch.tensor([0, 2], device=device, dtype=torch.int32),
        "rows": torch.zeros(2, device=device, dtype=torch.int32),
        "positions": torch.arange(start, start + 2, device=device),
        "ends": torch.arange(start, start + 2, device=device) + 1,
    }
    outs = torch.full((4, 2, heads, dim), NAN, device=device)
    space = attention_workspace(2, heads, dim, start + 2, device)
    for out, tile in zip(outs, FOLDS, strict=False):
        launch_decode_attention(**batch, out=out, workspace=space, max_rows=2, window=None, pages=None, tile=tile)
    decode_attention_reference(**batch, out=outs[3], window=None, pages=None)
    torch.testing.assert_close(outs[0], outs[3], atol=2e-5, rtol=2e-4)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_ragged_batch_with_an_empty_request_and_padding(device: torch.device) -> None:
    batch = make(device, 6, 2, 16, [(0, 300, 2), (3, 0, 1), (1, 511, 0), (2, 77, 3)])
    batch["starts"] = torch.cat([batch["starts"], batch["starts"][-1:]])
    # Rows behind the last request: nothing about them is meaningful, and they are left alone.
    for name, value in (("q", NAN), ("rows", -1), ("positions", 0), ("ends", 0)):
        tail = torch.full((2, *batch[name].shape[1:]), value, device=device, dtype=batch[name].dtype)
        batch[name] = torch.cat([batch[name], tail])
    got, want = both(batch, 8)
    assert got[6:].isnan().all()
    torch.testing.assert_close(got[:6], want[:6], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("window", [1, 64, 300])
def test_window(window: int, device: torch.device) -> None:
    got, want = both(make(device, 2, 1, 16, [(0, 10, 3), (1, 520, 4)]), 4, window)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


def test_window_in_a_ring(device: torch.device) -> None:
    batch = make(device, 4, 2, 16, [(0, 700, 4), (1, 900, 1)])
    got, want = both(batch, 4, 100)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("size", [UNIT, 2 * UNIT])
def test_pages_out_of_order(size: int, device: torch.device) -> None:
    batch = make(device, 4, 2, 16, [(0, 270, 2), (1, 130, 2)])
    contiguous, _ = both(batch, 4)
    each = CAPACITY // size
    order = torch.randperm(4 * each, device=device)
    pages = order.view(4, each).to(torch.int32)
    paged = torch.full((4 * each, 4, size, 16), NAN, device=device)
    cut = batch["cache"].unflatten(2, (each, size)).transpose(1, 2).flatten(0, 1)
    paged[order] = cut
    batch["cache"] = paged
    got, want = both(batch, 4, pages=pages)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)
    assert torch.equal(got, contiguous)


def test_pages_are_whole_tiles(device: torch.device) -> None:
    batch = make(device, 2, 1, 16, [(0, 10, 1)])
    with pytest.raises(ValueError, match="pages of 640 keys are not whole tiles of 48"):
        both(batch, 1, pages=torch.zeros(4, 1, dtype=torch.int32, device=device), tile=replace(EXACT_TILE, keys=48))


def test_rows_of_a_block_see_each_other(device: torch.device) -> None:
    batch = make(device, 4, 2, 16, [(0, 100, 4)])
    batch["ends"] = torch.full_like(batch["ends"], 104)
    got, want = both(batch, 4)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("window", [None, 90])
def test_a_row_does_not_depend_on_the_rows_beside_it(window: int | None, device: torch.device) -> None:
    batch = make(device, 8, 1, 16, [(0, 254, 3), (1, 300, 4)])
    together, _ = both(batch, 16, window)
    for row in (1, 6):
        alone = {name: batch[name][row : row + 1] for name in ("q", "rows", "positions", "ends")}
        alone |= {"cache": batch["cache"], "starts": torch.tensor([0, 1], device=device, dtype=torch.int32)}
        single, _ = both(alone, 1, window)
        assert_same_sums(single[0], together[row])


def test_shapes_without_a_kernel_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="48"):
        both(make(device, 2, 1, 48, [(0, 3, 1)]), 1)
