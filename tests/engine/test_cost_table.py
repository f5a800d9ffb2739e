"""Cost lookup, and its cache file when it is good, absent, damaged or not writable."""

from __future__ import annotations

import json
import os
import random
import stat
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from sparkchat.engine.cache_file import measurement_key, read_json, write_json
from sparkchat.engine.cost_table import SCHEMA, CostLookup
from sparkchat.errors import SparkchatError
from sparkchat.params import BatchCosts, ContextCosts, CostTable

TABLE = CostTable((1, 2, 4, 8), (10.0, 12.0, 13.0, 21.0), "measured", 9.5)


def test_rows_between_entries_round_up():
    cost = CostLookup(TABLE)
    assert [cost.step_ms(n) for n in range(1, 9)] == [10.0, 12.0, 13.0, 13.0, 21.0, 21.0, 21.0, 21.0]


def test_the_last_slope_goes_on():
    cost = CostLookup(TABLE)
    assert [cost.step_ms(n) for n in (9, 10, 108)] == [23.0, 25.0, 221.0]
    assert CostLookup(CostTable((4,), (7.0,))).step_ms(400) == 7.0


def test_rows_below_the_first_entry_cost_the_first_entry():
    assert CostLookup(CostTable((4, 8), (7.0, 9.0))).step_ms(1) == 7.0


def test_noise_never_makes_more_rows_cheaper():
    cost = CostLookup(CostTable((1, 2, 3, 4), (10.0, 9.0, 12.0, 11.0)))
    times = [cost.step_ms(n) for n in range(1, 10)]
    assert times == sorted(times)
    assert times[:4] == [10.0, 10.0, 12.0, 12.0]
    assert times[-1] == 12.0  # the cleaned slope is zero, not negative


def test_a_step_has_a_row():
    with pytest.raises(ValueError, match="row"):
        CostLookup(TABLE).step_ms(0)


