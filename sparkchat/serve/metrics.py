"""Counters of the server in Prometheus' text form, under the names that vLLM and SGLang give them.

vLLM's speculation counters count drafts handed to the model, in steps that were handed any; SGLang's
``spec_accept_rate`` counts drafts proposed. SGLang's gauges of speculation describe the last ten seconds in which steps
ran, and have no sample before the first one: a missing sample is "not measured".
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Event = dict[str, Any]

WINDOW_SECONDS = 10.0
_LATENCIES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Our finish reasons -> vLLM's ``finished_reason``."""


class Histogram:
    """Observations by upper bound, as Prometheus counts them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class _Live:
    """A request on its way."""

    submitted: float
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    is_aside: bool = False
    """Its cache gave way to others, and it waits to go on."""
    num_prompt: int = 0
    num_tokens: int = 0


class _Step(NamedTuple):
    at: float
    proposed: int
    rows: int
    accepted: int
    committed: int
    trimmed: int | None


class Metrics:
    """Everything that is counted. ``clock`` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._steps: deque[_Step] = deque()
        self._arrivals: deque[tuple[float, int]] = deque()
        self._finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._at_position: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._to_first = Histogram(_TO_FIRST)
        self._between = Histogram(_BETWEEN)
        self._latency = Histogram(_LATENCIES)
        self._queued = Histogram(_LATENCIES)
        self._prompt_lengths = Histogram(_TOKENS)
        self._answer_lengths = Histogram(_TOKENS)

    def submitted(self, request_id: str) -> None:
        self._live[request_id] = _Live(self._clock())

    def lost(self, request_id: str) -> None:
        """The engine died before the request ended."""
        self._end(request_id, "error")

    def take(self, event: Event) -> None:
        """Count one engine event of a request that was submitted."""
        live = self._live.get(event["id"])
        if live is None:
            return
        kind = event["event"]
        if kind == "start":
            self._start(live, event)
        elif kind == "delta":
            self._delta(live, len(event["token_ids"]))
        elif kind == "step":
            self._step(event)
        elif kind in ("preempted", "resumed"):
            live.is_aside = kind == "preempted"
            self._counts[kind] += 1
        elif kind == "end":
            if live.started is None and event["result"]["finish_reason"] == "error":
                del self._live[event["id"]]  # refused: it never ran
            else:
                self._end(event["id"], _REASONS[event["result"]["finish_reason"]])

    def _start(self, live: _Live, event: Event) -> None:
        live.started = self._clock()
        live.num_prompt = len(event["prompt_token_ids"])
        self._queued.observe(live.started - live.submitted)
        self._counts["prompt"] += live.num_prompt
        self._counts["cached"] += event["cached_tokens"]

    def _delta(self, live: _Live, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = self._clock()
        if live.first is None:
            live.first = now
            self._to_first.observe(now - live.submitted)
        else:
            # A block comes at once; each of its tokens took its share of the step.
            self._between.observe((now - live.last) / num_tokens, num_tokens)
        live.last = now
        live.num_tokens += num_tokens
        self._counts["generated"] += num_tokens
        self._arrivals.append((now, num_tokens))
        _forget_old(self._arrivals, now)

    def _step(self, event: Event) -> None:
        proposed, verified, accepted = len(event["draft_ids"]), event["verify_len"], event["correct_drafts"]
        if not proposed:
            return
        if verified:
            self._counts["drafts"] += 1
            self._counts["verified"] += verified
            self._counts["accepted"] += accepted
            self._at_position.update(range(accepted))
        now = self._clock()
        self._steps.append(
            _Step(now, proposed, event["rows"], accepted, len(event["committed_ids"]), event["cap_trim"])
        )
        _forget_old(self._steps, now)

    def _end(self, request_id: str, reason: str) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._finished[reason] += 1
        self._latency.observe(self._clock() - live.submitted)
        if live.started is not None:
            self._prompt_lengths.observe(live.num_prompt)
            self._answer_lengths.observe(live.num_tokens)

    def text(self, model: str, block_size: int | None) -> str:
        """The page of ``/metrics``."""
        _forget_old(self._arrivals, self._clock())
        running = sum(live.started is not None and not live.is_aside for live in self._live.values())
        page = _Page(model)
        self._write_vllm(page, running, block_size)
        self._write_sglang(page, running, block_size)
        return page.text

    def _write_vllm(self, page: _Page, running: int, block_size: int | None) -> None:
        waiting, counts = len(self._live) - running, self._counts
        page.gauge("vllm:num_requests_running", "Requests that are being answered.", running)
        page.gauge("vllm:num_requests_waiting", "Requests that wait for a place.", waiting)
        page.counter("vllm:num_preemptions", "Times a request's cache gave way to others.", counts["preempted"])
        page.counter("vllm:prompt_tokens", "Prompt tokens read.", counts["prompt"])
        page.counter("vllm:generation_tokens", "Tokens delivered.", counts["generated"])
        page.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in kept prefixes.", counts["prompt"])
        page.counter("vllm:prefix_cache_hits", "Prompt tokens found in kept prefixes.", counts["cached"])
        page.counters(
            "vllm:request_success",
            "Requests that ended.",
            [({"finished_reason": reason}, count) for reason, count in self._finished.items()],
        )
        if block_size:
            page.counter("vllm:spec_decode_num_drafts", "Steps that verified drafts.", counts["drafts"])
            page.counter("vllm:spec_decode_num_draft_tokens", "Drafts handed to the model.", counts["verified"])
            page.counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", counts["accepted"])
            page.counters(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Drafts accepted, by position in the block.",
                [({"position": str(k)}, self._at_position[k]) for k in range(block_size)],
            )
        for name, help_text, histogram in self._histograms("vllm"):
            page.histogram(name, help_text, histogram)

    def _histograms(self, engine: str) -> Iterable[tuple[str, str, Histogram]]:
        yield f"{engine}:time_to_first_token_seconds", "From request to first token.", self._to_first
        yield f"{engine}:inter_token_latency_seconds", "Between two tokens; a block shares its step.", self._between
        yield f"{engine}:e2e_request_latency_seconds", "From request to end.", self._latency
        if engine == "vllm":
            yield "vllm:request_queue_time_seconds", "Waiting for a place.", self._queued
            yield "vllm:request_prompt_tokens", "Prompt tokens of a request.", self._prompt_lengths
            yield "vllm:request_generation_tokens", "Tokens of an answer.", self._answer_lengths

    def _write_sglang(self, page: _Page, running: int, block_size: int | None) -> None:
        counts, finished = self._counts, self._finished
        page.gauge("sglang:num_running_reqs", "Requests that are being answered.", running)
        page.gauge("sglang:num_queue_reqs", "Requests that wait for a place.", len(self._live) - running)
        page.gauge("sglang:gen_throughput", "Tokens a second over the last ten seconds.", self._throughput())
        page.counter("sglang:prompt_tokens", "Prompt tokens read.", counts["prompt"])
        page.counter("sglang:generation_tokens", "Tokens delivered.", counts["generated"])
        page.counter("sglang:cached_tokens", "Prompt tokens found in kept prefixes.", counts["cached"])
        page.counter("sglang:num_requests", "Requests that ended.", sum(finished.values()))
        page.counter("sglang:num_aborted_requests", "Requests that were cut off.", finished["abort"])
        if block_size:
            page.counter("sglang:spec_verify_calls", "Steps that verified drafts.", counts["drafts"])
            page.gauge("sglang:spec_num_steps", "Draft passes in a step.", 1)
            page.gauge("sglang:spec_num_draft_tokens", "Rows of a whole block, the anchor included.", block_size + 1)
            for name, help_text, value in self._recent():
                page.gauge(name, help_text, value)
        for name, help_text, histogram in self._histograms("sglang"):
            page.histogram(name, help_text, histogram)

    def _throughput(self) -> float:
        return sum(count for _, count in self._arrivals) / WINDOW_SECONDS

    def _recent(self) -> Iterable[tuple[str, str, float | None]]:
        """SGLang's gauges over the steps of the window; None where there was none."""
        steps = self._steps
        length, rate = _mean(step.committed for step in steps), None
        if steps:
            rate = sum(step.accepted for step in steps) / sum(step.proposed for step in steps)
        whole = _mean(step.committed + step.trimmed for step in steps if step.trimmed is not None)
        yield "sglang:spec_accept_length", "Tokens kept a step, the model's own included.", length
        yield "sglang:spec_accept_rate", "Drafts accepted of those proposed.", rate
        yield "sglang:spec_cap_length", "Rows verified a step, the anchor's included.", _mean(s.rows for s in steps)
        yield "sglang:spec_block_accept_length", "Tokens an untrimmed block would have kept.", whole


def _forget_old(entries: deque[Any], now: float) -> None:
    while entries and entries[0][0] < now - WINDOW_SECONDS:
        entries.popleft()


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


class _Page:
    """Prometheus' text format, version 0.0.4."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def gauge(self, name: str, help_text: str, value: float | None) -> None:
        self._head(name, "gauge", help_text)
        if value is not None:
            self._sample(name, {}, value)

    def counter(self, name: str, help_text: str, value: float) -> None:
        self.counters(name, help_text, [({}, value)])

    def counters(self, name: str, help_text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> None:
        self._head(f"{name}_total", "counter", help_text)
        for labels, value in values:
            self._sample(f"{name}_total", labels, value)

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        self._head(name, "histogram", help_text)
        reached = 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            reached += count
            self._sample(f"{name}_bucket", {"le": "+Inf" if bound is None else str(float(bound))}, reached)
        self._sample(f"{name}_sum", {}, histogram.total)
        self._sample(f"{name}_count", {}, reached)

    def _head(self, name: str, kind: str, help_text: str) -> None:
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        engine = {"engine": "0"} if name.startswith("vllm:") else {}
        text = ",".join(f'{key}="{_escaped(word)}"' for key, word in {**self._labels, **engine, **labels}.items())
        self._lines.append(f"{name}{{{text}}} {value}")


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
