"""Attention over latents against its reference: first rows, rings, entries, choices, blocks, and each row by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.agreement import assert_same_sums
from kernels.latent_rows import FIRST_SLOT, NAN, Rows, latents_of, rope_of, rows_of
from sparkchat.kernels.latent_attention import LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import (
    EXACT_TILE,
    Tile,
    launch_latent_attention,
    launch_write_latents,
)
from sparkchat.kernels.latent_attention.reference import latent_attention_reference, write_latents_reference

SIZE, ROPE, HEADS, WINDOW, RING = 32, 16, 3, 8, 32
SHAPE = LatentShape(FIRST_SLOT, RING, 0, ROPE, 1e-6)
Batch = dict[str, Any]


def make(
    spans: list[tuple[int, int, int]],
    device: torch.device,
    ratio: int = 0,
    window: int = WINDOW,
    *,
    is_block: bool = False,
    heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
) -> tuple[Rows, Batch]:
    rows = rows_of(spans, window, device, is_block=is_block)
    count, context = len(rows.rows), max(s + n for _, s, n in spans)
    return rows, {
        "q": torch.randn(count, heads * SIZE, device=device).to(dtype),
        "cache": latents_of(spans, RING if window == WINDOW else 160, ratio, SIZE, device, dtype),
        "rope": rope_of(context, ROPE, device),
        "sinks": torch.randn(heads, device=device),
    }


def attend(
    rows: Rows,
    batch: Batch,
    shape: LatentShape,
    chosen: Tensor | None = None,
    context: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    heads, count = len(batch["sinks"]), len(rows.rows)
    context = context or int(rows.ends.max())
    out = torch.full((count, heads, SIZE), NAN, device=batch["cache"].device, dtype=batch["cache"].dtype)
    space = latent_workspace(count, heads, SIZE, latent_spans(shape, context), out.device)
    space.mixed.fill_(NAN)
    launch_latent_attention(
        **batch, rows=rows.rows, positions=rows.positions, first_seen=rows.first_seen, ends=rows.ends, out=out,
        workspace=space, shape=shape, context=context, chosen=chosen, tile=tile,
    )  # fmt: skip
    return out


def reference(rows: Rows, batch: Batch, shape: LatentShape, chosen: Tensor | None = None) -> Tensor:
    out = torch.empty(len(rows.rows), len(batch["sinks"]), SIZE, device=batch["cache"].device)
    latent_attention_reference(
        **batch, rows=rows.rows, positions=rows.positions, first_seen=rows.first_seen, ends=rows.ends, out=out,
        shape=shape, chosen=chosen,
    )  # fmt: skip
    return out


def assert_agree(
    rows: Rows, batch: Batch, shape: LatentShape, chosen: Tensor | None = None, atol: float = 2e-5
) -> None:
    got, want = attend(rows, batch, shape, chosen), reference(rows, batch, shape, chosen)
    torch.testing.assert_close(got.float(), want, atol=atol, rtol=10 * atol)


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_rows_at_every_alignment(ratio: int, device: torch.device) -> None:
    """First tokens, a window that is filling up, a ring that wraps in the middle of a span, entries as they close."""
    rows, batch = make([(2, 0, 2), (0, 6, 3), (3, 29, 5), (1, 61, 3)], device, ratio)
    assert_agree(rows, batch, replace(SHAPE, ratio=ratio))


def test_blocks_see_all_of_themselves_and_the_window_before(device: torch.device) -> None:
    rows, batch = make([(0, 0, 4), (1, 5, 4), (2, 60, 4)], device, is_block=True)
    assert_agree(rows, batch, SHAPE)


def test_chosen_entries(device: torch.device) -> None:
    """One row sees no more than are chosen, and looks at all it sees; the choice of the others is in no order."""
    rows, batch = make([(0, 20, 2), (1, 61, 3)], device, 4)
    shape = replace(SHAPE, ratio=4, topk=6)
    chosen = torch.full((5, 6), 10**6, dtype=torch.int32, device=device)
    for n, position in enumerate(rows.positions.tolist()):
        seen = (position + 1) // 4
        if seen > 6:
            chosen[n] = torch.randperm(seen, device=device)[:6].int()
    assert_agree(rows, batch, shape, chosen)


@pytest.mark.parametrize("entries", [129, 1030])
def test_entries_of_several_spans(entries: int, device: torch.device) -> None:
    """Up to 1,024 entries a span has 128, then as many more as keep the spans few."""
    rows, batch = make([(0, 2 * entries, 1)], device, 2)
    assert_agree(rows, batch, replace(SHAPE, ratio=2))


@pytest.mark.parametrize("window, is_block", [(100, False), (136, True)])
def test_windows_of_several_spans(window: int, is_block: bool, device: torch.device) -> None:
    """A window's keys lie in one span or two, which become longer where two are too few; the ring wraps in each."""
    rows, batch = make([(0, 10, 1), (1, 90, 2), (2, 300, 2), (3, 350, 1)], device, 0, window, is_block=is_block)
    assert_agree(rows, batch, replace(SHAPE, ring=160))


def test_partial_sums_and_more_room_than_rows_need(device: torch.device) -> None:
    rows, batch = make([(0, 21, 3)], device, 4)
    shape = replace(SHAPE, ratio=4)
    whole = attend(rows, batch, shape)
    parts = torch.randn(3, *batch["q"].shape, device=device)
    parts[2] = batch["q"] - parts[0] - parts[1]
    torch.testing.assert_close(attend(rows, {**batch, "q": parts}, shape), whole, atol=2e-5, rtol=2e-4)
    # A larger context starts programs that have nothing to do.
    assert_same_sums(attend(rows, batch, shape, context=4000), whole)


