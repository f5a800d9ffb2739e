"""Who waits, who runs. Touches no tensor."""

from __future__ import annotations

from collections import deque

from sparkchat.engine.request import RequestState
from sparkchat.engine.slots import SlotTable


class Scheduler:
    """First come, first served, up to ``concurrency`` requests at a time."""

    def __init__(self, concurrency: int, slots: SlotTable) -> None:
        self._concurrency = concurrency
        self._slots = slots
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []

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
        """Give slots to waiting requests while there is room; returns those that start."""
        started: list[RequestState] = []
        busy = {state.request.session for state in self._running}
        for state in self._waiting:
            session = state.request.session
            if len(self._running) == self._concurrency:
                break
            if session is not None and session in busy:
                # Two requests of one session share a timeline: the later one waits, and holds up no one else.
                continue
            state.slot, state.cached_tokens = self._slots.acquire(session, state.prompt_ids)
            state.prefilled = state.cached_tokens
            self._running.append(state)
            started.append(state)
            busy.add(session)
        if started:
            self._waiting = deque(state for state in self._waiting if state.slot is None)
        return started

    def retire(self) -> list[RequestState]:
        """Take out every finished request, its slot given back."""
        done = [state for state in [*self._running, *self._waiting] if state.is_finished]
        self._running = [state for state in self._running if not state.is_finished]
        if any(state.is_finished for state in self._waiting):
            self._waiting = deque(state for state in self._waiting if not state.is_finished)
        for state in done:
            if state.slot is not None:
                session = None if state.finish_reason == "error" else state.request.session
                self._slots.release(state.slot, session, state.tokens_in_cache)
                state.slot = None
        return done
