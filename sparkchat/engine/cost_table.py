"""What a step costs by its rows, its requests and their context: lookup in a measured or a profile's table, and its
cache file.

A profile knows T(rows). A measured table knows T(rows, requests): the same rows cost more when more requests share
them, because every request drafts; what cached tokens add; and what is saved where some of them do not draft.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from sparkchat.engine.cache_file import read_json, write_json
from sparkchat.errors import UsageError
from sparkchat.params import BatchCosts, ContextCosts, CostTable

SCHEMA = "sparkchat.cost_table/2"


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step whose requests and context are known: what a plan is made by."""

    rows: tuple[int, ...]
    cleaned_ms: tuple[float, ...]
    """Non-decreasing."""
    pads_up: bool = True
    plain_ms: float | None = None
    """The same requests, no drafting; None when not measured."""
    fixed_ms: float = 0.0
    """What the context adds whatever the rows, less the drafts of requests that pause drafting."""
    row_ms: float = 0.0
    """What the context adds for each row."""
    hull: tuple[tuple[int, float], ...] = ()
    """(rows, milliseconds) of the corners of the lower convex hull, for measured tables."""
    filtered_ms: float = 0.0
    """What filters add where drafts are drawn; not in the other times."""

    def step_ms(self, rows: int) -> float:
        """Milliseconds of a whole step that verifies ``rows`` >= 1 rows in all; non-decreasing.

        Beyond the last entry the last slope goes on (flat when there is one entry only).
        """
        if rows < 1:
            raise ValueError(f"a step has at least one row, not {rows}")
        return _at(self.rows, self.cleaned_ms, rows, self.pads_up) + self.fixed_ms + self.row_ms * rows

    def planned_ms(self, rows: int) -> float:
        """What the early stop weighs the next row by: of a measured table, its lower convex hull.

        A measured step goes up in stairs, as captured steps pad up, and flattens, as experts run out. There the first
        loss is not the last word, but later words may not be listened to (planner.py). On the hull tokens per time has
        one peak, so that the first loss is the best point. What a user wrote into a profile is taken as it is.
        """
        if not self.hull:
            return self.step_ms(rows)
        place = bisect_left(self.hull, (rows, 0.0))
        if place == len(self.hull) or place == 0:
            return self.step_ms(rows)
        (low, low_ms), (high, high_ms) = self.hull[place - 1], self.hull[place]
        on_hull = low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
        return on_hull + self.fixed_ms + self.row_ms * rows

    def times(self, first: int, count: int) -> np.ndarray:
        """``step_ms`` of first .. first + count - 1 rows."""
        wanted = np.arange(first, first + count)
        rows, cleaned = np.asarray(self.rows), np.asarray(self.cleaned_ms)
        if self.pads_up:
            found = cleaned[np.searchsorted(rows, wanted).clip(max=len(rows) - 1)]
        else:
            found = np.interp(wanted, rows, cleaned)
        if len(rows) > 1:
            slope = (cleaned[-1] - cleaned[-2]) / (rows[-1] - rows[-2])
            found = found + slope * (wanted - rows[-1]).clip(min=0)
        return found + self.fixed_ms + self.row_ms * wanted


