"""What an answer cost, in OpenAI's words, and what speculation did in it, in vLLM's.

vLLM's fields count drafts handed to the model, in steps that were handed any (``num_spec_steps``); the acceptance
length is 1 + accepted / steps. Nothing measured is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

Result = dict[str, Any]


def usage(results: Sequence[Result], num_thinking: int, num_per_prompt: int) -> dict[str, Any]:
    """The ``usage`` object of a response: every choice's tokens, every prompt once."""
    prompts = [result["usage"] for result in results[::num_per_prompt]]
    return counts(
        sum(each["prompt_tokens"] for each in prompts),
        sum(result["usage"]["completion_tokens"] for result in results),
        sum(each["cached_tokens"] for each in prompts),
        num_thinking,
    ) | {"speculative_decoding": speculation(results)}


def counts(num_prompt: int, num_answer: int, num_cached: int, num_thinking: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_thinking},
    }


def speculation(results: Sequence[Result]) -> dict[str, Any] | None:
    """``speculative_decoding`` over all choices; None when no drafter is loaded."""
    if results[0]["drafter"] is None:
        return None
    figures = [result["speculation"] for result in results]
    plain = sum(each["verify_len_histogram"][0] for each in figures if each["verify_len_histogram"])
    histogram = [sum(column) for column in zip_longest(*(e["acceptance_histogram"] for e in figures), fillvalue=0)]
    if histogram:
        histogram[0] -= plain  # plain steps test no draft
    steps = sum(each["num_steps"] for each in figures) - plain
    drafts = sum(each["num_verified_draft_tokens"] for each in figures)
    accepted = sum(each["num_accepted_draft_tokens"] for each in figures)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafts if drafts else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts,
        "num_spec_tokens": max(0, len(histogram) - 1),
    }


def metrics(results: Sequence[Result]) -> dict[str, Any]:
    """The ``metrics`` object: vLLM's timings, for a single choice, and the speculation of all."""
    found: dict[str, Any] = {"speculative_decoding": speculation(results)}
    if len(results) > 1:
        return found
    timing, num_tokens = results[0]["timing"], results[0]["usage"]["completion_tokens"]
    decode = timing["decode_ms"]
    return {
        "time_to_first_token_ms": timing["ttft_ms"],
        "generation_time_ms": decode,
        "mean_itl_ms": decode / (num_tokens - 1) if decode is not None and num_tokens > 1 else None,
        "tokens_per_second": timing["tokens_per_second"],
        **found,
    }
