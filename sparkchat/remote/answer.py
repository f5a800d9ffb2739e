"""One answer of another engine: its chunks become our events and, at the end, our result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparkchat.errors import SparkchatError
from sparkchat.params import GenerateRequest
from sparkchat.remote.figures import Figures, figures_of_chunk, joined
from sparkchat.remote.kinds import Kind

Event = dict[str, Any]
_THINKING = ("reasoning_content", "reasoning")
_MIN_WINDOW_NS = 100_000_000
"""Over less than this no speed is given: chunks that waited in a buffer come all at once."""


class RemoteAnswer:
    """Collects one answer. ``take`` returns the events of a chunk, ``end`` the last one."""

    def __init__(self, request: GenerateRequest, model: str, kind: Kind) -> None:
        self._request = request
        self._model = model
        self._kind = kind
        self._asked_ns = time.monotonic_ns()
        self._first_ns: int | None = None
        self._last_ns = self._asked_ns
        self._has_started = False
        self._texts = {"answer": "", "thinking": ""}
        self._token_ids: list[int] = []
        self._prompt_ids: list[int] | None = None
        self._usage: dict[str, int | None] = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"))
        self._tokens_at_first = 0
        self._rate: float | None = None
        """Tokens a second as the server gives it."""
        self._finish: tuple[str, Any] | None = None
        self._own: Figures | None = None
        self.counted: Figures | None = None
        """What the server's counters moved by."""

    @property
    def figures(self) -> Figures:
        return joined(self._own, self.counted)

    def take(self, chunk: Any) -> list[Event]:
        """Raises SparkchatError when the chunk is an error, or no chunk."""
        if not isinstance(chunk, dict):
            raise SparkchatError("the server sent an event that is no chunk of an answer; the answer ends here")
        if chunk.get("error") is not None:
            raise SparkchatError(f"the server broke off: {_message(chunk['error'])}")
        self._take_numbers(chunk)
        found: list[Event] = []
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        self._take_prompt(chunk, choice)
        if choice and not self._has_started:
            found.append(self.start())
        found += self._text_events(chunk, choice)
        if choice.get("finish_reason") is not None:
            stopped_at = choice.get("stop_reason", choice.get("matched_stop"))
            self._finish = (str(choice["finish_reason"]), stopped_at)
        if found:
            found.append(self.progress())
        return found

    def start(self) -> Event:
        self._has_started = True
        return {
            "event": "start",
            "id": self._request.id,
            "sampling": asdict(self._request.sampling),
            "mode": "server",
            "block_size": None,
            "prompt_token_ids": self._prompt_ids,
            "cached_tokens": self._usage["cached_tokens"],
            "t_ns": time.monotonic_ns(),
            "engine": self._kind.label,
        }

    def progress(self) -> Event:
        """The figures so far; None where nothing was reported."""
        figures = self.figures
        return {
            "event": "figures",
            "id": self._request.id,
            "source": figures.source,
            "num_tokens": self._usage["completion_tokens"],
            "num_steps": figures.num_steps,
            "num_proposed": figures.num_proposed,
            "num_verified": figures.num_verified,
            "num_accepted": figures.num_accepted,
            "mean_acceptance_length": figures.mean_acceptance_length,
            "tokens_per_second": self._tokens_per_second(),
        }

    def end(
        self, reason_off: str | None, *, cancelled: bool = False, error: SparkchatError | None = None
    ) -> list[Event]:
        """The last events: of an answer that ended, was stopped here, or broke off."""
        reason, stop = self._reason(cancelled, error)
        message = None if error is None else error.message
        if reason == "error" and message is None:
            message = "the server closed the connection before the answer had ended"
        last = [] if self._has_started else [self.start()]
        result = {
            "schema": "sparkchat.result/1",
            "model": self._model,
            "drafter": None,
            "mode": "server",
            "text": self._texts["answer"],
            # Null where the server does not tell them.
            "prompt_token_ids": self._prompt_ids,
            "token_ids": self._token_ids or (None if self._usage["completion_tokens"] != 0 else []),
            "finish_reason": reason,
            "stop": stop,
            "error": message,
            "usage": dict(self._usage),
            "speculation": self.figures.speculation(reason_off),
            "timing": self._timing(),
        }
        event: Event = {"event": "end", "id": self._request.id, "result": result, "thinking": self._texts["thinking"]}
        if error is not None:
            event["error"] = "UsageError" if error.exit_code == 2 else type(error).__name__
        return [*last, self.progress(), event]

    def _reason(self, cancelled: bool, error: SparkchatError | None) -> tuple[str, Any]:
        if error is not None:
            return "error", None
        if cancelled:
            return "cancelled", None
        if self._finish is None or self._finish[0] in ("abort", "error"):
            return "error", None
        word, stop = self._finish
        if word == "length":
            return "length", None
        return ("stop_string", stop) if isinstance(stop, str) else ("stop", stop if isinstance(stop, int) else None)

    def _text_events(self, chunk: Mapping[str, Any], choice: Mapping[str, Any]) -> list[Event]:
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else {}
        thinking = next((delta[name] for name in _THINKING if isinstance(delta.get(name), str)), "")
        said = choice.get("text", delta.get("content"))
        ids = _ids(choice.get("token_ids"))
        if not ids:
            ids = _late_ids(chunk, self._token_ids)
        pieces = [("thinking", thinking), ("answer", said if isinstance(said, str) else "")]
        pieces = [(channel, text) for channel, text in pieces if text]
        if ids and not pieces:
            pieces = [("answer", "")]
        if pieces:
            self._last_ns = time.monotonic_ns()
        if pieces and self._first_ns is None:
            self._first_ns = self._last_ns
            self._tokens_at_first = self._usage["completion_tokens"] or 0
        found = []
        for number, (channel, text) in enumerate(pieces):
            here = ids if number == len(pieces) - 1 else []
            self._texts[channel] += text
            self._token_ids += here
            found.append(
                {
                    "event": "delta",
                    "id": self._request.id,
                    "text": text,
                    "token_ids": here,
                    "channel": channel,
                    "origins": [],
                }
            )
        return found

    def _take_prompt(self, chunk: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        ids = _ids(chunk.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        if ids and self._prompt_ids is None:
            self._prompt_ids = ids

    def _take_numbers(self, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            for name, value in (*usage.items(), ("cached_tokens", cached)):
                if name in self._usage and type(value) is int and value >= 0:
                    self._usage[name] = value
        timings = chunk.get("timings")
        if isinstance(timings, dict):
            if type(timings.get("predicted_n")) is int:
                self._usage["completion_tokens"] = timings["predicted_n"]
            rate = timings.get("predicted_per_second")
            self._rate = float(rate) if isinstance(rate, (int, float)) and 0 < rate < 1e7 else self._rate
        self._own = figures_of_chunk(chunk) or self._own

    def _tokens_per_second(self) -> float | None:
        if self._rate is not None:
            return self._rate
        tokens, first = self._usage["completion_tokens"], self._first_ns
        if tokens is None or first is None or not self._tokens_at_first or self._last_ns - first < _MIN_WINDOW_NS:
            return None
        return (tokens - self._tokens_at_first) * 1e9 / (self._last_ns - first) or None

    def _timing(self) -> dict[str, float | None]:
        first = self._first_ns
        return {
            "load_ms": None,
            "ttft_ms": None if first is None else (first - self._asked_ns) / 1e6,
            "decode_ms": None if first is None else (self._last_ns - first) / 1e6,
            "tokens_per_second": self._tokens_per_second(),
        }


def _ids(value: Any) -> list[int]:
    good = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return list(value) if good else []


def _late_ids(chunk: Mapping[str, Any], known: list[int]) -> list[int]:
    """SGLang gives all ids of a chat at the end."""
    extra = chunk.get("sglext")
    listed = extra.get("output_ids") if isinstance(extra, dict) else None
    return _ids(listed[0]) if isinstance(listed, list) and listed and not known else []


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
