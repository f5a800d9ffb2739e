"""Growth, rollback and rings: positions that are gone are refused, stale rows are never seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.pairs import Pair, assert_close, make_pair, random_ids, run, run_chunks, their_logits
from sparkchat.models import KVCache

WINDOW = 20
BLOCK = 6


def make_cache(windows: list[int | None], max_rows: int = 3, context: int = 1000, max_span: int = 8) -> KVCache:
    return KVCache(
        windows,
        2,
        8,
        max_rows=max_rows,
        context=context,
        max_span=max_span,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def pair(build_once: Callable[..., Any]) -> Pair:
    """Every layer but the first has a window, so stale rows have somewhere to show."""
    kinds = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }
    return build_once("models-rings", lambda folder: make_pair(folder, "qwen3", **kinds))


def test_rollback_at_every_alignment_of_a_ring(pair: Pair) -> None:
    """At every position a block is run, all but part of it is taken back, and the true tokens go on."""
    ids = random_ids(3 * WINDOW + 20)
    theirs = their_logits(pair, ids)
    model = pair.ours
    cache = model.new_cache(1, 200, BLOCK)
    row, at = cache.allocate(), 0
    rejected = random_ids(BLOCK, seed=9)
    while at < len(ids):
        keep = min(at % (BLOCK - 1), len(ids) - at - 1)
        block = torch.cat([ids[at : at + keep + 1], rejected[: BLOCK - keep - 1]])
        hidden, _ = run(model, cache, [(row, block)])
        assert_close(model.logits(hidden[: keep + 1]), theirs[at : at + keep + 1])
        at += keep + 1
        cache.truncate(row, at)


@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_long_spans_at_every_alignment(pair: Pair, offset: int) -> None:
    ids = random_ids(offset + 180)
    cache = pair.ours.new_cache(1, 300, 64)
    ours = run_chunks(pair.ours, cache, cache.allocate(), ids, (max(offset, 1), 64))
    assert_close(ours, their_logits(pair, ids))


def test_windowed_memory_stays_flat(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "mistral", sliding_window=16)
    cache = pair.ours.new_cache(1, 400, 32)
    row = cache.allocate()
    run(pair.ours, cache, [(row, random_ids(32))])
    before = cache.num_bytes
    for seed in range(10):
        run(pair.ours, cache, [(row, random_ids(32, seed))])
    assert cache.num_bytes == before


def test_full_layers_grow_and_keep_what_they_hold(pair: Pair) -> None:
    ids = random_ids(420)
    cache = pair.ours.new_cache(3, 512, 256)
    first = cache.allocate()
    early = run_chunks(pair.ours, cache, first, ids[:10], (10,))
    small = cache.num_bytes
    second = cache.allocate()
    assert cache.num_bytes > small
    assert_close(run_chunks(pair.ours, cache, second, ids, (256,)), their_logits(pair, ids))
    late = run_chunks(pair.ours, cache, first, ids[10:20], (10,))
    assert_close(torch.cat([early, late]), their_logits(pair, ids[:20]))


def test_ring_refuses_positions_it_wrote_over() -> None:
    cache = make_cache([WINDOW], max_span=BLOCK)
    row = cache.allocate()
    assert cache.stores[0].slots == 32
    for _ in range(20):
        start = cache.reserve(row, BLOCK)
        cache.advance(row, start + BLOCK)
    # Going back to t needs positions t-19 .. t-1; the ring holds 120-32 = 88 and later.
    assert cache.can_truncate(row, 107)
    assert not cache.can_truncate(row, 106)
    assert not cache.can_truncate(row, 121)
    with pytest.raises(ValueError, match="cannot go back to 50"):
        cache.truncate(row, 50)
    cache.truncate(row, 110)
    # What was written stays written over, although the row is shorter now.
    assert not cache.can_truncate(row, 106)


def test_window_beyond_the_context_is_no_ring() -> None:
    cache = make_cache([4096, None], context=100)
    row = cache.allocate()
    cache.advance(row, cache.reserve(row, 90) + 90)
    assert cache.can_truncate(row, 0)
    assert len(cache.stores) == 1


def test_rows_are_handed_out_lowest_first_and_come_back_empty() -> None:
    cache = make_cache([None], max_rows=2)
    assert [cache.allocate(), cache.allocate()] == [0, 1]
    with pytest.raises(ValueError, match="all 2 cache rows"):
        cache.allocate()
    cache.advance(0, cache.reserve(0, 5) + 5)
    cache.stores[0].data[:, 0, :, :5] = float("nan")
    cache.free(0)
    assert cache.allocate() == 0
    assert cache.length(0) == 0
    assert not cache.stores[0].data.isnan().any()


def test_context_and_span_limits() -> None:
    cache = make_cache([None, WINDOW], context=64, max_span=BLOCK)
    row = cache.allocate()
    with pytest.raises(ValueError, match="does not fit rings"):
        cache.reserve(row, BLOCK + 1)
    cache.advance(row, 60)
    with pytest.raises(ValueError, match="outside the context of 64"):
        cache.reserve(row, 5)
