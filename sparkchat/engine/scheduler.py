"""Who waits, who runs, and who makes room when there is none. Touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sparkchat.engine.request import RequestState
from sparkchat.engine.slots import Reach, SlotTable

ROOM_TO_RUN = 256
"""Tokens that must be free behind its prompt, or behind what it had cached, for a request to start or to return: with
less it would soon be set aside again."""


class Scheduler:
    """First come, first served, up to ``concurrency`` requests at a time and as far as their caches have room.

    When a running request finds no room, the one that started last is set aside and waits in front of all others; the
    oldest never is. So the running are always those that started first.
    """

    def __init__(self, concurrency: int, slots: SlotTable, whole: int = 1 << 62) -> None:
        """``whole``: positions that one request has room for in any case."""
        self._concurrency, self._slots, self._whole = concurrency, slots, whole
        self._waiting: deque[RequestState] = deque()
        """Those set aside first."""
        self._running: list[RequestState] = []
        """In the order in which they started."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def filling(self) -> list[RequestState]:
        return [state for state in self._running if not state.is_prefilled and not state.is_finished]

    @property
    def decoding(self) -> list[RequestState]:
        return [state for state in self._running if state.is_prefilled and not state.is_finished]

    def add(self, state: RequestState) -> None:
        self._waiting.append(state)

    def find(self, request_id: str) -> RequestState | None:
        return next((s for s in [*self._running, *self._waiting] if s.id == request_id), None)

    def admit(self) -> list[RequestState]:
        """Give slots to waiting requests while there is room; returns those that start, or return."""
        begun: list[RequestState] = []
        busy = {state.request.session for state in self._running}
        for state in self._waiting:
            session = state.request.session
            if len(self._running) == self._concurrency:
                break
            if session is not None and session in busy:
                # Two requests of one session share a timeline: the later one waits, and holds up no one else.
                continue
            if not (self._start(state) if state.aside is None else self._return(state)):
                break
            self._running.append(state)
            begun.append(state)
            busy.add(session)
        if begun:
            self._waiting = deque(state for state in self._waiting if state.slot is None)
        return begun

    def _start(self, state: RequestState) -> bool:
        found = self._slots.acquire(state.request.session, state.prompt_ids, self._spare(state, len(state.prompt_ids)))
        if found is None:
            return False
        state.slot, state.cached_tokens = found
        state.prefilled = state.cached_tokens
        return True

    def _return(self, state: RequestState) -> bool:
        # A prompt that was not read to its end still needs room for the rest.
        end = state.kv_len if state.is_prefilled else len(state.prompt_ids)
        state.slot = self._slots.bring_back(state.aside, end, self._spare(state, end))
        if state.slot is None:
            return False
        state.aside = None
        return True

    def _spare(self, state: RequestState, length: int) -> int:
        """Positions that must be free behind ``length`` cached ones."""
        return max(0, min(ROOM_TO_RUN, state.remaining, self._whole - length))

    def reserve(self, reach: Callable[[RequestState], Reach]) -> bool:
        """Hold room for the coming step of every decoding request; False where there is too little."""
        is_enough = all(self._slots.reserve(state.slot, reach(state)) for state in self.decoding)
        self._slots.publish()
        return is_enough

    def set_aside_last(self) -> RequestState:
        """Take the room of the request that started last; it waits in front of all others."""
        assert len(self._running) > 1, "one request alone has room for its whole context"
        state = self._running.pop()
        state.aside, state.slot = self._slots.set_aside(state.slot), None
        state.times_aside += 1
        self._waiting.appendleft(state)
        return state

    def retire(self) -> list[RequestState]:
        """Take out every finished request, its slot given back."""
        done = [state for state in [*self._running, *self._waiting] if state.is_finished]
        self._running = [state for state in self._running if not state.is_finished]
        if any(state.is_finished for state in self._waiting):
            self._waiting = deque(state for state in self._waiting if not state.is_finished)
        for state in done:
            state.aside = None
            if state.slot is not None:
                session = None if state.finish_reason == "error" else state.request.session
                self._slots.release(state.slot, session, state.tokens_in_cache)
                state.slot = None
        return done
