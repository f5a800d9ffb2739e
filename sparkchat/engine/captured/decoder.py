"""Feeds captured steps and turns what they did into events, one step late.

``step`` launches step t, then reads step t-1, whose copy has arrived while the device went on: the device never waits
for the host. What the host knows when it launches is therefore two steps old, which is the age that lagged budgets are
chosen by; everything that must be of this step (lengths, limits, the anchor) lies on the device.

A request that ended in step t-1 has taken part in step t as well. That step wrote behind the end only, its outcome is
dropped, and its seat goes to another in the order of the stream.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sparkchat.engine import rng
from sparkchat.engine.captured.caps import caps_of
from sparkchat.engine.captured.graphs import Stages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.outcome import outcomes_of
from sparkchat.engine.captured.ring import PinnedRing, RingSlot, new_event
from sparkchat.engine.captured.seating import Seat, Seating
from sparkchat.engine.captured.state import CAP, COMPACT, SHARED, STATIC
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.captured.strangers import room_each, strangers
from sparkchat.engine.captured.tiers import EXACT_WINDOWS, request_tiers, round_up, row_tiers
from sparkchat.engine.correction import correction_of, learn, refined_record
from sparkchat.engine.drafters import intend_all, learn_blocks
from sparkchat.engine.lagged_lengths import BatchBudgets, choose_budgets, lengths_of
from sparkchat.engine.lagged_plan import Budget
from sparkchat.engine.laws import DAMAGED_DRAFTER, DAMAGED_MODEL
from sparkchat.engine.loop import observe
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.records import StepTimes, step_event
from sparkchat.engine.request import RequestState
from sparkchat.engine.step_plan import StepIntent, StepLengths, intend
from sparkchat.models.fused import MOST_SMALL_ROWS
from sparkchat.params import Mode, SamplingParams
from sparkchat.simulation import SimulatedAcceptance

Event = dict[str, Any]
SETTLING_MS = 200.0
"""For which steps of many rows run before they are timed; chosen, not tuned. They are bound by arithmetic, which takes
an H200 to its limit of power: 32 requests of 8 rows run at 1.45 to 1.65 GHz, not at the 1.98 of the first replays, a
quarter slower (benchmarks/results/2026-11-30-gpu-decode.md)."""
_KINDS = {"off": STATIC, "static": STATIC, "compact": COMPACT, "cap-accept": CAP}


@dataclass
class InFlight:
    """A step that was launched and not yet read."""

    seats: list[Seat]
    intents: list[StepIntent]
    budgets: BatchBudgets
    slot: RingSlot
    key: str
    before: RingSlot | None
    """The step right before it on the device, when nothing lay between."""


@dataclass(frozen=True)
class Foreseen:
    """How the next step of a request whose seed was chosen would have been launched, had the host not waited for the
    one in flight: its steps are always planned by what was known two steps before, whoever is waited for."""

    round: int
    requested: Mode
    sampling: SamplingParams
    intent: StepIntent
    own: Budget | None
    """Where it is planned alone."""


class CapturedDecoder:
    """Decodes the requests that captured steps serve. One owner: the engine's own thread."""

    def __init__(self, pair: LoadedPair, seats: int, step: CapturedStep, stages: Stages) -> None:
        self._pair, self._step, self.stages = pair, step, stages
        self._seating = Seating(pair, step)
        self._ring = PinnedRing(step.inputs.device_words, step.records.device_rows)
        self._rows, self._requests = row_tiers(step.width, seats), request_tiers(seats)
        self._flying: InFlight | None = None
        self._last: RingSlot | None = None

    @torch.inference_mode()
    def step(self, states: Sequence[RequestState], default: Mode) -> list[Event]:
        """Launch a step for these requests, and return the events of the step before."""
        flying, self._flying = self._flying, None
        going_on = [state for state in states if not self._surely_ends(state, flying)]
        if going_on:
            self._flying = self._launch(going_on, default, flying)
        return [] if flying is None else self._read(flying)

    @torch.inference_mode()
    def simulate(self, simulated: SimulatedAcceptance) -> None:
        """Go on with another simulated profile; the pair must have had one when the steps were captured."""
        exponents = self._step.exponents
        if exponents is None:
            raise ValueError("steps without simulated acceptance cannot take it up later")
        exponents.copy_(torch.tensor(simulated.exponents[: len(exponents)], dtype=exponents.dtype))
        self._pair.simulated = simulated

    def drain(self, default: Mode) -> list[Event]:
        """As ``settle``; and all requests get up."""
        events = self.settle(default)
        self._seating.clear()
        return events

    def get_up(self, state: RequestState) -> None:
        """A request with no step in flight goes away for a while."""
        self._seating.leave(state)

    def settle(self, default: Mode) -> list[Event]:
        """The events of the step in flight, with none launched behind it."""
        flying, self._flying = self._flying, None
        for seat in [] if flying is None else flying.seats:
            # The tokens of the others do not depend on what they are planned by.
            if seat.state.is_reproducible and not seat.state.is_finished:
                seat.state.foreseen = self._foresee(seat, default)
        return [] if flying is None else self._read(flying)

    def has_in_flight(self, state: RequestState) -> bool:
        return self._flying is not None and any(seat.state is state for seat in self._flying.seats)

    @property
    def context(self) -> int:
        """Positions that a cache row has, of the target and of the drafter."""
        caches = (self._pair.cache, self._pair.draft_cache)
        return min(cache.context for cache in caches if cache is not None)

    def room_for_strangers(self, count: int) -> int:
        """Positions that each of so many requests that nobody made can have now (``time_stages``)."""
        return min(self.context, room_each(self._step, count))

    @property
    def row_tiers(self) -> tuple[int, ...]:
        """Row counts that verifications are captured for."""
        return self._rows

    def interrupt(self) -> None:
        """Something else ran on the device: the time since the last step is no idle time."""
        self._last = None

    @torch.inference_mode()
    def warm(self, draws: Sequence[Draws], largest: int, progress: Any) -> None:
        """Capture what the first requests will replay: up to ``largest`` rows, the largest first, so that all others
        find room in the memory it took."""
        tiers = [rows for rows in reversed(self._rows) if rows <= largest]
        if self._step.draws_on_device:
            # The kernels of filters take seconds to compile: not in the middle of a chat.
            draws = [*draws, Draws.FILTERED]
        draws = list(dict.fromkeys(map(self._kind, draws)))
        total = len(draws) * len(tiers)
        for number, (kind, rows) in enumerate((k, r) for k in draws for r in tiers):
            progress(number, total)
            if self._step.width and rows == tiers[0]:
                self._prepare_draft(self._requests[0], kind)
            self._prepare_verify(rows, kind, False)
        progress(total, total)

    @torch.inference_mode()
    def capture_ahead(self, above: int, most: int, blocks: Sequence[tuple[int, bool]], draws: Draws) -> None:
        """Capture what steps of more than ``above`` and at most ``most`` requests replay, the largest first.

        ``blocks``: drafts verified of each request, and whether they share a budget. Coarse tiers alone: requests that
        come and go meet them one after another, while which of the exact ones they meet is chance.
        """
        kind, exact = self._kind(draws), EXACT_WINDOWS * (self._step.width + 1)
        for rows in reversed(self._rows):
            for shares in (True, False):
                of = [block + 1 for block, is_shared in blocks if is_shared == shares]
                if rows > exact and any(above * window < rows <= most * window for window in of):
                    self._prepare_verify(rows, kind, shares)
        for count in reversed(self._requests):
            if any(block for block, _ in blocks) and above < count <= most:
                self._prepare_draft(count, kind)

    @torch.inference_mode()
    def time_stages(
        self, count: int, draft: bool, num_rows: int, draws: Draws, repeats: int, context: int = 1
    ) -> float:
        """Median milliseconds of a step of requests that nobody made, each with ``context`` tokens cached: for the cost
        table. Steps of many rows are timed as they are when a GPU has run them for a while."""
        count, num_rows = round_up(count, self._requests), round_up(num_rows, self._rows)
        draws, shares = self._kind(draws), draft and count > 1
        if draft:
            self._prepare_draft(count, draws)
        self._prepare_verify(num_rows, draws, shares)
        times: list[float] = []
        is_filtered = draws is Draws.FILTERED
        settling_ms = SETTLING_MS if self._pair.device.type == "cuda" and num_rows > MOST_SMALL_ROWS else 0.0
        with strangers(self._step, count, num_rows, is_drafting=draft, context=context, is_filtered=is_filtered):
            while len(times) < repeats or sum(times) < settling_ms:
                # Every one behind the same context.
                self._step.seats.kv_len.fill_(context)
                # Marks of its own: a step may be in flight.
                started, ended = new_event(self._pair.device), new_event(self._pair.device)
                started.record()
                if draft:
                    self._run_draft(count, draws)
                self._run_verify(num_rows, draws, shares)
                ended.record()
                ended.synchronize()
                times.append(started.elapsed_time(ended))
        self.interrupt()
        return statistics.median_low(times[-repeats:])

    def _surely_ends(self, state: RequestState, flying: InFlight | None) -> bool:
        """The step in flight delivers this request's last token, whatever else it does."""
        return flying is not None and state.remaining <= 1 and any(seat.state is state for seat in flying.seats)

    def _launch(self, states: Sequence[RequestState], default: Mode, flying: InFlight | None) -> InFlight:
        seats = self._seating.seat(states)
        foreseen = [self._take_foreseen(seat, default) for seat in seats]
        intents = intend_all([s.state for s in seats], default, self._pair)
        intents = [new if known is None else known.intent for new, known in zip(intents, foreseen, strict=True)]
        budgets = choose_budgets([s.state for s in seats], intents, [s.round for s in seats], self._pair)
        alone = {i: known.own for i, known in enumerate(foreseen) if known is not None and i in budgets.own}
        if alone:
            budgets = replace(budgets, own=budgets.own | {i: own for i, own in alone.items() if own is not None})
        draws, shares = self._kind(_draws_of(states)), budgets.shared is not None
        num_rows = round_up(_most_rows(intents, budgets), self._rows)
        drafting = max((i + 1 for i, intent in enumerate(intents) if intent.draft_len), default=0)
        count = round_up(drafting, self._requests) if drafting else 0
        if count:
            self._prepare_draft(count, draws)
        self._prepare_verify(num_rows, draws, shares)
        slot = self._ring.take()
        self._fill(slot, seats, intents, budgets, draws)
        slot.started.record()
        self._ring.upload(slot)
        if count:
            self._run_draft(count, draws)
        slot.drafted.record()
        self._run_verify(num_rows, draws, shares)
        slot.verified.record()
        self._ring.download(slot)
        self._seating.launched(seats)
        before, self._last = self._last, slot
        key = f"{count} blocks, {num_rows} rows, {draws.value}"
        return InFlight(seats, intents, budgets, slot, key, before if flying is not None else None)

    def _foresee(self, seat: Seat, default: Mode) -> Foreseen:
        state = seat.state
        intent = intend(state, default, self._pair)
        own = choose_budgets([state], [intent], [seat.round], self._pair).own.get(0)
        return Foreseen(seat.round, state.mode_override or default, state.sampling, intent, own)

    @staticmethod
    def _take_foreseen(seat: Seat, default: Mode) -> Foreseen | None:
        """None as well where mode or sampling have changed since."""
        state, known = seat.state, seat.state.foreseen
        state.foreseen = None
        if known is None:
            return None
        asked = (seat.round, state.mode_override or default, state.sampling)
        return known if asked == (known.round, known.requested, known.sampling) else None

    def _kind(self, draws: Draws) -> Draws:
        if not self._step.draws_on_device:
            return draws
        return Draws.FILTERED if draws is Draws.FILTERED else Draws.SAMPLED

    def _prepare_draft(self, count: int, draws: Draws) -> None:
        self._hold_nobody_if(("draft", count, draws), partial(self._step.draft, count, draws))

    def _prepare_verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        self._hold_nobody_if(("verify", num_rows, draws, shares), partial(self._step.verify, num_rows, draws, shares))

    def _hold_nobody_if(self, key: tuple, stage: Any) -> None:
        # A stage that is captured runs once before: on inputs that name no request, so that it changes none.
        if not self.stages.is_ready(key):
            self._hold_nobody()
            self.stages.prepare(key, stage)
            self.interrupt()

    def _hold_nobody(self) -> None:
        self._step.inputs.device_words.zero_()

    def _run_draft(self, count: int, draws: Draws) -> None:
        self.stages.run(("draft", count, draws), partial(self._step.draft, count, draws))

    def _run_verify(self, num_rows: int, draws: Draws, shares: bool) -> None:
        self.stages.run(("verify", num_rows, draws, shares), partial(self._step.verify, num_rows, draws, shares))

    def _fill(
        self,
        slot: RingSlot,
        seats: Sequence[Seat],
        intents: Sequence[StepIntent],
        budgets: BatchBudgets,
        draws: Draws,
    ) -> None:
        """Write the step's numbers where they are uploaded from."""
        inputs, words = self._step.inputs, slot.words.numpy()
        s, g, count = inputs.seats, inputs.block, len(seats)
        words[: inputs.num_whole] = 0.0
        words[:count] = [intent.draft_len for intent in intents]
        words[s : s + count] = [_planned(i, budgets) for i in range(count)]
        words[2 * s : 2 * s + count] = [_KINDS[intent.mode] for intent in intents]
        words[inputs.num_whole - 2] = count
        words[inputs.num_whole - 1] = 0 if budgets.shared is None else budgets.shared.drafts
        seeds, rounds = [seat.state.seed for seat in seats], [seat.round for seat in seats]
        at = inputs.num_whole
        for kind, width in ((rng.DRAFT, g), (rng.ACCEPT, g), (rng.NEXT, g + 1), (rng.SIMULATE, g)):
            if kind is rng.SIMULATE or (kind is rng.ACCEPT and self._pair.simulated is not None):
                is_read = self._pair.simulated is not None
            else:
                is_read = draws is not Draws.GREEDY and not self._step.draws_on_device
            if is_read:
                numbers = rng.uniforms(seeds, rounds, 0, width, kind).numpy()
                words[at : at + count * width] = np.reshape(numbers, -1)
            at += s * width

    def _read(self, flying: InFlight) -> list[Event]:
        """Wait for a step's copy, and deliver what it committed."""
        flying.slot.copied.synchronize()
        times = _times_of(flying)
        graph = {"replayed": self.stages.name == "graphs", "key": flying.key}
        events: list[Event] = []
        told: list[tuple[Seat, StepIntent, StepLengths, Any, int]] = []
        outcomes = outcomes_of(self._step.records, flying.slot.records, [i.draft_len for i in flying.intents])
        caps: dict[int, int] = {}
        if self._pair.totals is not None:
            caps = caps_of(flying.intents, flying.budgets, outcomes, self._pair.temperatures)
        for index, (seat, intent, outcome) in enumerate(zip(flying.seats, flying.intents, outcomes, strict=True)):
            state = seat.state
            if state.is_finished:
                continue
            budget = flying.budgets.of(index)
            planned = None if budget is None else outcome.verify_len
            lengths = lengths_of(intent, planned, budget, flying.budgets.paused_ms)
            if index in caps:
                lengths = replace(lengths, cap=caps[index])
            state.round = seat.read()
            if not outcome.is_draft_sound and intent.draft_len:
                state.finish("error", error=DAMAGED_DRAFTER)
            elif outcome.damaged_from <= outcome.row.taken:
                state.finish("error", error=DAMAGED_MODEL)
            if state.is_finished:
                continue
            run = [*outcome.row.draft_ids[: outcome.row.taken], outcome.row.next_id]
            origins = ["draft"] * outcome.row.taken + ["plain" if intent.draft_len == 0 else "bonus"]
            committed = state.deliver(run, origins, events)
            self._seating.committed(seat)
            observe(state, intent, lengths)
            told.append((seat, intent, lengths, outcome, committed))
        blocks: list[list[float]] = []
        for seat, intent, lengths, outcome, committed in told:
            state = seat.state
            correction = correction_of(state, self._pair)
            refined = refined_record(state, self._pair, correction, len(flying.seats))
            alive = outcome.survival(correction)
            state.stale.keep(state.round - 1, alive)
            events += step_event(
                self._pair, state, intent, lengths, outcome.row, alive, committed, times, graph, correction, refined
            )
            blocks.append(alive)
        learn_blocks(self._pair, [seat.state for seat, *_ in told], blocks)
        if self._pair.refinement is not None and told:
            outcomes = [outcome for _, _, _, outcome, _ in told]
            learn(
                self._pair,
                [seat.state for seat, *_ in told],
                [intent.draft_len for _, intent, *_ in told],
                [outcome.verify_len for outcome in outcomes],
                [outcome.row.confidence_logit for outcome in outcomes],
                [outcome.row.full for outcome in outcomes],
                # Requests that had ended took part as well, and what they verified is not known any more.
                times.total_ms if len(told) == len(flying.seats) else None,
            )
        return events


