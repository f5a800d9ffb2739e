"""The engine facade: loads a pair, admits requests, steps, and speaks in events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from sparkchat.collector import look_between_steps
from sparkchat.engine import loading
from sparkchat.engine.admission import Admission
from sparkchat.engine.captured.build import build_decoder, reason_against, request_reason, warm_up
from sparkchat.engine.captured.costs import captured_costs
from sparkchat.engine.captured.decoder import CapturedDecoder
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.cost_probe import measured_cost, stored_cost, tuned_cost
from sparkchat.engine.live_settings import LiveSettings
from sparkchat.engine.loop import decode_step
from sparkchat.engine.prefill import prefill_step
from sparkchat.engine.request import RequestState
from sparkchat.engine.result import finished_result, refused_result
from sparkchat.engine.scheduler import Scheduler
from sparkchat.engine.slots import Reach, SlotTable, flush_contexts
from sparkchat.engine.step_plan import standing_mode
from sparkchat.engine.step_totals import StepTotals
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import MODES, GenerateRequest, LoadSpec, Mode
from sparkchat.thinking import find_thinking_tags

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
        self.pair, self.text = loading.load_pair(spec, self._progress)
        self.mode: Mode = spec.mode if self.pair.drafter is not None else "off"
        self._slots = SlotTable(self.pair.cache, self.pair.draft_cache)
        self._has_table_off, self._cost_kept = False, None
        self._scheduler = Scheduler(spec.concurrency, self._slots, self.pair.cache.context)
        self._admission = Admission(spec, self.pair, self.text)
        self._live = LiveSettings(self.pair.target.config.vocab_size)
        self._captured, graphs = self._capture()
        if self.pair.cost is None and self._plans("compact"):
            self.pair.cost = stored_cost(spec, self.pair, self._progress)
        if self._lacks_cost(self.mode):
            self.pair.cost = measured_cost(spec, self.pair, self._progress)
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.info = loading.describe(spec, self.pair, self.text, self.load_ms, graphs)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: GenerateRequest) -> list[Event]:
        """Queue a request. One that cannot run yields its ``end`` event with the reason at once.

        A request with the id of one that has not ended is refused with an ``end`` event of id None, which nobody takes
        for the end of the other.
        """
        if self._scheduler.find(request.id) is not None:
            error = UsageError(
                f"a request with the id {request.id!r} is under way; give another id, or wait for its end"
            )
            return [self.refuse(None, error, request.mode)]
        try:
            state, notices = self._admission.admit(request)
            found = self._find_cost(request.mode or self.mode)
        except SparkchatError as error:
            return [self.refuse(request.id, error, request.mode)]
        self._scheduler.add(state)
        return [*found, *({"event": "notice", "id": request.id, "message": text} for text in notices)]

    def refuse(self, request_id: Any, error: SparkchatError, mode: Mode | None = None) -> Event:
        """The ``end`` event of a request that cannot run; ``mode`` is the one it asked for."""
        result = refused_result(
            model=self.spec.name,
            drafter=loading.drafter_name(self.spec, self.pair),
            mode=standing_mode(mode or self.mode, self.pair)[0],
            error=error.message,
            load_ms=self.load_ms,
            block_size=self.pair.block_size,
        )
        return {"event": "end", "id": request_id, "result": result, "thinking": "", "error": type(error).__name__}

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One prompt chunk, if any prompt waits, and one decode step for all that decode."""
        look_between_steps()
        events = [
            self._resumed_event(state) if state.times_aside else self._start_event(state)
            for state in self._scheduler.admit()
        ]
        filling = self._scheduler.filling
        if filling:
            events += prefill_step(self.pair, filling)
            self._interrupt()
            events += self._retire()
            if self.pair.totals is not None and self._scheduler.filling:
                self._hand_over()
                return events
        events += self._make_room()
        decoding = self._scheduler.decoding
        if decoding:
            events += self._decode(decoding)
            events += self._totals()
            self._live.settle()
            events += self._retire()
        return events

    def _make_room(self) -> list[Event]:
        """Room for the coming step of all that decode; while there is none, who started last is set aside."""
        if self._scheduler.reserve(self._reach()):
            return []
        events: list[Event] = []
        if self._captured is not None:
            # What is set aside must be known whole; and a request that ends here may leave room enough.
            events += self._captured.settle(self.mode)
            self._interrupt()
            events += self._retire()
        while not self._scheduler.reserve(self._reach()):
            state = self._scheduler.set_aside_last()
            if self._captured is not None:
                self._captured.get_up(state)
            events.append({"event": "preempted", "id": state.id, "t_ns": time.monotonic_ns()})
        return events

    def _reach(self) -> Callable[[RequestState], Reach]:
        """How far the coming step may write, behind one that may be under way when it is launched."""
        block = self.pair.block_size
        most = (1 if self._captured is None else 2) * (block + 1)

        def reach(state: RequestState) -> Reach:
            end = state.kv_len + most
            return Reach(end, end + block)

        return reach

    def _decode(self, states: list[RequestState]) -> list[Event]:
        """One step: captured for the requests it serves, by the reference loop for the others, which say why."""
        if self._captured is None:
            return decode_step(self.pair, states, self.mode)
        reasons = {id(state): request_reason(state) for state in states}
        events: list[Event] = []
        if any(reasons[id(s)] is not None and self._captured.has_in_flight(s) for s in states):
            # Its settings changed while a captured step was under way: that step counts first.
            events += self._captured.drain(self.mode)
            states = [state for state in states if not state.is_finished]
        for reason in dict.fromkeys(r for r in map(reasons.get, map(id, states)) if r is not None):
            group = [state for state in states if reasons[id(state)] == reason]
            graph = {"replayed": False, "key": None, "reason": reason}
            events += decode_step(self.pair, group, self.mode, graph=graph)
            self._interrupt()
        return events + self._captured.step([s for s in states if reasons[id(s)] is None], self.mode)

    def _interrupt(self) -> None:
        if self._captured is not None:
            self._captured.interrupt()

    def _capture(self) -> tuple[CapturedDecoder | None, bool | str]:
        """The decoder of captured steps, or why there is none."""
        if not loading.wants_capture(self.spec, self.pair.device):
            return None, "--no-graphs was given" if self.pair.device.type == "cuda" else False
        reason = reason_against(self.pair)
        if reason is not None:
            if self.spec.graphs:
                raise UsageError(f"--graphs was given, but {reason}; leave it out")
            return None, reason
        block = self.spec.block_size or self.pair.block_size
        decoder = build_decoder(self.pair, self.spec.concurrency, block)
        warm_up(decoder, block + 1, self._progress)
        self.pair.measure_steps = partial(captured_costs, decoder, block)
        return decoder, decoder.stages.name == "graphs"

    def set_mode(self, mode: Mode) -> list[Event]:
        """The mode of every request that did not choose its own, from the next step on."""
        if mode not in MODES:
            raise UsageError(f"mode {mode!r} is unknown; give one of {', '.join(MODES)}")
        if mode != "off" and self.pair.drafter is None:
            raise UsageError(f"mode {mode} was asked for, but {self.pair.reason_off}; stay with mode off")
        if mode == self.mode:
            return []
        found = self._find_cost(mode)
        event = {"event": "mode_change", "id": None, "from": self.mode, "to": mode, "t_ns": time.monotonic_ns()}
        self.mode = mode
        return [*found, event]

    def change(
        self, request_id: str, sampling: Mapping[str, Any] | None = None, think: bool | None = None
    ) -> list[Event]:
        """Other settings for a running answer, from the next step on. Raises UsageError for what cannot change."""
        state = self._scheduler.find(request_id)
        if state is None or not state.is_prefilled:
            raise UsageError(f"no answer {request_id!r} is running; the change holds from the next one on")
        events = [self._live.change_sampling(state, sampling)] if sampling else []
        if think is False:
            tags = None if self.text.tokenizer is None else find_thinking_tags(self.text.tokenizer)
            events.append(self._live.end_thinking(state, None if tags is None else tags.close_id))
        return [event for event in events if event is not None]

    def cancel(self, request_id: str) -> list[Event]:
        """End a request, waiting or running; what was delivered stays delivered."""
        state = self._scheduler.find(request_id)
        if state is None:
            return []
        events: list[Event] = []
        state.close("cancelled", events)
        return events + self._retire()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[dict[str, Any]]:
        """Results in the order of ``requests``, whose ids must differ; all of them share the batch."""
        if len({request.id for request in requests}) < len(requests):
            raise UsageError("two requests have one id; give every request an id of its own")
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

    def _lacks_cost(self, mode: Mode) -> bool:
        return self.pair.cost is None and not self._has_table_off and self._plans(mode)

    def _find_cost(self, mode: Mode) -> list[Event]:
        """Measure step costs if this mode is the first to plan by them; the ``info`` event then shows the table."""
        if not self._lacks_cost(mode):
            return []
        self.pair.cost = measured_cost(self.spec, self.pair, self._progress)
        self.info = {**self.info, "cost_table": loading.describe_cost(self.pair.cost)}
        return [{"event": "info", "info": self.info}]

    def plan_by_table(self, is_wanted: bool) -> list[Event]:
        """Whether plans look at the step costs from now on; without them nothing is trimmed. For comparisons."""
        if is_wanted == self._has_table_off:
            self._has_table_off = not is_wanted
            self.pair.cost, self._cost_kept = self._cost_kept, self.pair.cost
            self.info = {**self.info, "cost_table": loading.describe_cost(self.pair.cost)}
        return [{"event": "info", "info": self.info}]

    def measure_together(self, is_wanted: bool) -> None:
        """For comparisons, from now on: whole steps are told as ``batch_step`` events, and nobody decodes before all
        prompts that found room are read, so that as many requests as there are decode side by side."""
        self.pair.totals = StepTotals() if is_wanted else None

    def _hand_over(self) -> None:
        """What the prompts read so far left for the drafter: of hundreds of them together it would be gigabytes."""
        contexts = [state.slot.draft for state in self._scheduler.decoding]
        if self._captured is not None and self.pair.drafter is not None and self.pair.draft_cache is not None:
            flush_contexts(self.pair.drafter, self.pair.draft_cache, contexts)

    def _totals(self) -> list[Event]:
        totals = self.pair.totals
        if totals is None or not totals.requests:
            return []
        self.pair.totals = StepTotals()
        return [totals.event(self.num_graphs, self.pair.simulated is not None)]

    @property
    def num_graphs(self) -> int:
        return 0 if self._captured is None else self._captured.stages.num_graphs

    def capture_ahead(self, above: Any, most: Any, blocks: Any, draws: Any) -> None:
        """Make steps of more than ``above`` and at most ``most`` requests ready; see ``CapturedDecoder``. Not in the
        middle of answers. Raises UsageError for what is none of this."""
        try:
            asked = int(above), int(most), [(int(block), bool(shares)) for block, shares in blocks], Draws(draws)
        except (TypeError, ValueError):
            raise UsageError(f"steps of {most!r} requests, {draws!r}, cannot be captured; give numbers") from None
        if self._captured is not None and not self.has_work:
            self._captured.capture_ahead(*asked)

    def tune_cost(self) -> list[Event]:
        """Measure step costs thoroughly and plan by them from now on. Only between answers: the caches are used."""
        if self.has_work:
            raise UsageError("step costs were to be measured while requests run; wait for their end")
        if not self._plans("compact"):
            reason = self.pair.reason_off or "the drafter has no confidence head"
            raise UsageError(f"step costs are what plans are made by, and there is nothing to plan: {reason}")
        self.pair.cost, file = tuned_cost(self.spec, self.pair, self._progress)
        self.info = {**self.info, "cost_table": loading.describe_cost(self.pair.cost)}
        return [{"event": "info", "info": self.info}, {"event": "cost_table", "id": None, "file": file}]

    @staticmethod
    def _resumed_event(state: RequestState) -> Event:
        return {"event": "resumed", "id": state.id, "t_ns": time.monotonic_ns()}

    def _start_event(self, state: RequestState) -> Event:
        return {
            "event": "start",
            "id": state.id,
            "sampling": asdict(replace(state.sampling, seed=state.seed)),
            "mode": self._mode_of(state),
            "block_size": state.block_size or None,
            "prompt_text": state.request.question,
            "prompt_token_ids": list(state.prompt_ids),
            "cached_tokens": state.cached_tokens,
            "t_ns": time.monotonic_ns(),
        }

    def _retire(self) -> list[Event]:
        events: list[Event] = []
        for state in self._scheduler.retire():
            result = finished_result(
                state,
                model=self.spec.name,
                drafter=loading.drafter_name(self.spec, self.pair),
                load_ms=self.load_ms,
                mode=self._mode_of(state),
                reason_off=self._reason_off(state),
            )
            if self.pair.simulated is not None:
                result["speculation"]["simulated"] = self.pair.simulated.label
            events.append({"event": "end", "id": state.id, "result": result, "thinking": state.output.thinking})
        return events

    def _mode_of(self, state: RequestState) -> Mode:
        """The mode in effect now; a pause of drafting that does not pay is told step by step only."""
        return standing_mode(state.mode_override or self.mode, self.pair)[0]

    def _reason_off(self, state: RequestState) -> str | None:
        if self.pair.drafter is None:
            return self.pair.reason_off
        return "mode is off" if self._mode_of(state) == "off" else None
