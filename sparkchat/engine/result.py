"""The ``sparkchat.result/1`` object: what one answer cost and what it says."""

from __future__ import annotations

from typing import Any

from sparkchat.engine.request import RequestState
from sparkchat.engine.statistics import SpeculationStatistics

SCHEMA = "sparkchat.result/1"


def finished_result(
    state: RequestState, *, model: str, drafter: str | None, load_ms: float, mode: str, reason_off: str | None
) -> dict[str, Any]:
    """The result of an admitted request, also when it ended in an error or was cancelled."""
    first, last = state.first_token_ns, state.last_token_ns
    decode_ms = None if first is None or last is None else (last - first) / 1e6
    return {
        "schema": SCHEMA,
        "model": model,
        "drafter": drafter,
        "mode": mode,
        "text": state.output.text,
        "prompt_token_ids": list(state.prompt_ids),
        "token_ids": list(state.delivered),
        "finish_reason": state.finish_reason,
        "stop": state.stop_value,
        "error": state.error,
        "usage": {
            "prompt_tokens": len(state.prompt_ids),
            "completion_tokens": len(state.delivered),
            "cached_tokens": state.cached_tokens,
        },
        "speculation": state.statistics.to_json(state.block_size, reason_off),
        "timing": {
            "load_ms": load_ms,
            "ttft_ms": None if first is None else (first - state.submitted_ns) / 1e6,
            "decode_ms": decode_ms,
            "tokens_per_second": state.tokens_per_second,
        },
    }


def refused_result(
    *, model: str, drafter: str | None, mode: str, error: str, load_ms: float, block_size: int
) -> dict[str, Any]:
    """The result of a request that could not start."""
    return {
        "schema": SCHEMA,
        "model": model,
        "drafter": drafter,
        "mode": mode,
        "text": "",
        "prompt_token_ids": [],
        "token_ids": [],
        "finish_reason": "error",
        "stop": None,
        "error": error,
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
        "speculation": SpeculationStatistics().to_json(block_size, None),
        "timing": {"load_ms": load_ms, "ttft_ms": None, "decode_ms": None, "tokens_per_second": None},
    }
