"""Which request sits in which seat, and what the host knows of it while steps are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState
from sparkchat.engine.slots import flush_contexts
from sparkchat.params import SamplingParams


@dataclass
class Seat:
    """A request's place in captured steps."""

    state: RequestState
    index: int
    round: int
    """Of the next step to be launched."""
    sampling: SamplingParams
    """What the device was told."""
    in_flight: int = 0
    """Steps launched and not yet read."""

    def read(self) -> int:
        """One more of its steps was read; returns the round that follows it."""
        self.in_flight -= 1
        return self.round - self.in_flight


class Seating:
    """Keeps the running requests in seats 0, 1, ... without gaps."""

    def __init__(self, pair: LoadedPair, step: CapturedStep) -> None:
        self._pair, self._step = pair, step
        self._seats: list[Seat] = []

    def seat(self, states: Sequence[RequestState]) -> list[Seat]:
        """The seats of these requests, in order of their index. Who is not among them, and has ended, gets up."""
        self._clear(states)
        known = {id(seat.state) for seat in self._seats}
        fresh = [state for state in states if id(state) not in known]
        if fresh and self._pair.drafter is not None and self._pair.draft_cache is not None:
            # What prompts left waiting: from here on the step itself hands features over.
            flush_contexts(self._pair.drafter, self._pair.draft_cache, [state.slot.draft for state in fresh])
        for state in fresh:
            self._sit(state)
        for seat in self._seats:
            if seat.sampling != seat.state.sampling:
                seat.sampling = seat.state.sampling
                self._tell_sampling(seat)
        return list(self._seats)

    def launched(self, seats: Sequence[Seat]) -> None:
        """Count a step in flight; its rows may reach a block further than all before."""
        for seat in seats:
            seat.round += 1
            seat.in_flight += 1
            end = seat.state.kv_len + seat.in_flight * (self._step.width + 1)
            self._pair.cache.mark_written(seat.state.slot.row, end)
            if self._pair.draft_cache is not None:
                self._pair.draft_cache.mark_written(seat.state.slot.draft.row, end + self._step.width)

    def committed(self, seat: Seat) -> None:
        """Bring the host's count of cached positions up to date with what was delivered."""
        slot, length = seat.state.slot, seat.state.kv_len
        self._pair.cache.advance(slot.row, length)
        if self._pair.draft_cache is not None:
            self._pair.draft_cache.advance(slot.draft.row, length)
            slot.draft.length = length

    def leave(self, state: RequestState) -> None:
        """Give up one request's seat, if it has one."""
        self._clear([seat.state for seat in self._seats if seat.state is not state])

    def clear(self) -> None:
        """Everybody gets up; no step may be in flight."""
        self._seats.clear()

    def _clear(self, states: Sequence[RequestState]) -> None:
        """Give up the seats of all but these requests, moving the last ones into the gaps."""
        stay = {id(state) for state in states}
        index = 0
        while index < len(self._seats):
            if id(self._seats[index].state) in stay:
                index += 1
                continue
            last = self._seats.pop()
            if last.index != index:
                self._step.seats.move(last.index, index)
                last.index = index
                self._seats[index] = last

    def _sit(self, state: RequestState) -> None:
        seat = Seat(state, len(self._seats), state.round, state.sampling)
        self._seats.append(seat)
        self._tell_sampling(seat)
        self._step.seats.put(
            seat.index,
            anchor=state.anchor,
            kv_len=state.kv_len,
            remaining=min(state.remaining, torch.iinfo(torch.int64).max),
            cache_row=state.slot.row,
            draft_row=0 if state.slot.draft is None else state.slot.draft.row,
            seeds=state.seed if state.seed < 2**63 else state.seed - 2**64,
            rounds=state.round,
        )

    def _tell_sampling(self, seat: Seat) -> None:
        sampling = seat.sampling
        self._step.seats.put(
            seat.index,
            temperature=sampling.temperature,
            top_k=min(sampling.top_k, self._pair.target.config.vocab_size),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
