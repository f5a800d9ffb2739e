"""Cost lookup, and its cache file when it is good, absent, damaged or not writable."""

from __future__ import annotations

import json
import os
import stat

import pytest

from sparkchat.engine.cache_file import measurement_key, read_json, write_json
from sparkchat.engine.cost_table import SCHEMA, CostLookup
from sparkchat.errors import SparkchatError
from sparkchat.params import CostTable

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


GOOD = {"schema": SCHEMA, "rows": [1, 2], "step_ms": [1.0, 2.0], "plain_ms": None}


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
        json.dumps({**GOOD, "schema": "other/1"}).encode(),
        json.dumps({**GOOD, "rows": [2, 1]}).encode(),
        json.dumps({**GOOD, "rows": [1]}).encode(),
        json.dumps({**GOOD, "rows": []}).encode(),
        json.dumps({**GOOD, "rows": 3}).encode(),
        json.dumps({**GOOD, "rows": ["1", "2"]}).encode(),
        json.dumps({**GOOD, "rows": [True, 2]}).encode(),
        json.dumps({**GOOD, "step_ms": [1.0, -2.0]}).encode(),
        json.dumps({**GOOD, "step_ms": [1.0, "x"]}).encode(),
        json.dumps({**GOOD, "step_ms": [1.0, float("nan")]}).encode(),
        json.dumps({**GOOD, "step_ms": {"1": 2.0, "2": 3.0}}).encode(),
        json.dumps({**GOOD, "plain_ms": "soon"}).encode(),
        json.dumps({**GOOD, "plain_ms": float("inf")}).encode(),
        json.dumps({**GOOD, "plain_ms": [1]}).encode(),
        json.dumps({"schema": SCHEMA}).encode(),
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
