"""What a server says about speculation: in an answer's own chunks, and in the counters of ``/metrics``.

Every engine counts in its own words; here they become ours. What nobody reports stays None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkchat.finite import is_number
from sparkchat.remote.kinds import Kind

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")


@dataclass(frozen=True)
class Figures:
    """Drafts and steps of one answer, as far as they are known."""

    num_steps: int | None = None
    num_proposed: int | None = None
    num_verified: int | None = None
    num_accepted: int | None = None
    mean_acceptance_length: float | None = None
    histogram: tuple[int, ...] | None = None
    source: str | None = None
    """Where they come from, in words; None when there are none."""

    @property
    def is_known(self) -> bool:
        return self.source is not None

    def speculation(self, reason_off: str | None) -> dict[str, Any]:
        """The ``speculation`` object of a result; null is "not reported"."""
        lists = ("proposed_at_pos", "verified_at_pos", "accepted_at_pos", "verify_len_histogram")
        return {
            "num_steps": self.num_steps,
            "num_proposed_draft_tokens": self.num_proposed,
            "num_verified_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": None if self.histogram is None else list(self.histogram),
            **dict.fromkeys(lists),
            "reason_off": None if self.is_known else reason_off,
        }


def figures_of_chunk(chunk: Mapping[str, Any]) -> Figures | None:
    """What one chunk of an answer says about the whole of it; None when it says nothing."""
    vllm = _object(_object(chunk.get("metrics")).get("speculative_decoding"))
    if vllm:
        return _of_vllm(vllm)
    details = _object(chunk.get("sglext")).get("spec_tokens_details")
    sglang = _object(details[0] if isinstance(details, list) and details else details)
    if sglang:
        return _of_sglang(sglang)
    timings = _object(chunk.get("timings"))
    if _count(timings.get("draft_n")):
        return Figures(
            num_verified=_count(timings.get("draft_n")),
            num_accepted=_count(timings.get("draft_n_accepted")),
            source="the answer's timings",
        )
    return None


def _of_vllm(given: Mapping[str, Any]) -> Figures:
    """vLLM counts drafts handed to the model; its mean is 1 + accepted / steps."""
    return Figures(
        num_steps=_count(given.get("num_spec_steps")),
        num_verified=_count(given.get("num_draft_tokens")),
        num_accepted=_count(given.get("num_accepted_draft_tokens")),
        mean_acceptance_length=_number(given.get("mean_acceptance_length")),
        histogram=_counts(given.get("acceptance_histogram")),
        source="the answer's own record",
    )


def _of_sglang(given: Mapping[str, Any]) -> Figures:
    """SGLang counts drafts proposed; its length is completion tokens over verify steps."""
    return Figures(
        num_steps=_count(given.get("spec_verify_ct")),
        num_proposed=_count(given.get("spec_num_proposed_drafts")),
        num_accepted=_count(given.get("spec_num_correct_drafts")),
        mean_acceptance_length=_number(given.get("spec_accept_length")),
        histogram=_counts(given.get("spec_correct_drafts_histogram")),
        source="the answer's own record",
    )


def read_samples(page: str, prefix: str) -> dict[str, float]:
    """Samples of a Prometheus page whose names begin with ``prefix``, summed over their labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match[1].startswith(prefix):
            try:
                value = float(match[2])
            except ValueError:
                continue
            if value == value and abs(value) != float("inf"):
                found[match[1]] = found.get(match[1], 0.0) + value
    return found


def has_counters(samples: Mapping[str, float], kind: Kind) -> bool:
    """Whether the server counts speculation at all; vLLM exports these only when it speculates."""
    return kind.counters is not None and f"{kind.counters}num_drafts_total" in samples


def figures_between(before: Mapping[str, float], after: Mapping[str, float], kind: Kind) -> Figures | None:
    """What the counters moved by while an answer ran; other clients' answers are in it."""
    if kind.gauges is not None:
        length = after.get(f"{kind.gauges}accept_length")
        return Figures(mean_acceptance_length=length, source="the server's gauges") if length else None
    if not has_counters(before, kind) or not has_counters(after, kind):
        return None

    def moved(name: str) -> int:
        key = f"{kind.counters}{name}_total"
        return round(after.get(key, 0.0) - before.get(key, 0.0))

    steps, accepted = moved("num_drafts"), moved("num_accepted_tokens")
    if steps < 0 or accepted < 0:
        return None  # it was started again in between
    return Figures(
        num_steps=steps,
        num_verified=moved("num_draft_tokens"),
        num_accepted=accepted,
        mean_acceptance_length=1 + accepted / steps if steps else None,
        source="the server's counters",
    )


def joined(best: Figures | None, other: Figures | None) -> Figures:
    """The better source, with what it lacks from the other."""
    if best is None or other is None:
        return best or other or Figures()
    missing = {
        name: getattr(other, name)
        for name in ("num_steps", "num_verified", "mean_acceptance_length")
        if getattr(best, name) is None
    }
    return replace(best, **missing)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    is_count = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53
    return int(value) if is_count else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _counts(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 4096:
        return None
    found = [_count(item) for item in value]
    return None if any(item is None for item in found) else tuple(item for item in found if item is not None)
