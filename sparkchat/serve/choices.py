"""What has come of each choice of a request so far, collected from the engine's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkchat.serve.fields import field_of
from sparkchat.serve.problems import Problem, unavailable

Event = dict[str, Any]
Result = dict[str, Any]


@dataclass
class Choice:
    """One answer on its way."""

    index: int
    prompt_ids: list[int] | None = None
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=lambda: {"answer": "", "thinking": ""})
    said: str = ""
    """Both channels, in the order they came."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities, where they were asked for."""
    num_thinking: int = 0
    result: Result | None = None

    @property
    def has_started(self) -> bool:
        return self.prompt_ids is not None

    def take(self, event: Event) -> None:
        """Add one event. Raises Problem when it says that there will be no whole answer."""
        kind = event["event"]
        if kind == "start":
            self.prompt_ids, self.cached_tokens = event["prompt_token_ids"], event["cached_tokens"]
        elif kind == "delta":
            self.token_ids += event["token_ids"]
            self.texts[event["channel"]] += event["text"]
            self.said += event["text"]
            self.records += event.get("logprobs") or ()
            self.num_thinking += len(event["token_ids"]) if event["channel"] == "thinking" else 0
        elif kind == "lost":
            raise unavailable(event["message"])
        elif kind == "end":
            self.result = event["result"]
            if self.result["finish_reason"] in ("error", "cancelled"):
                raise _problem(event)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word."""
        assert self.result is not None
        return "length" if self.result["finish_reason"] == "length" else "stop"


def _problem(event: Event) -> Problem:
    result = event["result"]
    if result["finish_reason"] == "cancelled":
        return unavailable("the answer was stopped by the server")
    message = result["error"] or "the engine could not answer"
    if event.get("error") == "UsageError":
        code = "context_length_exceeded" if "the context holds" in message else "invalid_value"
        return Problem(400, message, param=field_of(message), code=code)
    return Problem(500, message, code="engine_error")