class CostLookup:
    """A cost table made monotone: more rows, or more requests, never cost less, whatever noise the measurement had."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        """As given."""
        self._batches = _cleaned(table)
        self._by_requests: dict[int, StepCosts] = {}
        self._contexts: dict[int, ContextCosts | None] = {}

    @property
    def id(self) -> str:
        """Short hash of the numbers, the same wherever the table comes from."""
        t = self.table
        content: list[Any] = [t.rows, [float(ms) for ms in t.step_ms], t.plain_ms]
        if t.batches or t.context or not t.pads_up:
            content += [[asdict(b) for b in t.batches], t.pads_up, t.context and asdict(t.context)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    @property
    def most_requests(self) -> int | None:
        """The most requests that were measured together; None where the table does not tell requests apart."""
        return self.table.batches[-1].requests if self.table.batches else None

    @property
    def plain_ms(self) -> float | None:
        """A plain step of one request without drafting; None when not measured."""
        return self.at(1).plain_ms

    def step_ms(self, rows: int) -> float:
        """Milliseconds of a whole step of one request that verifies ``rows`` >= 1 rows."""
        return self.at(1).step_ms(rows)

    def planned_ms(self, rows: int) -> float:
        return self.at(1).planned_ms(rows)

    def times(self, first: int, count: int) -> np.ndarray:
        return self.at(1).times(first, count)

    def at(
        self, requests: int, context: int = 0, drafting: int | None = None, *, is_filtered: bool = False
    ) -> StepCosts:
        """The costs of a step of ``requests`` requests with ``context`` cached tokens in all, ``drafting`` of which
        draft (None: all); ``is_filtered``: some of them by filtered laws.

        Between two measured numbers of requests, costs at the same rows lie on the line between (``_between``); beyond
        the last they go on as from the last two.
        """
        base, extra = self._known(requests), self._context(requests)
        saved = self._saved(requests, requests if drafting is None else drafting)
        if is_filtered and drafting != 0:
            saved -= base.filtered_ms
        more = 0 if extra is None else max(0, context - extra.tokens)
        if extra is None or not more:
            return replace(base, fixed_ms=-saved) if saved else base
        fixed, row = more * extra.ms_per_token, more * extra.ms_per_token_row / requests
        plain = None if base.plain_ms is None else base.plain_ms + fixed + row * requests
        return replace(base, fixed_ms=fixed - saved, row_ms=row, plain_ms=plain)

    def _known(self, requests: int) -> StepCosts:
        if requests not in self._by_requests:
            self._by_requests[requests] = self._base(requests)
        return self._by_requests[requests]

    def _context(self, requests: int) -> ContextCosts | None:
        if requests not in self._contexts:
            self._contexts[requests] = _context_between(self._batches, requests) or self.table.context
        return self._contexts[requests]

    def _saved(self, requests: int, drafting: int) -> float:
        """Milliseconds of drafts that a step of ``requests`` saves where only ``drafting`` of them draft.

        A step that verifies no draft, less a plain one, is what drafting takes. Not told where the table does not know
        requests, or plain steps.
        """
        if drafting >= requests or not self.table.batches:
            return 0.0
        of_all, of_these = (0.0 if n < 1 else self._drafts_ms(n) for n in (requests, drafting))
        return max(0.0, of_all - of_these)

    def _drafts_ms(self, requests: int) -> float:
        known = self._known(requests)
        return 0.0 if known.plain_ms is None else max(0.0, known.step_ms(requests) - known.plain_ms)

    def _base(self, requests: int) -> StepCosts:
        batches, up = self._batches, self.table.pads_up
        if not self.table.batches:
            return StepCosts(batches[0].rows, batches[0].step_ms, up, self.table.plain_ms)
        place = bisect_left([b.requests for b in batches], requests)
        if place < len(batches) and batches[place].requests == requests:
            found = batches[place]
            return replace(
                _with_hull(found.rows, found.step_ms, up, found.plain_ms, requests), filtered_ms=found.filtered_ms
            )
        if len(batches) == 1:
            low = high = batches[0]
        else:
            low, high = batches[max(0, min(place, len(batches) - 1) - 1)], batches[min(max(place, 1), len(batches) - 1)]
        return _between(low, high, requests, up)

    def save(self, folder: Path, key: str) -> Path:
        """Store the table as given under ``cache_file.measurement_key``; returns the file. Raises SparkchatError."""
        path = _path(folder, key)
        write_json(path, {"schema": SCHEMA, "table": asdict(self.table)})
        return path

    @classmethod
    def load(cls, folder: Path, key: str) -> tuple[CostLookup | None, str | None]:
        """(lookup, notice) of the stored table; (None, None) when there is none, (None, why) when it is unusable."""
        path = _path(folder, key)
        content, notice = read_json(path, SCHEMA)
        if content is None:
            return None, notice
        try:
            return cls(_table(content["table"])), None
        except (KeyError, TypeError, ValueError, UsageError):
            return None, f"{path} is damaged, so it is not used; it is replaced by the next measurement"


def table_of(batches: Sequence[BatchCosts], *, pads_up: bool, context: ContextCosts | None = None) -> CostTable:
    """A measured table of these numbers of requests, the first of them 1."""
    one = batches[0]
    return CostTable(one.rows, one.step_ms, "measured", one.plain_ms, tuple(batches), pads_up, context)


def context_costs(base: int, tokens: int, block: float, times: Sequence[tuple[float, float]]) -> ContextCosts:
    """From (milliseconds behind ``base`` cached tokens in all, behind ``tokens``) of requests that verify nothing, and
    of as many that verify ``block`` drafts each."""
    of_one, of_block = ((long - short) / (tokens - base) for short, long in times)
    by_row = max(0.0, (of_block - of_one) / block)
    return ContextCosts(base, max(0.0, of_one - by_row), by_row)


def _cleaned(table: CostTable) -> list[BatchCosts]:
    """Step times that never fall with rows, nor with requests: at the same rows in all where fewer requests can have
    so many, else at the same rows per request."""
    if not table.batches:
        return [BatchCosts(1, table.rows, tuple(accumulate(table.step_ms, max)), table.plain_ms)]
    found: list[BatchCosts] = []
    for batch in table.batches:
        times, plain = list(accumulate(batch.step_ms, max)), batch.plain_ms
        if found:
            fewer = found[-1]
            floors = [_floor(fewer, n, batch.requests, table.pads_up) for n in batch.rows]
            times = list(accumulate((max(pair) for pair in zip(times, floors, strict=True)), max))
            plain = plain if plain is None or fewer.plain_ms is None else max(plain, fewer.plain_ms)
        found.append(replace(batch, step_ms=tuple(times), plain_ms=plain))
    return found


def _floor(fewer: BatchCosts, n: int, requests: int, pads_up: bool) -> float:
    """The least that ``n`` rows of ``requests`` cost, by steps of fewer; 0 beyond what was measured of those."""
    if n > fewer.rows[-1]:
        n_each = n * fewer.requests / requests
        return _at(fewer.rows, fewer.step_ms, n_each, pads_up) if n_each <= fewer.rows[-1] else 0.0
    return _at(fewer.rows, fewer.step_ms, n, pads_up)


def _between(low: BatchCosts, high: BatchCosts, requests: int, pads_up: bool) -> StepCosts:
    """Between two measured numbers of requests: by the same rows in all where both were measured at some, else by the
    same rows per request."""
    weight = 0.0 if low is high else (requests - low.requests) / (high.requests - low.requests)

    def line(a: float, b: float) -> float:
        # A line that falls, or that fewer requests make negative, is noise.
        return max(a + weight * (b - a), min(a, b) * min(1.0, requests / low.requests))

    if low is not high and high.rows[0] <= low.rows[-1]:
        rows, times = _by_rows(low, high, weight, pads_up)
    else:
        per_request = sorted({n / batch.requests for batch in (low, high) for n in batch.rows})
        rows = tuple(sorted({max(1, round(share * requests)) for share in per_request}))
        times = tuple(
            line(*(_at(b.rows, b.step_ms, n * b.requests / requests, pads_up) for b in (low, high))) for n in rows
        )
    plain = None if low.plain_ms is None or high.plain_ms is None else line(low.plain_ms, high.plain_ms)
    found = _with_hull(rows, tuple(accumulate(times, max)), pads_up, plain, requests)
    return replace(found, filtered_ms=max(0.0, line(low.filtered_ms, high.filtered_ms)))


def _by_rows(
    low: BatchCosts, high: BatchCosts, weight: float, pads_up: bool
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Rows, and the times of a number of requests that is ``weight`` of the way from ``low`` to ``high``.

    A verification costs by its rows, whoever's they are: by weights that are read until there are so many rows that
    arithmetic takes longer, which no line over requests follows. What the requests add, their drafts above all, is the
    difference at the same rows, and does lie on a line. Where only one of both has so many rows, the difference is that
    of the nearest number of rows that both have.
    """

    def times(n: float) -> tuple[float, float]:
        return _at(low.rows, low.step_ms, n, pads_up), _at(high.rows, high.step_ms, n, pads_up)

    first, last = high.rows[0], low.rows[-1]
    least, most = times(first), times(last)
    rows = tuple(sorted({*low.rows, *high.rows}))
    found = []
    for n in rows:
        a, b = times(n)
        if n < first:
            found.append(a + weight * (least[1] - least[0]))
        elif n > last:
            found.append(b - (1.0 - weight) * (most[1] - most[0]))
        else:
            found.append(a + weight * (b - a))
    return rows, tuple(found)


