"""What captured steps cost, from requests that nobody made: by rows, requests and what each has cached."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from engine.test_captured import open_one
from sparkchat.engine.captured import costs
from sparkchat.engine.captured.costs import captured_costs
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.cost_table import CostLookup
from sparkchat.models.page_table import PAGE_SIZE
from sparkchat.models.paged_cache import PagedCache
from sparkchat.params import ContextCosts, CostTable

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
    table = captured_costs(device, BLOCK, [1, 4, 32])  # type: ignore[arg-type]
    assert device.longest == {1: 1 + 5888, 4: 1 + 1408, 32: 1 + 128}
    assert [batch.context and batch.context.tokens for batch in table.batches] == [1, 4, 32]
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