def test_a_saved_table_comes_back(tmp_path):
    key = measurement_key(model="m", drafter="d", device="cpu", versions={"torch": "2"})
    path = CostLookup(TABLE).save(tmp_path / "new" / "folder", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded, notice = CostLookup.load(tmp_path / "new" / "folder", key)
    assert notice is None
    assert loaded is not None
    assert (loaded.table.rows, loaded.table.step_ms, loaded.plain_ms) == (TABLE.rows, TABLE.step_ms, 9.5)
    assert loaded.table.source == "cached"
    assert loaded.id == CostLookup(TABLE).id
    CostLookup(CostTable((1,), (5.0,))).save(tmp_path / "new" / "folder", key)
    assert CostLookup.load(tmp_path / "new" / "folder", key)[0].step_ms(1) == 5.0
    assert os.listdir(tmp_path / "new" / "folder") == [path.name]


def test_every_part_of_the_key_matters():
    def key(model="m", drafter: str | None = "d", device="cpu", torch="2"):
        return measurement_key(model=model, drafter=drafter, device=device, versions={"torch": torch})

    keys = [key(), key(model="n"), key(drafter=None), key(drafter="None"), key(device="cuda"), key(torch="3")]
    assert len(set(keys)) == len(keys)
    assert key() == key()
    assert key(model="../../etc/passwd").isalnum()


def test_no_file_is_no_table_and_no_notice(tmp_path):
    assert CostLookup.load(tmp_path / "nowhere", "k") == (None, None)


TABLES = CostTable(
    (1, 2, 3),
    (10.0, 11.0, 13.0),
    "measured",
    9.0,
    (BatchCosts(1, (1, 2, 3), (10.0, 11.0, 13.0), 9.0), BatchCosts(4, (4, 8, 12), (16.0, 20.0, 28.0), 14.0)),
    False,
    ContextCosts(100, 0.01, 0.002),
)


def test_costs_by_requests():
    cost = CostLookup(TABLES)
    assert [cost.at(1).step_ms(n) for n in (1, 2, 3)] == [10.0, 11.0, 13.0]
    assert [cost.at(4).step_ms(n) for n in (4, 6, 8, 10, 12, 14)] == [16.0, 18.0, 20.0, 24.0, 28.0, 32.0]
    # The same four rows cost more as four requests, each of which drafts.
    assert cost.at(4).step_ms(4) > cost.at(1).step_ms(4)
    assert (cost.at(1).plain_ms, cost.at(4).plain_ms, cost.plain_ms, cost.most_requests) == (9.0, 14.0, 9.0, 4)


def test_numbers_of_requests_between_and_beyond_are_on_the_line():
    cost = CostLookup(TABLES)
    assert [cost.at(2).step_ms(n) for n in (2, 4, 6)] == pytest.approx([12.0, 14.0, 18.0])
    assert cost.at(2).plain_ms == pytest.approx(9.0 + 5.0 / 3)
    assert [cost.at(8).step_ms(n) for n in (8, 16)] == pytest.approx([24.0, 32.0])
    for requests in range(1, 12):
        times = [cost.at(requests).step_ms(n) for n in range(requests, 4 * requests)]
        assert times == sorted(times)
        if requests > 1:
            fewer = [cost.at(requests - 1).step_ms((requests - 1) * k) for k in (1, 2, 3)]
            more = [cost.at(requests).step_ms(requests * k) for k in (1, 2, 3)]
            assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_between_numbers_that_share_row_counts_costs_are_those_of_the_same_rows():
    """Flat to 4 rows, then steep: by the same rows per request, 3 rows of three would cost as much as 4 of four."""
    batches = (
        BatchCosts(2, (2, 3, 4, 6, 8), (10.0, 10.0, 10.0, 20.0, 30.0), 9.0),
        BatchCosts(4, (4, 6, 8, 12, 16), (11.0, 21.0, 31.0, 51.0, 71.0), 9.0),
    )
    cost = CostLookup(CostTable((1,), (10.0,), batches=batches, pads_up=False))
    assert [cost.at(3).step_ms(n) for n in (3, 4, 5, 8, 10, 12)] == pytest.approx([10.5, 10.5, 15.5, 30.5, 40.5, 50.5])
    assert cost.at(2).step_ms(8) == 30.0
    assert cost.at(4).step_ms(16) == 71.0
    # Beyond the last, each request more adds what it did between.
    assert cost.at(6).step_ms(12) == pytest.approx(52.0)
    padded = CostLookup(CostTable((1,), (10.0,), batches=batches))
    assert padded.at(3).step_ms(5) == pytest.approx(20.5)


def test_more_requests_never_cost_less_whatever_the_noise():
    noisy = CostLookup(
        CostTable(
            (1, 2),
            (10.0, 12.0),
            batches=(BatchCosts(1, (1, 2), (10.0, 12.0), 9.0), BatchCosts(2, (2, 4), (9.0, 11.0), 8.0)),
        )
    )
    # Two rows of one request cost 12.
    assert [noisy.at(2).step_ms(n) for n in (2, 4)] == [12.0, 12.0]
    assert noisy.at(2).plain_ms == 9.0
    assert noisy.at(3).step_ms(3) >= 10.0


def test_cached_tokens_add_to_every_step_and_more_to_one_of_many_rows():
    cost = CostLookup(TABLES)
    assert cost.at(1, 100).step_ms(1) == cost.at(1, 0).step_ms(1) == 10.0  # measured with that many
    assert cost.at(1, 600).step_ms(3) == pytest.approx(13.0 + 500 * (0.01 + 3 * 0.002))
    assert cost.at(4, 600).step_ms(12) == pytest.approx(28.0 + 500 * (0.01 + 3 * 0.002))
    assert cost.at(4, 600).plain_ms == pytest.approx(14.0 + 500 * (0.01 + 0.002))


def test_requests_that_pause_drafting_save_their_drafts():
    cost = CostLookup(TABLES)
    # Drafts take 1 ms of one request, 2 ms of four; of two, as the line between says, 4/3.
    assert [cost.at(4, 0, n).step_ms(8) for n in (4, 2, 1, 0)] == pytest.approx([20.0, 20.0 - 2 / 3, 19.0, 18.0])
    assert cost.at(4, 0, 0).step_ms(4) == cost.at(4).plain_ms
    assert cost.at(4, 1100, 1).step_ms(8) == pytest.approx(cost.at(4, 1100).step_ms(8) - 1.0)
    times = cost.at(4, 1100, 2)
    assert times.times(4, 9) == pytest.approx([times.step_ms(n) for n in range(4, 13)])
    assert times.planned_ms(6) == pytest.approx(cost.at(4, 1100).planned_ms(6) - 2 / 3)
    # A profile's table tells no drafts from the rest.
    assert CostLookup(CostTable((1, 2), (5.0, 6.0))).at(4, 0, 1).step_ms(2) == 6.0


def test_filters_cost_where_drafts_are_drawn():
    batches = tuple(replace(batch, filtered_ms=ms) for batch, ms in zip(TABLES.batches, (0.3, 0.9), strict=True))
    cost = CostLookup(replace(TABLES, batches=batches))
    for requests, more in ((1, 0.3), (2, 0.5), (4, 0.9)):
        plain, filtered = (cost.at(requests, 1100, is_filtered=cut) for cut in (False, True))
        assert filtered.step_ms(2 * requests) == pytest.approx(plain.step_ms(2 * requests) + more)
        assert filtered.plain_ms == plain.plain_ms
    assert cost.at(4, 0, 0, is_filtered=True).step_ms(4) == cost.at(4, 0, 0).step_ms(4)
    assert cost.at(1, is_filtered=True).planned_ms(2) == pytest.approx(11.3)
    assert CostLookup(TABLES).at(4, is_filtered=True) == CostLookup(TABLES).at(4)


def test_a_profiles_table_counts_for_any_number_of_requests():
    cost = CostLookup(TABLE)
    assert cost.most_requests is None
    assert [cost.at(n, 10_000).step_ms(8) for n in (1, 3, 8)] == [21.0] * 3


def test_a_table_by_requests_comes_back_and_has_its_own_id(tmp_path):
    CostLookup(TABLES).save(tmp_path, "k")
    loaded, notice = CostLookup.load(tmp_path, "k")
    assert notice is None
    assert loaded.table == replace(TABLES, source="cached")
    assert loaded.id == CostLookup(TABLES).id != CostLookup(replace(TABLES, context=None)).id
    assert CostTable.from_json(json.loads(json.dumps(asdict(TABLES)))) == TABLES


STAIRS = (BatchCosts(1, (1, 2, 3, 4, 5, 6), (10.0, 14.0, 14.0, 14.0, 15.0, 21.0), 9.0),)


def test_measured_stairs_are_planned_by_their_lower_hull():
    cost = CostLookup(CostTable(STAIRS[0].rows, STAIRS[0].step_ms, batches=STAIRS)).at(1)
    assert [cost.planned_ms(n) for n in range(1, 7)] == pytest.approx([10.0, 11.25, 12.5, 13.75, 15.0, 21.0])
    assert cost.step_ms(2) == 14.0
    assert cost.planned_ms(9) == cost.step_ms(9)
    more = CostLookup(CostTable(STAIRS[0].rows, STAIRS[0].step_ms, batches=STAIRS, context=ContextCosts(0, 0.1, 0.01)))
    assert more.at(1, 10).planned_ms(3) == pytest.approx(12.5 + 1.0 + 0.3)


def test_the_hull_is_below_the_costs_and_never_turns_down():
    rng = random.Random(4)
    for _ in range(200):
        rows = tuple(sorted(rng.sample(range(2, 40), rng.randint(1, 9))))
        times = tuple(rng.uniform(5.0, 30.0) for _ in rows)
        cost = CostLookup(CostTable(rows, times, batches=(BatchCosts(2, rows, times),), pads_up=rng.random() < 0.5)).at(
            2
        )
        planned = [cost.planned_ms(n) for n in range(2, rows[-1] + 1)]
        assert all(p <= cost.step_ms(n) + 1e-9 for n, p in enumerate(planned, 2))
        slopes = [b - a for a, b in pairwise(planned)]
        assert all(b >= a - 1e-9 for a, b in pairwise(slopes))


def test_a_profiles_table_is_planned_by_as_it_is():
    cost = CostLookup(TABLE).at(3)
    assert [cost.planned_ms(n) for n in range(1, 12)] == [cost.step_ms(n) for n in range(1, 12)]


@pytest.mark.parametrize("table", [TABLE, TABLES, CostTable((4,), (7.0,))])
def test_times_are_the_costs_of_many_rows_at_once(table):
    for requests in (1, 2, 4, 9):
        cost = CostLookup(table).at(requests, 700)
        wanted = [cost.step_ms(n) for n in range(requests, requests + 40)]
        assert cost.times(requests, 40).tolist() == pytest.approx(wanted, rel=1e-12)


GOOD = {"rows": [1, 2], "step_ms": [1.0, 2.0], "plain_ms": None}


def stored(**changes):
    return json.dumps({"schema": SCHEMA, "table": {**GOOD, **changes}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 64,
        b"\xff\xfe",
        b"[" * 100000,
        b"null",
        b"[1, 2]",
        b'{"schema": "sparkchat.cost_table/1"',
        json.dumps({"schema": "sparkchat.cost_table/1", **GOOD}).encode(),
        stored(rows=[2, 1]),
        stored(rows=[1]),
        stored(rows=[]),
        stored(rows=3),
        stored(rows=["1", "2"]),
        stored(rows=[True, 2]),
        stored(step_ms=[1.0, -2.0]),
        stored(step_ms=[1.0, "x"]),
        stored(step_ms=[1.0, float("nan")]),
        stored(step_ms={"1": 2.0, "2": 3.0}),
        stored(plain_ms="soon"),
        stored(plain_ms=float("inf")),
        stored(plain_ms=[1]),
        json.dumps({"schema": SCHEMA}).encode(),
        stored(batches=[{"requests": 0, "rows": [1], "step_ms": [1.0]}]),
        stored(
            batches=[{"requests": 2, "rows": [1], "step_ms": [1.0]}, {"requests": 1, "rows": [1], "step_ms": [1.0]}]
        ),
        stored(batches=[{"requests": 1, "rows": [1.5], "step_ms": [1.0]}]),
        stored(batches=3),
        stored(context={"tokens": 1}),
        stored(context={"tokens": 1, "ms_per_token": -1.0}),
        stored(pads_up="yes"),
        stored(speed=3),
    ],
)
def test_a_damaged_file_is_reported_and_ignored(tmp_path, content):
    (tmp_path / "cost-k.json").write_bytes(content)
    table, notice = CostLookup.load(tmp_path, "k")
    assert table is None
    assert notice is not None
    assert "cost-k.json" in notice
    assert "\n" not in notice


def test_a_folder_in_the_way_is_reported(tmp_path):
    (tmp_path / "cost-k.json").mkdir()
    table, notice = CostLookup.load(tmp_path, "k")
    assert table is None
    assert "cannot be read" in notice
    with pytest.raises(SparkchatError, match="cannot be written"):
        CostLookup(TABLE).save(tmp_path, "k")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("x")
    with pytest.raises(SparkchatError, match="cannot be written"):
        write_json(tmp_path / "cache" / "a.json", {})


def test_numbers_that_json_lacks_are_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"schema": "s", "x": float("nan")})
    assert read_json(tmp_path / "a.json", "s") == (None, None)
