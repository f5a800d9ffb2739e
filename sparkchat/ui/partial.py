"""The result object of an answer that the engine did not get to close: counted from the events that arrived."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

Event = dict[str, Any]


class PartialAnswer:
    """Collects the events of one request; of steps only counts are kept, however many there are."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info
        self._start: Event = {}
        self._texts: dict[str, list[str]] = {"answer": [], "thinking": []}
        self._token_ids = array("q")
        self._proposed: Counter[int] = Counter()
        self._verified: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        """Number of drafts -> steps that proposed, verified, accepted so many."""
        self._num_committed = 0
        self._rate: float | None = None

    @property
    def thinking(self) -> str:
        return "".join(self._texts["thinking"])

    def add(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self._start = event
        elif kind == "delta":
            self._texts.setdefault(event.get("channel", "answer"), []).append(event.get("text", ""))
            self._token_ids.extend(event.get("token_ids") or ())
        elif kind == "step":
            self._proposed[len(event.get("draft_ids") or ())] += 1
            self._verified[event.get("verify_len") or 0] += 1
            self._accepted[event.get("correct_drafts") or 0] += 1
            self._num_committed += len(event.get("committed_ids") or ())
            self._rate = event.get("tokens_per_second")

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
                "tokens_per_second": self._rate,
            },
        }

    def _speculation(self) -> dict[str, Any]:
        size = self._start.get("block_size") or self._info.get("block_size") or 0
        num_steps = self._accepted.total()
        return {
            "num_steps": num_steps,
            "num_proposed_draft_tokens": _sum(self._proposed),
            "num_verified_draft_tokens": _sum(self._verified),
            "num_accepted_draft_tokens": _sum(self._accepted),
            "mean_acceptance_length": self._num_committed / num_steps if num_steps else None,
            "acceptance_histogram": [self._accepted[n] for n in range(size + 1)],
            "proposed_at_pos": _by_position(self._proposed, size),
            "verified_at_pos": _by_position(self._verified, size),
            "accepted_at_pos": _by_position(self._accepted, size),
            "verify_len_histogram": [self._verified[n] for n in range(size + 1)],
            "reason_off": self._info.get("reason_off"),
        }


def _sum(counts: Counter[int]) -> int:
    return sum(n * steps for n, steps in counts.items())


def _by_position(counts: Counter[int], size: int) -> list[int]:
    return [sum(steps for n, steps in counts.items() if n > place) for place in range(size)]