@pytest.mark.parametrize("ratio, topk", [(0, 0), (2, 0), (4, 40)])
def test_many_rows_get_the_bits_of_few(ratio: int, topk: int, device: torch.device) -> None:
    """A program that takes all spans of a row adds as programs that take one each."""
    spans = [(0, 0, 1), (1, 90, 1), (2, 380, 2)]
    rows, batch = make(spans, device, ratio, 100)
    shape = replace(SHAPE, ratio=ratio, topk=topk, ring=160)
    chosen = torch.stack([torch.randperm(90, device=device)[:topk] for _ in range(4)]).int() if topk else None
    few, many = (attend(rows, batch, shape, chosen, tile=replace(EXACT_TILE, many_rows=n)) for n in (100, 1))
    assert_same_sums(many, few)
    torch.testing.assert_close(many, reference(rows, batch, shape, chosen), atol=2e-5, rtol=2e-4)


def test_half_precision(device: torch.device) -> None:
    # The interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    rows, batch = make([(0, 40, 3)], device, 4, dtype=dtype)
    assert_agree(rows, batch, replace(SHAPE, ratio=4), atol=2e-2)


def test_more_heads_than_a_program_takes(device: torch.device) -> None:
    rows, batch = make([(0, 40, 2)], device, 4, heads=17)
    assert_agree(rows, batch, replace(SHAPE, ratio=4))


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    rows, batch = make([(0, 18, 4), (1, 61, 3)], device, 4)
    shape = replace(SHAPE, ratio=4)
    together = attend(rows, batch, shape)
    for n in (0, 5):
        alone = attend(rows.row(n), {**batch, "q": batch["q"][n : n + 1]}, shape)
        assert_same_sums(alone[0], together[n])


def write(rows: Rows, shape: LatentShape, device: torch.device, dtype: torch.dtype, parts: int) -> tuple[Batch, Batch]:
    """What the kernel and what the reference make of the same products."""
    count, low = len(rows.rows), 24
    product = torch.randn(parts, count, low + SIZE, device=device)
    latents, low_rank = product[..., low:], product[..., :low]
    if parts == 1:
        latents, low_rank = latents[0], low_rank[0]
    fixed = {
        "latents": latents, "latent_norm": torch.rand(SIZE, device=device) + 0.5, "positions": rows.positions,
        "rows": rows.rows, "rope": rope_of(200, ROPE, device), "shape": shape, "low_rank": low_rank,
        "low_rank_norm": torch.rand(low, device=device) + 0.5,
    }  # fmt: skip
    made = []
    for call in (launch_write_latents, write_latents_reference):
        cache = torch.full((4, FIRST_SLOT + RING + 8, SIZE), 7.0, device=device, dtype=dtype)
        out = torch.full((count, low), NAN, device=device, dtype=dtype)
        call(**fixed, cache=cache, out=out)
        made.append({"cache": cache, "out": out})
    return made[0], made[1]


@pytest.mark.parametrize("has_roundings", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_latents_are_written_where_positions_say(parts: int, has_roundings: bool, device: torch.device) -> None:
    rows = rows_of([(0, 0, 2), (3, 30, 4), (1, 100, 1)], WINDOW, device)
    got, want = write(rows, replace(SHAPE, has_roundings=has_roundings), device, torch.float32, parts)
    for name in got:
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-4)
    untouched = (got["cache"] == 7.0).all(dim=-1)
    assert (~untouched).sum() == 7 and not untouched[3, FIRST_SLOT + torch.tensor([30, 31, 0, 1])].any()


def test_latents_in_bfloat16(device: torch.device) -> None:
    got, want = write(rows_of([(0, 5, 2)], WINDOW, device), SHAPE, device, torch.bfloat16, 1)
    for name in got:
        torch.testing.assert_close(got[name], want[name], atol=2e-2, rtol=2e-2)


def test_latents_without_low_ranks(device: torch.device) -> None:
    """As a drafter keeps the target's features."""
    rows = rows_of([(0, 5, 2)], WINDOW, device)
    cache = torch.zeros(1, FIRST_SLOT + RING, SIZE, device=device)
    want = cache.clone()
    latents, norm, rope = torch.randn(2, SIZE, device=device), torch.ones(SIZE, device=device), rope_of(9, ROPE, device)
    launch_write_latents(latents, norm, rows.positions, rows.rows, rope, cache, SHAPE, None, None, None)
    write_latents_reference(latents, norm, rows.positions, rows.rows, rope, want, SHAPE, None, None, None)
    torch.testing.assert_close(cache, want, atol=1e-5, rtol=1e-4)


def test_what_has_no_kernel_or_no_room_is_refused(device: torch.device) -> None:
    rows, batch = make([(0, 300, 1)], device, 2)
    space = latent_workspace(1, HEADS, SIZE, 1, device)
    out = torch.zeros(1, HEADS, SIZE, device=device)
    where = (rows.rows, rows.positions, rows.first_seen, rows.ends, batch["rope"], batch["sinks"], out, space)
    with pytest.raises(ValueError, match="no room for 1 rows of 5 spans"):
        launch_latent_attention(batch["q"], batch["cache"], *where, replace(SHAPE, ratio=2), 301, None)
    with pytest.raises(ValueError, match="24 dimensions"):
        launch_latent_attention(batch["q"], batch["cache"][..., :24], *where, SHAPE, 301, None)
