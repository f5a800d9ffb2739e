"""What the cache holds: rings that stay flat, entries that grow, rows that are taken again, limits that are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.deepseek_v4.trunks import make_trunk, random_ids, run
from sparkchat.models.deepseek_v4.cache import RatioStore, StateCache

SMALL: dict[str, Any] = {"compress_ratios": [0, 4, 8], "num_hidden_layers": 3, "hc_sinkhorn_iters": 2}
TRUNK = make_trunk(**SMALL)
WINDOWS = make_trunk(compress_ratios=[0, 0], num_hidden_layers=2, hc_sinkhorn_iters=2)


def fill(cache: StateCache, row: int, ids: Tensor, model: Any = None) -> Tensor:
    return torch.cat([run(model or TRUNK.ours, cache, [(row, part)]) for part in ids.split(cache.max_span)])


def parts(cache: StateCache) -> dict[tuple[int, str], int]:
    """Bytes by ratio and kind."""
    return {
        (ratio, name): part.data.nbytes
        for ratio, store in cache.stores.items()
        for name in ("latents", "raw", "index_keys", "index_raw")
        if (part := getattr(store, name)) is not None
    }


def test_windows_stay_flat() -> None:
    cache = WINDOWS.ours.new_cache(1, 4000, 16)
    row = cache.allocate()
    fill(cache, row, random_ids(16), WINDOWS.ours)
    before = cache.num_bytes
    fill(cache, row, random_ids(200), WINDOWS.ours)
    assert cache.num_bytes == before
    assert cache.length(row) == 216


def test_only_entries_grow() -> None:
    cache = TRUNK.ours.new_cache(1, 2000, 64)
    row = cache.allocate()
    fill(cache, row, random_ids(64))
    before = parts(cache)
    fill(cache, row, random_ids(700, seed=1))
    after = parts(cache)
    # 764 positions are 191 entries of 4 and 95 of 8; with the ring they still fit the first block of float32 slots.
    assert cache.stores[4].num_entries == 256 and cache.stores[8].num_entries == 128
    assert {key for key in after if after[key] > before[key]} == {(4, "index_keys")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_hold_the_entries_and_in_float32_whole_blocks(dtype: torch.dtype) -> None:
    store = RatioStore(TRUNK.ours.config, 4, 1, context=8000, max_span=8, dtype=dtype, device=torch.device("cpu"))
    sizes = []
    for positions in (0, 400, 1640, 1700, 8000):
        store.grow(1, positions)
        sizes.append(store.latents.data.shape[2])
        assert sizes[-1] >= store.first_entry + positions // 4
    steps = {torch.float32: [512, 512, 512, 1024, 2048], torch.bfloat16: [96, 160, 448, 864, 2032]}
    assert sizes == steps[dtype]


def test_growth_keeps_what_is_there() -> None:
    """Entries and rows grow while requests run; what they held is what they hold."""
    ids = random_ids(400)
    cache = TRUNK.ours.new_cache(3, 500, 32)
    row = cache.allocate()
    head = fill(cache, row, ids[:300])
    others = [cache.allocate(), cache.allocate()]
    run(TRUNK.ours, cache, [(other, random_ids(9)) for other in others])
    tail = fill(cache, row, ids[300:])
    fresh = TRUNK.ours.new_cache(1, 500, 32)
    assert torch.equal(torch.cat([head, tail]), fill(fresh, fresh.allocate(), ids))


def test_a_row_taken_again_starts_empty() -> None:
    ids = random_ids(40, seed=2)
    cache = TRUNK.ours.new_cache(1, 200, 16)
    fill(cache, cache.allocate(), random_ids(150))
    cache.free(0)
    assert cache.allocate() == 0 and cache.length(0) == 0
    fresh = TRUNK.ours.new_cache(1, 200, 16)
    assert torch.equal(fill(cache, 0, ids), fill(fresh, fresh.allocate(), ids))


def test_nan_of_one_request_stays_with_it() -> None:
    """A damaged embedding row spoils the request that uses it; neighbours and the next in its row are untouched."""
    weights = {**TRUNK.weights, "embed.weight": TRUNK.weights["embed.weight"].clone()}
    weights["embed.weight"][96] = float("nan")
    from sparkchat.models.deepseek_v4.scope import TensorTable

    model = type(TRUNK.ours)(TensorTable(weights), TRUNK.ours.config, torch.device("cpu"), torch.float32)
    good, bad = random_ids(30, seed=3) % 96, torch.full((30,), 96)
    cache = model.new_cache(2, 100, 32)
    rows = [cache.allocate(), cache.allocate()]
    together = run(model, cache, [(rows[0], bad), (rows[1], good)])
    assert together[:30].isnan().all()
    alone = TRUNK.ours.new_cache(1, 100, 32)
    wanted = fill(alone, alone.allocate(), good)
    assert torch.equal(together[30:], wanted)
    cache.free(rows[0])
    # Shorter than what was there, so that some of it would be left.
    assert torch.equal(run(model, cache, [(cache.allocate(), good[:10])]), wanted[:10])


def test_rows_run_out() -> None:
    cache = TRUNK.ours.new_cache(2, 64, 8)
    assert [cache.allocate(), cache.allocate()] == [0, 1]
    with pytest.raises(ValueError, match="all 2 cache rows"):
        cache.allocate()
    cache.free(0)
    assert cache.allocate() == 0


def test_spans_and_contexts_have_limits() -> None:
    cache = TRUNK.ours.new_cache(1, 40, 8)
    row = cache.allocate()
    with pytest.raises(ValueError, match="9 rows does not fit rings made for 8"):
        run(TRUNK.ours, cache, [(row, random_ids(9))])
    assert cache.length(row) == 0
    fill(cache, row, random_ids(40))
    with pytest.raises(ValueError, match="outside the context of 40"):
        fill(cache, row, random_ids(9))


@pytest.mark.parametrize("context", [1, 3, 5, 17, 33])
def test_short_contexts(context: int) -> None:
    """Rings are never longer than the context, and entries may be none."""
    ids = random_ids(context)
    cache = TRUNK.ours.new_cache(1, context, 256)
    wide = TRUNK.ours.new_cache(1, 400, 256)
    hidden = fill(cache, cache.allocate(), ids)
    assert torch.allclose(hidden, fill(wide, wide.allocate(), ids), atol=1e-4)
    assert all(cache.can_truncate(0, length) for length in range(context + 1))


def test_truncating_to_where_it_is_changes_nothing() -> None:
    cache = TRUNK.ours.new_cache(1, 100, 16)
    row = cache.allocate()
    fill(cache, row, random_ids(50))
    cache.truncate(row, 50)
    assert cache.length(row) == 50 and cache.can_truncate(row, 50) and not cache.can_truncate(row, 51)


@pytest.mark.parametrize("back", [0, 1, 7])
def test_what_was_kept_brings_a_row_back_from_anywhere(back: int) -> None:
    ids, other = random_ids(60, seed=4), random_ids(20, seed=5)
    cache = TRUNK.ours.new_cache(1, 300, 16)
    row = cache.allocate()
    fill(cache, row, ids)
    cache.keep(row)
    fill(cache, row, random_ids(200, seed=6))
    assert cache.can_truncate(row, 60 - back) and not cache.can_truncate(row, 70) and not cache.can_truncate(row, 20)
    cache.truncate(row, 60 - back)
    fresh = TRUNK.ours.new_cache(1, 300, 16)
    fill(fresh, fresh.allocate(), ids[: 60 - back])
    assert torch.equal(fill(cache, row, other), fill(fresh, 0, other))


def test_what_was_kept_of_another_text_is_forgotten() -> None:
    cache = TRUNK.ours.new_cache(1, 300, 16)
    row = cache.allocate()
    fill(cache, row, random_ids(60, seed=4))
    cache.keep(row)
    cache.truncate(row, 55)
    fill(cache, row, random_ids(200, seed=6))
    assert not cache.can_truncate(row, 55)
    cache.free(row)
    assert cache.allocate() == row
    fill(cache, row, random_ids(100, seed=7))
    assert not cache.can_truncate(row, 55)
