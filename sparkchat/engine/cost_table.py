"""What a step costs by the number of verified rows: lookup in a measured or a profile's table, and its cache file."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path

from sparkchat.engine.cache_file import read_json, write_json
from sparkchat.errors import UsageError
from sparkchat.params import CostTable

SCHEMA = "sparkchat.cost_table/1"


class CostLookup:
    """A cost table made monotone: more rows never cost less, whatever noise the measurement had."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        """As given."""
        self._rows = table.rows
        self._step_ms = tuple(accumulate(table.step_ms, max))

    @property
    def id(self) -> str:
        """Short hash of the numbers, the same wherever the table comes from."""
        content = json.dumps([self.table.rows, [float(t) for t in self.table.step_ms], self.table.plain_ms])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def plain_ms(self) -> float | None:
        """A plain step of one request without drafting; None when not measured."""
        return self.table.plain_ms

    def step_ms(self, rows: int) -> float:
        """Milliseconds of a whole step that verifies ``rows`` >= 1 rows.

        Between entries the next larger one counts, as a captured graph pads up to it; beyond the last the last slope
        goes on (flat when there is one entry only).
        """
        if rows < 1:
            raise ValueError(f"a step has at least one row, not {rows}")
        if rows <= self._rows[-1]:
            return self._step_ms[bisect_left(self._rows, rows)]
        return self._step_ms[-1] + self._last_slope * (rows - self._rows[-1])

    @property
    def _last_slope(self) -> float:
        if len(self._rows) == 1:
            return 0.0
        return (self._step_ms[-1] - self._step_ms[-2]) / (self._rows[-1] - self._rows[-2])

    def save(self, folder: Path, key: str) -> Path:
        """Store the table as given under ``cache_file.measurement_key``; returns the file. Raises SparkchatError."""
        path = _path(folder, key)
        write_json(
            path,
            {
                "schema": SCHEMA,
                "rows": list(self.table.rows),
                "step_ms": list(self.table.step_ms),
                "plain_ms": self.table.plain_ms,
            },
        )
        return path

    @classmethod
    def load(cls, folder: Path, key: str) -> tuple[CostLookup | None, str | None]:
        """(lookup, notice) of the stored table; (None, None) when there is none, (None, why) when it is unusable."""
        path = _path(folder, key)
        content, notice = read_json(path, SCHEMA)
        if content is None:
            return None, notice
        try:
            return cls(_table(content)), None
        except (KeyError, TypeError, ValueError, UsageError):
            return None, f"{path} is damaged, so it is not used; it is replaced by the next measurement"


def _path(folder: Path, key: str) -> Path:
    return folder / f"cost-{key}.json"


def _table(content: dict) -> CostTable:
    rows, step_ms, plain_ms = content["rows"], content["step_ms"], content["plain_ms"]
    if any(type(n) is not int for n in rows) or any(isinstance(t, bool) for t in step_ms):
        raise ValueError("rows are whole numbers, step_ms are numbers")
    if plain_ms is not None and not 0.0 < float(plain_ms) < float("inf"):
        raise ValueError("plain_ms is a positive number")
    return CostTable(tuple(rows), tuple(step_ms), "cached", plain_ms)
