"""What finished steps show of step costs and confidences, as small corrections of both while the engine runs.

Off unless asked for. The output law stays the target's, because a plan looks only at steps that are over: nothing here
is told of a draft before it was judged (docs/decisions/0008-refinement-looks-back.md). A request whose seed the user
chose is planned without it, so that its tokens depend on nothing but itself. Both corrections are bounded: a cost
within half and twice what the table says, a confidence within one unit of logit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sparkchat.engine.cost_table import CostLookup, table_of
from sparkchat.params import BatchCosts, Correction

MOST_SHIFT = 1.0
"""Logits by which a confidence may be shifted."""
MOST_FACTOR = 2.0
"""By how much a cost may be raised, or lowered."""
_BLOCKS, _STEPS = 512, 256
"""Blocks and steps after which an observation counts for a third."""
_DOUBT = 16.0
"""Blocks, in units of p (1 - p), that speak for no shift."""
_COST_DOUBT = 8.0
"""Steps that speak for what the neighbours show, and those for the table."""
_SPREAD = 16.0
"""Square of the drafts over which a slope is believed as readily as a level."""
_REBUILD = 32
"""Steps between two refined tables: making one takes longer than planning a step."""


@dataclass(frozen=True)
class JudgedBlock:
    """The part of a finished block that the target judged."""

    kind: str
    """Of sampling."""
    correction: Correction
    """Of these confidences, as it was before any refinement."""
    logits: Sequence[float]
    judged: int
    accepted: int


@dataclass
class _Place:
    """Sums of one draft position, fading."""

    surprise: float = 0.0
    """Accepted less expected."""
    information: float = 0.0


class RefinedConfidences:
    """A shift for each kind of sampling and draft position: one Newton step from the sums of what was seen.

    A draft counts where all before it were accepted, since its confidence is given those.
    """

    def __init__(self) -> None:
        self._places: dict[str, list[_Place]] = {}

    def observe(self, block: JudgedBlock) -> None:
        places = self._places.setdefault(block.kind, [])
        for k in range(min(block.judged, block.accepted + 1)):
            logit = block.logits[k] / block.correction.temperatures[k] + block.correction.shifts[k]
            if not math.isfinite(logit):
                return
            while len(places) <= k:
                places.append(_Place())
            chance, kept = _sigmoid(logit), 1.0 - 1.0 / _BLOCKS
            place = places[k]
            place.surprise = kept * place.surprise + (block.accepted > k) - chance
            place.information = kept * place.information + chance * (1.0 - chance)

    def shifts(self, kind: str, block: int) -> tuple[float, ...]:
        """Within ``MOST_SHIFT`` of 0; 0 where nothing was seen."""
        places = self._places.get(kind, [])
        found = [_clamped(p.surprise / (p.information + _DOUBT), MOST_SHIFT) for p in places[:block]]
        return tuple(found) + (0.0,) * (block - len(found))

    def corrected(self, kind: str, before: Correction) -> Correction:
        more = self.shifts(kind, len(before.shifts))
        return Correction(before.temperatures, tuple(a + b for a, b in zip(before.shifts, more, strict=True)))


@dataclass
class _Ratio:
    """Mean logarithm of measured over predicted times, fading."""

    weight: float = 0.0
    total: float = 0.0
    seen_at: int = 0

    def fade(self, now: int) -> None:
        kept = (1.0 - 1.0 / _STEPS) ** (now - self.seen_at)
        self.weight, self.total, self.seen_at = kept * self.weight, kept * self.total, now


@dataclass
class RefinedCosts:
    """The measured table, each entry times what steps of so many rows took against it.

    An entry that no step has met lies on a line through those of as many requests that were. A table of the profile's
    stays as the user wrote it.
    """

    table: CostLookup
    """As measured."""
    now: CostLookup = field(init=False)
    """As refined; another object after every ``_REBUILD`` steps."""
    _ratios: dict[tuple[int, int | None], _Ratio] = field(default_factory=dict)
    """By place in ``_batches`` and of the entry in its rows; None for a step without drafting."""
    _clock: list[int] = field(init=False)
    """Steps seen of each batch size."""
    _unused: int = 0

    def __post_init__(self) -> None:
        table = self.table.table
        self.now = self.table
        self._batches = table.batches or (BatchCosts(1, table.rows, table.step_ms, table.plain_ms),)
        self._clock = [0] * len(self._batches)

    def observe(
        self, requests: int, rows: int | None, context: int, measured_ms: float, *, is_filtered: bool = False
    ) -> None:
        """A step of ``requests`` that verified ``rows`` in all; None: that drafted nothing. ``is_filtered``: as of
        ``CostLookup.at``; what filters take is no part of the times that are refined."""
        costs = self.table.at(requests, context, is_filtered=is_filtered)
        predicted = costs.plain_ms if rows is None else costs.step_ms(rows)
        if self.table.table.source == "profile" or predicted is None or not measured_ms > 0.0:
            return
        place = self._place(requests)
        entry = None if rows is None else self._entry(place, rows * self._batches[place].requests / requests)
        self._clock[place] += 1
        ratio = self._ratios.setdefault((place, entry), _Ratio())
        ratio.fade(self._clock[place])
        # One step that waited for something else says little: it counts as twice as long at most.
        ratio.total += _clamped(math.log(measured_ms / predicted), math.log(MOST_FACTOR))
        ratio.weight += 1.0
        self._unused += 1
        if self._unused >= _REBUILD:
            self._unused = 0
            self.now = self._rebuilt()

    def factor(self, requests: int) -> float:
        """By how much steps of so many requests that verify nothing are slower than the table says."""
        return math.exp(_clamped(self._line(self._place(requests))[0], math.log(MOST_FACTOR)))

    def _rebuilt(self) -> CostLookup:
        batches = [self._refined(place, batch) for place, batch in enumerate(self._batches)]
        before = self.table.table
        if before.batches:
            found = table_of(batches, pads_up=before.pads_up, context=before.context)
            return CostLookup(replace(found, source="refined"))
        one = batches[0]
        return CostLookup(replace(before, step_ms=one.step_ms, plain_ms=one.plain_ms, source="refined"))

    def _refined(self, place: int, batch: BatchCosts) -> BatchCosts:
        level, slope = self._line(place)

        def factor(entry: int | None) -> float:
            ratio = self._ratios.get((place, entry), _Ratio())
            ratio.fade(self._clock[place])
            on_line = level + slope * self._drafts(place, entry)
            mean = (ratio.total + _COST_DOUBT * on_line) / (ratio.weight + _COST_DOUBT)
            return math.exp(_clamped(mean, math.log(MOST_FACTOR)))

        step_ms = tuple(ms * factor(entry) for entry, ms in enumerate(batch.step_ms))
        return replace(
            batch, step_ms=step_ms, plain_ms=None if batch.plain_ms is None else batch.plain_ms * factor(None)
        )

    def _line(self, place: int) -> tuple[float, float]:
        """(level, slope) of the logarithms over verified drafts of a request, pulled towards none.

        Of a number of requests that was never seen: of all that were.
        """
        seen = [(key, r) for key, r in self._ratios.items() if key[0] == place] or list(self._ratios.items())
        weight = drafts = squares = total = products = 0.0
        for key, ratio in seen:
            x = self._drafts(*key)
            weight, drafts, squares = weight + ratio.weight, drafts + ratio.weight * x, squares + ratio.weight * x * x
            total, products = total + ratio.total, products + ratio.total * x
        weight, squares = weight + _COST_DOUBT, squares + _COST_DOUBT * _SPREAD
        whole = weight * squares - drafts * drafts
        return (total * squares - products * drafts) / whole, (weight * products - drafts * total) / whole

    def _drafts(self, place: int, entry: int | None) -> float:
        batch = self._batches[place]
        return 0.0 if entry is None else max(0.0, batch.rows[entry] / batch.requests - 1.0)

    def _place(self, requests: int) -> int:
        counts = [batch.requests for batch in self._batches]
        return min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / requests)))

    def _entry(self, place: int, rows: float) -> int:
        """The entry that steps of so many rows are looked up at, or the nearest one."""
        known = self._batches[place].rows
        if self.table.table.pads_up:
            return min(bisect_left(known, rows), len(known) - 1)
        return min(range(len(known)), key=lambda i: abs(known[i] - rows))


@dataclass
class Refinement:
    """Both corrections of one engine."""

    confidences: RefinedConfidences = field(default_factory=RefinedConfidences)
    costs: RefinedCosts | None = None

    def costs_for(self, table: CostLookup) -> RefinedCosts:
        """Those that refine this table; begun anew when it was measured again."""
        if self.costs is None or self.costs.table is not table:
            self.costs = RefinedCosts(table)
        return self.costs

    def observe(
        self,
        blocks: Sequence[JudgedBlock],
        table: CostLookup | None,
        requests: int,
        rows: int | None,
        context: int,
        measured_ms: float | None,
        *,
        is_filtered: bool = False,
    ) -> None:
        """One finished step. ``rows``, ``measured_ms``, ``is_filtered``: as for ``RefinedCosts.observe``; no time,
        nothing of costs."""
        for block in blocks:
            self.confidences.observe(block)
        if table is not None and measured_ms is not None:
            self.costs_for(table).observe(requests, rows, context, measured_ms, is_filtered=is_filtered)


def _clamped(value: float, most: float) -> float:
    return max(-most, min(most, value))


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value > -700.0 else 0.0
