"""The choice of entries against its reference: ties, places, roundings, long contexts, and each row by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.latent_rows import NAN, Rows, rope_of, rows_of
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.indexer.reference import choose_entries_reference
from sparkchat.models.deepseek_v4.indexer import best_entries
from sparkchat.models.deepseek_v4.rounding import hadamard

SHAPE = IndexShape(heads=5, size=32, rope_dim=16, ratio=4, topk=6)
Batch = dict[str, Any]


def make(spans: list[tuple[int, int, int]], device: torch.device, shape: IndexShape = SHAPE) -> tuple[Rows, Batch]:
    rows = rows_of(spans, 1, device)
    count, context = len(rows.rows), int(rows.ends.max())
    keys = torch.full((4, context // shape.ratio + 3, shape.size), NAN, device=device)
    for row, start, number in spans:
        held = (start + number) // shape.ratio
        keys[row, :held] = torch.randn(held, shape.size, device=device)
    return rows, {
        "q": torch.randn(count, shape.heads * shape.size, device=device),
        "weights": torch.randn(count, shape.heads, device=device),
        "keys": keys,
        "rope": rope_of(context, shape.rope_dim, device),
    }


def choose(
    rows: Rows, batch: Batch, shape: IndexShape, *, is_kernel: bool = True, **settings: Any
) -> tuple[Tensor, Tensor]:
    """scores and choice"""
    context = settings.pop("context", int(rows.ends.max()))
    device = rows.positions.device
    scores = index_scores_of(len(rows.rows), context, shape, device).fill_(NAN)
    chosen = torch.full((len(rows.rows), shape.topk), -1, dtype=torch.int32, device=device)
    common = {**batch, "positions": rows.positions, "rows": rows.rows, "starts": rows.starts, "scores": scores,
              "chosen": chosen, "shape": shape, "rotation": settings.pop("rotation", None)}  # fmt: skip
    if is_kernel:
        launch_choose_entries(**common, context=context, most_per_request=8, **settings)
    else:
        choose_entries_reference(**common)
    return scores, chosen


def assert_agree(rows: Rows, batch: Batch, shape: IndexShape = SHAPE, **settings: Any) -> Tensor:
    want_scores, want = choose(rows, batch, shape, is_kernel=False, rotation=settings.get("rotation"))
    got_scores, got = choose(rows, batch, shape, **settings)
    width = want_scores.shape[1]
    is_seen = ~want_scores.isnan()
    torch.testing.assert_close(got_scores[:, :width][is_seen], want_scores[is_seen], atol=2e-4, rtol=2e-4)
    assert torch.equal(got, want)
    return got


def test_rows_that_see_few_and_many(device: torch.device) -> None:
    """Rows that see no more than are chosen are left alone, beside others of the same request."""
    rows, batch = make([(2, 24, 6), (0, 0, 2), (1, 300, 3)], device)
    chosen = assert_agree(rows, batch)
    assert (chosen[:3] == -1).all() and (chosen[3:6] >= 0).all() and (chosen[6:8] == -1).all()


def test_copies_behind_the_last_request(device: torch.device) -> None:
    rows, batch = make([(0, 100, 3)], device)
    _, want = choose(rows, batch, SHAPE)
    index = torch.tensor([0, 1, 2, 2, 2], device=device)
    named = {name: getattr(rows, name)[index] for name in ("positions", "rows", "ends")}
    batch |= {name: batch[name][index] for name in ("q", "weights")}
    _, got = choose(replace(rows, **named), batch, SHAPE)
    assert torch.equal(got, want[index])


def test_partial_sums_and_a_larger_context(device: torch.device) -> None:
    rows, batch = make([(0, 200, 3)], device)
    _, want = choose(rows, batch, SHAPE)
    parts = torch.randn(2, *batch["q"].shape, device=device)
    parts[1] = batch["q"] - parts[0]
    _, got = choose(rows, {**batch, "q": parts}, SHAPE, context=1000)
    assert torch.equal(got, want)


def test_roundings(device: torch.device) -> None:
    rows, batch = make([(0, 120, 3)], device)
    assert_agree(rows, batch, rotation=hadamard(SHAPE.size, device))


@pytest.mark.parametrize("most_held", [16384, 64])
def test_equal_scores_go_to_the_earliest(most_held: int, device: torch.device) -> None:
    """Few different keys, all scores equal, none above zero; held in registers and read again for every bit."""
    shape = replace(SHAPE, topk=33)
    rows, batch = make([(0, 300, 2), (1, 260, 1), (2, 200, 1)], device, shape)
    batch["keys"][0] = batch["keys"][0, torch.randint(5, (len(batch["keys"][0]),), device=device)]
    batch["keys"][1] = 0.0
    batch["weights"][3] = -1.0
    scores, got = choose(rows, batch, shape, most_held=most_held)
    for n, position in enumerate(rows.positions.tolist()):
        seen = (position + 1) // 4
        wanted = best_entries(scores[n, :seen], shape.topk).nonzero()[:, 0]
        assert got[n].tolist() == wanted.tolist()
    assert got[2].tolist() == list(range(33))


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    rows, batch = make([(0, 100, 4), (1, 61, 3)], device)
    _, together = choose(rows, batch, SHAPE)
    for n in (0, 5):
        alone = {**batch, "q": batch["q"][n : n + 1], "weights": batch["weights"][n : n + 1]}
        _, chosen = choose(rows.row(n), alone, SHAPE)
        assert torch.equal(chosen[0], together[n])


def test_what_has_no_kernel_is_refused(device: torch.device) -> None:
    rows, batch = make([(0, 100, 1)], device, replace(SHAPE, size=24))
    with pytest.raises(ValueError, match="5 index heads of 24"):
        choose(rows, batch, replace(SHAPE, size=24))
    rows, batch = make([(0, 100, 1)], device)
    scores = torch.zeros(1, 8, device=device)
    with pytest.raises(ValueError, match="25 entries of 1 rows do not fit"):
        launch_choose_entries(
            **batch, positions=rows.positions, rows=rows.rows, starts=rows.starts, scores=scores,
            chosen=scores.int(), shape=SHAPE, context=101, most_per_request=1, rotation=None,
        )  # fmt: skip