def _context_between(batches: Sequence[BatchCosts], requests: int) -> ContextCosts | None:
    """Of the two measured numbers of requests around this one; None where no number has costs of its own.

    What one more token of *every* request adds lies on the line between: few requests attend side by side, so that it
    hardly rises with their number until the reading of all their tokens takes longest. Beyond the last number a token
    costs what it does there.
    """
    known = [(batch.requests, batch.context) for batch in batches if batch.context is not None]
    if not known:
        return None
    high = next((found for found in known if found[0] >= requests), known[-1])
    low = next((found for found in reversed(known) if found[0] <= requests), known[0])
    span = high[0] - low[0]
    weight = (requests - low[0]) / span if span else 0.0

    def line(name: str) -> float:
        if not span:
            return getattr(high[1], name)
        each_low, each_high = (getattr(costs, name) * count for count, costs in (low, high))
        return (each_low + weight * (each_high - each_low)) / requests

    base = low[1].tokens + weight * (high[1].tokens - low[1].tokens) if span else high[1].tokens * requests / high[0]
    return ContextCosts(round(base), line("ms_per_token"), line("ms_per_token_row"))


def _with_hull(
    rows: tuple[int, ...], times: tuple[float, ...], pads_up: bool, plain_ms: float | None, requests: int
) -> StepCosts:
    """Corners of the lower convex hull from the anchors of all requests on."""
    corners: list[tuple[int, float]] = []
    for point in [(requests, _at(rows, times, requests, pads_up))] + [
        (n, ms) for n, ms in zip(rows, times, strict=True) if n > requests
    ]:
        while len(corners) > 1 and _turns_down(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return StepCosts(rows, times, pads_up, plain_ms, hull=tuple(corners))


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _at(rows: Sequence[int], times: Sequence[float], n: float, pads_up: bool) -> float:
    """The time of ``n`` rows, of non-decreasing ``times``."""
    place = bisect_left(rows, n)
    if place == len(rows):
        slope = 0.0 if place == 1 else (times[-1] - times[-2]) / (rows[-1] - rows[-2])
        return times[-1] + slope * (n - rows[-1])
    if pads_up or place == 0 or rows[place] == n:
        return times[place]
    share = (n - rows[place - 1]) / (rows[place] - rows[place - 1])
    return times[place - 1] + share * (times[place] - times[place - 1])


def _path(folder: Path, key: str) -> Path:
    return folder / f"cost-{key}.json"


def _table(content: dict) -> CostTable:
    table = CostTable.from_json(content)
    for part in (table, *table.batches):
        if any(type(n) is not int for n in part.rows) or any(isinstance(t, bool) for t in part.step_ms):
            raise ValueError("rows are whole numbers, step_ms are numbers")
        if part.plain_ms is not None and not 0.0 < float(part.plain_ms) < float("inf"):
            raise ValueError("plain_ms is a positive number")
    if type(table.pads_up) is not bool:
        raise ValueError("pads_up is true or false")
    return replace(table, source="cached")