def _draws_of(states: Sequence[RequestState]) -> Draws:
    if all(s.is_greedy for s in states):
        return Draws.GREEDY
    return Draws.FILTERED if any(s.is_filtered for s in states) else Draws.SAMPLED


def _planned(index: int, budgets: BatchBudgets) -> int:
    if index in budgets.own:
        return budgets.own[index].drafts
    return SHARED if budgets.shares(index) else 0


def _most_rows(intents: Sequence[StepIntent], budgets: BatchBudgets) -> int:
    """Rows that the device may come to need, whatever it decides."""
    rows = len(intents)
    for index, intent in enumerate(intents):
        budget = budgets.own.get(index)
        if budgets.shares(index):
            continue
        is_compact = intent.mode == "compact" and budget is not None
        rows += min(intent.draft_len, budget.drafts) if is_compact and budget is not None else intent.draft_len
    if budgets.shared is not None:
        caps = sum(intents[i].draft_len for i in budgets.sharing if intents[i].mode == "cap-accept")
        compact = sum(intents[i].draft_len for i in budgets.sharing if intents[i].mode == "compact")
        rows += caps + min(compact, budgets.shared.drafts)
    return rows


def _times_of(flying: InFlight) -> StepTimes:
    slot, before = flying.slot, flying.before
    laps = {
        "draft_ms": slot.started.elapsed_time(slot.drafted),
        "verify_ms": slot.drafted.elapsed_time(slot.verified),
    }
    total = laps["draft_ms"] + laps["verify_ms"]
    if before is not None:
        laps["gpu_idle_ms"] = max(0.0, before.verified.elapsed_time(slot.started))
        total += laps["gpu_idle_ms"]
    return StepTimes(laps, total)
