"""The engine facade: loads a pair, admits requests, steps, and speaks in events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparkchat.engine import loading
from sparkchat.engine.admission import Admission
from sparkchat.engine.cost_probe import cost_of
from sparkchat.engine.loop import decode_step
from sparkchat.engine.prefill import prefill_step
from sparkchat.engine.request import RequestState
from sparkchat.engine.result import finished_result, refused_result
from sparkchat.engine.scheduler import Scheduler
from sparkchat.engine.slots import SlotTable
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import MODES, GenerateRequest, LoadSpec, Mode

Event = dict[str, Any]


class Engine:
    """One loaded pair and the requests that run on it. Not thread-safe: one thread owns it.

    ``submit`` queues a request, ``step`` does one prompt chunk and one decode step for everything that
    runs and returns the events in order, ``generate`` is both in a loop for callers that only want
    results.
    """

    def __init__(self, spec: LoadSpec, progress: Callable[[Event], None] | None = None) -> None:
        started = time.perf_counter()
        self._progress = progress or (lambda event: None)
        self.spec = spec
        self.mode: Mode = spec.mode
        self.pair, self.text = loading.load_pair(spec, self._progress)
        self._slots = SlotTable(self.pair.cache, self.pair.draft_cache)
        self._scheduler = Scheduler(spec.concurrency, self._slots)
        self._admission = Admission(spec, self.pair, self.text)
        if spec.cost_table is None and self._plans(self.mode):
            self._ensure_cost()
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.info = loading.describe(spec, self.pair, self.text, self.load_ms)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: GenerateRequest) -> list[Event]:
        """Queue a request. One that cannot run yields its ``end`` event with the reason at once."""
        mode = request.mode or self.mode
        try:
            state, notices = self._admission.admit(request)
            if self._plans(mode):
                self._ensure_cost()
        except SparkchatError as error:
            return [self._refuse(request, mode, error)]
        self._scheduler.add(state)
        return [{"event": "notice", "id": request.id, "message": text} for text in notices]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One prompt chunk, if any prompt waits, and one decode step for all that decode."""
        events = [self._start_event(state) for state in self._scheduler.admit()]
        filling = self._scheduler.filling
        if filling:
            events += prefill_step(self.pair, filling)
            events += self._retire()
        decoding = self._scheduler.decoding
        if decoding:
            events += decode_step(self.pair, decoding, self.mode)
            events += self._retire()
        return events

    def set_mode(self, mode: Mode) -> list[Event]:
        """The mode of every request that did not choose its own, from the next step on."""
        if mode not in MODES:
            raise UsageError(f"mode {mode!r} is unknown; give one of {', '.join(MODES)}")
        if mode == self.mode:
            return []
        if self._plans(mode):
            self._ensure_cost()
        event = {"event": "mode_change", "id": None, "from": self.mode, "to": mode, "t_ns": time.monotonic_ns()}
        self.mode = mode
        return [event]

    def cancel(self, request_id: str) -> list[Event]:
        """End a request, waiting or running; what was delivered stays delivered."""
        state = self._scheduler.find(request_id)
        if state is None:
            return []
        events: list[Event] = []
        state.close("cancelled", events)
        return events + self._retire()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[dict[str, Any]]:
        """Results in the order of ``requests``; all of them share the batch."""
        results: dict[str, dict[str, Any]] = {}
        for request in requests:
            self._collect(self.submit(request), results)
        while self.has_work:
            self._collect(self.step(), results)
        return [results[request.id] for request in requests]

    @staticmethod
    def _collect(events: list[Event], results: dict[str, dict[str, Any]]) -> None:
        results.update((event["id"], event["result"]) for event in events if event["event"] == "end")

    def _plans(self, mode: Mode) -> bool:
        return mode in ("compact", "cap-accept") and self.pair.drafter is not None and self.pair.drafter.has_confidence

    def _ensure_cost(self) -> None:
        if self.pair.cost is None:
            self.pair.cost, self.pair.plain_ms = cost_of(self.spec, self.pair, self._progress)
            if hasattr(self, "info"):
                self.info = loading.describe(self.spec, self.pair, self.text, self.load_ms)

    def _start_event(self, state: RequestState) -> Event:
        from dataclasses import asdict, replace

        return {
            "event": "start",
            "id": state.id,
            "sampling": asdict(replace(state.sampling, seed=state.seed)),
            "mode": state.mode_override or self.mode,
            "block_size": state.block_size or None,
            "prompt_token_ids": list(state.prompt_ids),
            "cached_tokens": state.cached_tokens,
            "t_ns": time.monotonic_ns(),
        }

    def _retire(self) -> list[Event]:
        events: list[Event] = []
        for state in self._scheduler.retire():
            events.append(
                {
                    "event": "end",
                    "id": state.id,
                    "result": finished_result(
                        state,
                        model=self.spec.name,
                        drafter=loading.drafter_name(self.spec, self.pair),
                        load_ms=self.load_ms,
                        mode=state.mode_override or self.mode,
                        reason_off=self._reason_off(state),
                    ),
                    "thinking": state.output.thinking,
                }
            )
        return events

    def _reason_off(self, state: RequestState) -> str | None:
        if self.pair.drafter is None:
            return self.pair.reason_off
        if (state.mode_override or self.mode) == "off":
            return "mode is off"
        return None

    def _refuse(self, request: GenerateRequest, mode: Mode, error: SparkchatError) -> Event:
        result = refused_result(
            model=self.spec.name,
            drafter=loading.drafter_name(self.spec, self.pair),
            mode=mode,
            error=error.message,
            load_ms=self.load_ms,
            block_size=self.pair.block_size,
        )
        return {"event": "end", "id": request.id, "result": result, "thinking": "", "error": type(error).__name__}
