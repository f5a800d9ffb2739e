"""Pages: a row holds as many as it needs, comes back clean, and reads what a row of its own storage would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.pairs import Pair, make_pair, random_ids, run, run_chunks
from sparkchat.models.page_table import BLANK, PAGE_SIZE, PageTable
from sparkchat.models.paged_cache import PagedCache, PagedStore

WINDOW = 20


def make_cache(num_pages: int, windows: tuple[int | None, ...] = (None,), rows: int = 4) -> PagedCache:
    return PagedCache(
        windows,
        2,
        8,
        num_pages=num_pages,
        max_rows=rows,
        context=400,
        max_span=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def pair(build_once: Callable[..., Any]) -> Pair:
    """The first layer sees everything, the others a window."""
    kinds = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }
    return build_once("models-rings", lambda folder: make_pair(folder, "qwen3", **kinds))


def test_rows_in_pages_compute_what_rows_of_their_own_do(pair: Pair) -> None:
    """Interleaved, so that neighbours' pages lie between; taken back, set aside and brought back on the way."""
    own, paged = pair.ours.new_cache(4, 400, 64), pair.ours.new_cache(4, 400, 64, pages=20)
    assert isinstance(paged, PagedCache) and [type(store) is PagedStore for store in paged.stores] == [True, False]
    ids = [random_ids(300, seed=n) for n in range(3)]
    rows = [[cache.allocate() for _ in range(3)] for cache in (own, paged)]
    at = [0, 0, 0]
    generator = random.Random(3)
    for turn in range(40):
        chosen = sorted(generator.sample(range(3), generator.randint(1, 3)))
        counts = [min(generator.choice((1, 5, 40)), 300 - at[n]) for n in chosen]
        spans = [(n, ids[n][at[n] : at[n] + c]) for n, c in zip(chosen, counts, strict=True) if c]
        if not spans:
            continue
        outs = [
            run(pair.ours, cache, [(held[n], part) for n, part in spans])[0]
            for cache, held in zip((own, paged), rows, strict=True)
        ]
        assert torch.equal(*outs), turn
        for n, part in spans:
            at[n] += len(part) - turn % 3 % len(part)
            for cache, held in zip((own, paged), rows, strict=True):
                cache.truncate(held[n], at[n])
        if turn % 7 == 3:
            n = chosen[0]
            saved = paged.save(rows[1][n])
            paged.free(rows[1][n])
            other = paged.allocate()
            run_chunks(pair.ours, paged, other, random_ids(70, seed=turn), (64,))
            rows[1][n] = paged.restore(saved)
            paged.free(other)
    assert max(at) > 3 * PAGE_SIZE
    for row in rows[1]:
        paged.free(row)
    assert paged.table.num_free == 20


def test_pages_come_back_clean_and_blank_is_never_written() -> None:
    cache = make_cache(8, (None, WINDOW))
    paged, ring = cache.stores
    first = cache.allocate()
    cache.advance(first, cache.reserve(first, 64) + 64)
    cache.advance(first, cache.reserve(first, 64) + 64)
    for store in (paged, ring):
        at, slot = store.locate(torch.full((128,), first), torch.arange(128))
        assert BLANK not in at.tolist() or store is ring
        store.data[:, at, :, slot] = float("nan")
    cache.free(first)
    again = cache.allocate()
    cache.reserve(again, 64)
    held = cache.table.held(again)
    assert len(held) == 1 and not paged.data[:, held].isnan().any()
    assert not ring.data[:, again].isnan().any()
    assert not paged.data[:, BLANK].any()
    # Behind what a row holds there is nothing of its last owner to be read.
    assert (cache.table.numbers[again, 1:] == BLANK).all()


def test_rows_of_nobody_lie_in_one_page_or_in_those_lent() -> None:
    cache = make_cache(7)
    spare = cache.allocate_spare()
    assert (cache.table.numbers[spare] == 8).all() and cache.table.num_free == 7
    cache.lend(spare, 3 * PAGE_SIZE)
    assert len(set(cache.table.numbers[spare].tolist())) == 3
    cache.lend(spare, 100 * PAGE_SIZE)
    assert set(cache.table.numbers[spare].tolist()) == set(range(1, 8))
    cache.lend(spare, 0)
    assert (cache.table.numbers[spare] == 8).all() and cache.table.num_free == 7


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold a context of 400"):
        make_cache(6)
    cache = make_cache(7)
    first, second = cache.allocate(), cache.allocate()
    cache.take(first, 5 * PAGE_SIZE)
    assert cache.can_take(second, 2 * PAGE_SIZE) and not cache.can_take(second, 2 * PAGE_SIZE + 1)
    assert cache.can_take(second, 7 * PAGE_SIZE, [first])
    with pytest.raises(ValueError, match="needs 3 pages more, and 2 are free"):
        cache.take(second, 3 * PAGE_SIZE)
    cache.advance(first, 10)
    cache.trim(first)
    assert cache.num_free_tokens == 6 * PAGE_SIZE


@pytest.mark.parametrize("seed", range(3))
def test_the_table_on_the_device_is_that_of_a_simple_model(seed: int) -> None:
    """A thousand random takes and returns: no page is held twice or lost, and published is what was decided."""
    generator = random.Random(seed)
    table, model = PageTable(5, 9, 20, torch.device("cpu")), dict.fromkeys(range(5), 0)
    before, ever, unclean = set[int](), set[int](), set[int]()
    for _ in range(1000):
        row, positions = generator.randrange(5), generator.randint(0, 9 * PAGE_SIZE)
        pages = -(-positions // PAGE_SIZE)
        if generator.random() < 0.5:
            table.give_back(row, positions)
            model[row] = min(model[row], pages)
        elif pages - model[row] <= 20 - sum(model.values()):
            table.take(row, positions)
            model[row] = max(model[row], pages)
        else:
            with pytest.raises(ValueError, match="are free"):
                table.take(row, positions)
        held = [page for one in model for page in table.held(one)]
        assert [len(table.held(one)) for one in model] == list(model.values())
        assert len(set(held)) == len(held) and table.num_free == 20 - len(held)
        unclean |= (set(held) - before) & ever
        before, ever = set(held), ever | set(held)
        if generator.random() < 0.3:
            assert set(table.publish()) == unclean
            unclean.clear()
            for one, count in model.items():
                assert table.numbers[one].tolist() == table.held(one) + [BLANK] * (9 - count)


def test_rows_that_are_too_much_to_copy_at_once_are_attended_to_in_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = [(n, random_ids(40 + n, seed=n)) for n in range(3)]
    outs = []
    for most in (1 << 28, 1):
        monkeypatch.setattr("sparkchat.models.attention.MOST_COPIED", most)
        cache = pair.ours.new_cache(3, 400, 64, pages=20)
        for _ in range(3):
            cache.allocate()
        outs.append(run(pair.ours, cache, spans)[0])
    assert torch.equal(*outs)
