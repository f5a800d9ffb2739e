"""What captured steps cost, from requests that nobody made: by rows, requests and what each has cached."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from engine.test_captured import open_one
from sparkchat.engine.captured import costs
from sparkchat.engine.captured.costs import captured_costs, filled, tiers_of, timed_rows
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.cost_table import CostLookup
from sparkchat.models.fused import MOST_SMALL_ROWS
from sparkchat.models.page_table import PAGE_SIZE
from sparkchat.models.paged_cache import PagedCache
from sparkchat.params import BatchCosts, ContextCosts, CostTable

BLOCK = 3


class Device:
    """Steps by a law: a token that every request has cached costs more where there are more requests, by a line."""

    def __init__(self, room: int) -> None:
        self.room, self.longest = room, dict[int, int]()

    def room_for_strangers(self, count: int) -> int:
        return self.room // count

    def time_stages(self, count: int, draft: bool, rows: int, draws: Draws, repeats: int, context: int = 1) -> float:
        self.longest[count] = max(context, self.longest.get(count, 0))
        each, drafts = 1e-4 + 5e-5 * count, 1.0 if draft else 0.0
        attending = (context - 1) * (each + 1e-5 * rows)
        return 4.0 + drafts + 0.1 * rows + attending + (0.25 if draws is Draws.FILTERED else 0.0)


def test_every_number_of_requests_has_its_own_costs_of_context() -> None:
    device = Device(100_000)
    found = captured_costs(device, BLOCK, [1, 4, 32])  # type: ignore[arg-type]
    table = CostTable.from_json(json.loads(json.dumps(asdict(found))))
    assert table == found
    lookup = CostLookup(table)
    for count in (1, 2, 3, 4, 7, 20, 32):
        for each in (1, 100, 1000, 5000):
            # Tiers fit 1, 4 and 32 requests; between them rows lie between tiers.
            for rows in (count, count * (BLOCK + 1)):
                law = device.time_stages(count, True, rows, Draws.SAMPLED, 1, each)
                assert lookup.at(count, count * each).step_ms(rows) == pytest.approx(law, rel=1e-6)
            plain = device.time_stages(count, False, count, Draws.SAMPLED, 1, each)
            assert lookup.at(count, count * each).plain_ms == pytest.approx(plain, rel=1e-6)
    assert lookup.at(4, is_filtered=True).step_ms(4) == pytest.approx(lookup.at(4).step_ms(4) + 0.25)
    # Beyond the most that were measured a token costs what it does there.
    more = [lookup.at(64, 64 * each).fixed_ms for each in (1, 1001)]
    assert more[1] - more[0] == pytest.approx(64 * 1000 * (1e-4 + 5e-5 * 32) / 32)


def test_context_is_as_long_as_there_is_room_for() -> None:
    device = Device(6000)
    table = captured_costs(device, BLOCK, [1, 2, 4, 32])  # type: ignore[arg-type]
    # Of every other number, and of the last.
    assert device.longest == {1: 1 + 5888, 2: 1, 4: 1 + 1408, 32: 1 + 128}
    assert [batch.context and batch.context.tokens for batch in table.batches] == [1, None, 4, 32]
    assert table.context == table.batches[0].context
    tight = Device(200)
    assert [b.context is None for b in captured_costs(tight, BLOCK, [1, 4]).batches] == [False, True]  # type: ignore[arg-type]
    assert tight.longest == {1: 129, 4: 1}


def test_a_table_of_one_line_for_all_requests_counts_as_before() -> None:
    one = captured_costs(Device(4000), BLOCK, [1])  # type: ignore[arg-type]
    old = CostTable(one.rows, one.step_ms, "measured", one.plain_ms, (), True, ContextCosts(1, 0.01))
    assert CostLookup(old).at(3, 101).fixed_ms == pytest.approx(1.0)
    assert one.batches[0].rows == row_tiers(BLOCK, 1)


def test_strangers_lie_in_pages_of_their_own(tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there are some: shared ones would be read from the device's own cache. All of it comes back."""
    monkeypatch.setattr(costs, "REPEATS", 1)
    monkeypatch.setattr(costs, "LONG_TOKENS", 256)
    monkeypatch.setattr(costs, "LONG_TOKENS_OF_MANY", 128)
    engine = open_one(tiny_pair.target, tiny_pair.drafter, True, cache_tokens=1800).engine
    decoder, pair = engine._captured, engine.pair
    assert decoder is not None
    assert isinstance(pair.cache, PagedCache) and isinstance(pair.draft_cache, PagedCache)
    free = [cache.num_free_tokens for cache in (pair.cache, pair.draft_cache)]
    seen: list[torch.Tensor] = []
    decode = pair.target.decode_rows

    def watch(rows: Any, *rest: Any) -> Any:
        pages = pair.cache.table.numbers[rows.cache_rows.long()]
        seen.append(pages[:, : -(-int(rows.positions.max() + 1) // PAGE_SIZE)].clone())
        return decode(rows, *rest)

    monkeypatch.setattr(pair.target, "decode_rows", watch)
    decoder.time_stages(5, False, 5, Draws.SAMPLED, 1, context=129)
    assert len(seen[-1].unique()) == seen[-1].numel() == 15
    held = pair.cache.allocate()
    pair.cache.take(held, pair.cache.context)
    pair.cache.publish()
    most = decoder.room_for_strangers(5) // PAGE_SIZE
    decoder.time_stages(5, False, 5, Draws.SAMPLED, 1, context=most * PAGE_SIZE - 10)
    assert seen[-1].shape == (5, most) and len(seen[-1].unique()) == 5 * most
    decoder.time_stages(5, False, 5, Draws.SAMPLED, 1, context=most * PAGE_SIZE + 1)
    assert len(seen[-1].unique()) < seen[-1].numel()
    mine = pair.cache.table.held(held)
    assert not set(mine) & {int(page) for pages in seen[-2:] for page in pages.unique()}
    pair.cache.free(held)
    assert [cache.num_free_tokens for cache in (pair.cache, pair.draft_cache)] == free
    table = captured_costs(decoder, 3, [1, 5])
    assert all(batch.context is not None for batch in table.batches)
    assert [cache.num_free_tokens for cache in (pair.cache, pair.draft_cache)] == free


class H200:
    """A step by weights that are read, or arithmetic where that takes longer, in tiles of 32 rows beyond the rows of
    small products; drafts of every request; and attention. Near what Qwen3-8B takes there: 5.3, 6.1, 8, 12, 22, 39 and
    75 ms at whole windows of 1, 8, 16, 32, 64, 128 and 256 requests."""

    SEATS = 256

    def __init__(self) -> None:
        self.timed: list[tuple[int, bool, int]] = []

    def room_for_strangers(self, count: int) -> int:
        return 600

    def time_stages(self, count: int, draft: bool, rows: int, draws: Draws, repeats: int, context: int = 1) -> float:
        if draws is Draws.SAMPLED and context == 1:
            self.timed.append((count, draft, rows))
        return self.law(count, rows, draft, context) + (0.2 + 1e-3 * rows if draws is Draws.FILTERED else 0.0)

    def law(self, count: int, rows: int, draft: bool = True, context: int = 1) -> float:
        rows = next(n for n in row_tiers(WINDOW - 1, self.SEATS) if n >= rows)
        padded = rows if rows <= MOST_SMALL_ROWS else -(-rows // 32) * 32
        verified = max(4.2 + 0.004 * min(rows, MOST_SMALL_ROWS), 3.0 + 0.029 * padded)
        drafts = max(0.9, 0.4 + 0.045 * count) if draft else 0.0
        return verified + drafts + 0.002 * rows + 0.004 * count + 2e-6 * count * context


WINDOW = 8


def worst(table: CostTable) -> float:
    """The largest error of a step, as a share of what it takes, over numbers of requests, rows and contexts."""
    lookup, device = CostLookup(table), H200()
    errors = []
    for count in (1, 2, 3, 5, 8, 11, 16, 24, 32, 45, 64, 90, 128, 200, 256):
        for rows in {count + round(count * share / 4) for share in range(4 * WINDOW - 3)}:
            for each in (1, 400):
                errors.append(
                    abs(lookup.at(count, count * each).step_ms(rows) / device.law(count, rows, True, each) - 1)
                )
        plain = lookup.at(count).plain_ms
        assert plain is not None
        errors.append(abs(plain / device.law(count, count, False) - 1))
    return max(errors)


def test_steps_of_every_number_of_requests_are_foretold_by_a_table_of_many() -> None:
    device = H200()
    table = captured_costs(device, WINDOW - 1, [1, 2, 4, 8, 16, 32, 64, 128, 256])  # type: ignore[arg-type]
    # Between tiles that were timed, one edge of a tile is not seen.
    assert worst(table) < 0.08
    lookup = CostLookup(table)
    for count in (1, 8, 16, 32, 64, 128, 256):
        for each in (1, 2, 4, 6, 8):
            assert lookup.at(count, count).step_ms(each * count) == pytest.approx(device.law(count, each * count), 0.01)
    # Graphs: numbers of requests share them by rows.
    assert len({rows for _, is_drafting, rows in device.timed if is_drafting}) <= 40
    assert len(device.timed) <= 90


def test_a_line_from_one_to_256_foretells_far_too_much() -> None:
    """How tables were made before: every row count of 1 and of 256 requests, and lines between."""
    device = H200()
    batches = tuple(
        BatchCosts(n, tiers, tuple(device.law(n, rows) for rows in tiers), device.law(n, n, False))
        for n, tiers in ((n, tiers_of(WINDOW - 1, n)) for n in (1, 256))
    )
    lookup = CostLookup(CostTable(batches[0].rows, batches[0].step_ms, "measured", batches[0].plain_ms, batches))
    errors = {n: lookup.at(n).step_ms(5 * n) / device.law(n, 5 * n) - 1 for n in (8, 16, 32)}
    assert all(0.08 < error < 0.30 for error in errors.values()), errors


def test_which_rows_are_timed() -> None:
    assert timed_rows(tiers_of(7, 1), 1, 4) == tuple(range(1, 9))
    assert timed_rows(tiers_of(7, 4), 4, 2) == (4, 6, 8, 12, 16, 24, 32)
    assert timed_rows(tiers_of(7, 16), 16, 2) == (16, 24, 32, 48, 64, 80, 96, 128)
    assert timed_rows(tiers_of(7, 256), 256, 4) == (
        *range(256, 512, 64),
        *range(512, 1024, 128),
        *range(1024, 2049, 256),
    )
    assert timed_rows(tiers_of(7, 100), 100, 2) == (100, 160, 224, 320, 448, 640, 800)
    assert timed_rows(tiers_of(0, 5), 5, 4) == (5,)


def test_what_is_not_timed_lies_on_the_line() -> None:
    assert filled({2: 1.0, 4: 3.0}, (2, 3, 4)) == (1.0, 2.0, 3.0)
    assert filled({7: 5.0}, (7,)) == (5.0,)
