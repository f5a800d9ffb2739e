"""The result object of an answer that the engine did not get to close: counted from the events that arrived."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


class PartialAnswer:
    """Collects the events of one request."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info
        self._start: Event = {}
        self._texts: dict[str, list[str]] = {"answer": [], "thinking": []}
        self._token_ids: list[int] = []
        self._steps: list[Event] = []

    @property
    def thinking(self) -> str:
        return "".join(self._texts["thinking"])

    def add(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self._start = event
        elif kind == "delta":
            self._texts.setdefault(event.get("channel", "answer"), []).append(event.get("text", ""))
            self._token_ids += event.get("token_ids") or []
        elif kind == "step":
            self._steps.append(event)

    def result(self, finish_reason: str, error: str | None = None) -> dict[str, Any]:
        """``sparkchat.result/1``; what was not measured is null."""
        prompt_ids = list(self._start.get("prompt_token_ids") or [])
        return {
            "schema": "sparkchat.result/1",
            "model": self._info.get("model", ""),
            "drafter": self._info.get("drafter"),
            "mode": self._start.get("mode") or self._info.get("mode", "off"),
            "text": "".join(self._texts["answer"]),
            "prompt_token_ids": prompt_ids,
            "token_ids": list(self._token_ids),
            "finish_reason": finish_reason,
            "stop": None,
            "error": error,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(self._token_ids),
                "cached_tokens": self._start.get("cached_tokens") or 0,
            },
            "speculation": self._speculation(),
            "timing": {
                "load_ms": self._info.get("load_ms"),
                "ttft_ms": None,
                "decode_ms": None,
                "tokens_per_second": self._steps[-1].get("tokens_per_second") if self._steps else None,
            },
        }

    def _speculation(self) -> dict[str, Any]:
        size = self._start.get("block_size") or self._info.get("block_size") or 0
        proposed = [len(step.get("draft_ids") or ()) for step in self._steps]
        verified = [step.get("verify_len") or 0 for step in self._steps]
        accepted = [step.get("correct_drafts") or 0 for step in self._steps]
        committed = sum(len(step.get("committed_ids") or ()) for step in self._steps)
        return {
            "num_steps": len(self._steps),
            "num_proposed_draft_tokens": sum(proposed),
            "num_verified_draft_tokens": sum(verified),
            "num_accepted_draft_tokens": sum(accepted),
            "mean_acceptance_length": committed / len(self._steps) if self._steps else None,
            "acceptance_histogram": [accepted.count(n) for n in range(size + 1)],
            "proposed_at_pos": [sum(n > k for n in proposed) for k in range(size)],
            "verified_at_pos": [sum(n > k for n in verified) for k in range(size)],
            "accepted_at_pos": [sum(n > k for n in accepted) for k in range(size)],
            "verify_len_histogram": [verified.count(n) for n in range(size + 1)],
            "reason_off": self._info.get("reason_off"),
        }
