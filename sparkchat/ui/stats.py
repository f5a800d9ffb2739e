"""Running numbers of one answer, from the engine's step events; null stays null, and time is the engine's own.

acceptance length = committed tokens per step, the bonus token included (so 1.0 means that no draft was accepted).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from sparkchat.ui.running_calibration import CalibrationNumbers, RunningCalibration

STRIP_STEPS = 120
_WINDOW_NS = 1_000_000_000
_MIN_WINDOW_NS = 100_000_000
_COUNTED = (
    *("steps", "proposed", "verified", "accepted", "committed", "tokens"),
    *("rows_reclaimed", "bytes_reclaimed"),
)


@dataclass(frozen=True)
class StepMark:
    """One column of the strip."""

    verify_len: int
    accepted: int
    mode: str
    num_drafts: int = 0

    @property
    def is_whole(self) -> bool:
        """A block was drafted for compact, and all of it was verified."""
        return self.mode == "compact" and 0 < self.num_drafts == self.verify_len


@dataclass(frozen=True)
class Snapshot:
    """What the panel and the status bar draw."""

    num_steps: int = 0
    num_tokens: int = 0
    """Delivered tokens, the one from the prompt pass included."""
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    tokens_per_second_now: float | None = None
    """Over the last second of the engine's time."""
    tokens_per_second: float | None = None
    """Over the whole answer."""
    step: dict[str, Any] | None = None
    """The newest step."""
    bonus_text: str | None = None
    """What the target itself added in the newest step."""
    strip: tuple[StepMark, ...] = ()
    mean_step_ms: float | None = None
    mean_predicted_ms: float | None = None
    idle_share: float | None = None
    """Of the last second: the part in which no step ran; where steps have ``gpu_ms``, in which the GPU was idle."""
    rows_reclaimed: int = 0
    """Rows of the answer so far that compact spared."""
    bytes_reclaimed: int = 0
    calibration: CalibrationNumbers | None = None
    reported: dict[str, Any] | None = None
    """What an engine without step records says about the answer so far (``figures`` events)."""

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.num_committed / self.num_steps if self.num_steps else None

    @property
    def mode(self) -> str | None:
        return self.step.get("mode") if self.step else None


class AnswerStats:
    """Counts the steps of one request."""

    def __init__(self) -> None:
        self._strip: deque[StepMark] = deque(maxlen=STRIP_STEPS)
        self._recent: deque[tuple[int, int, float | None]] = deque()
        """(time in ns, tokens, milliseconds that the step was at work)"""
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._step: dict[str, Any] | None = None
        self._step_ms = _Mean()
        self._predicted_ms = _Mean()
        self._reported: float | None = None
        self._calibration = RunningCalibration()
        self._figures: dict[str, Any] | None = None

    def add_figures(self, figures: dict[str, Any]) -> None:
        self._figures = figures
        self._counts["tokens"] = max(self._counts["tokens"], figures.get("num_tokens") or 0)

    def add_tokens(self, count: int) -> None:
        self._counts["tokens"] += count

    def add_step(self, step: dict[str, Any]) -> None:
        counts = self._counts
        committed = len(step.get("committed_ids") or ())
        accepted = int(step.get("correct_drafts") or 0)
        verify_len = int(step.get("verify_len") or 0)
        counts["steps"] += 1
        counts["proposed"] += len(step.get("draft_ids") or ())
        counts["verified"] += verify_len
        counts["accepted"] += accepted
        counts["committed"] += committed
        num_drafts = len(step.get("draft_ids") or ())
        self._strip.append(StepMark(verify_len, accepted, str(step.get("mode") or ""), num_drafts))
        self._step = step
        self._step_ms.add(step.get("step_ms"))
        self._predicted_ms.add(step.get("predicted_step_ms"))
        self._reported = step.get("tokens_per_second")
        counts["rows_reclaimed"] += int(step.get("rows_reclaimed") or 0)
        counts["bytes_reclaimed"] += int(step.get("bytes_reclaimed") or 0)
        self._calibration.add(step)
        busy = step.get("gpu_ms")
        self._clock(step.get("t_ns"), committed, step.get("step_ms") if busy is None else busy)

    def _clock(self, t_ns: int | None, committed: int, busy_ms: float | None) -> None:
        if t_ns is None:
            return
        if self._first_ns is None:
            self._first_ns = t_ns
        self._last_ns = t_ns
        self._recent.append((t_ns, committed, busy_ms))
        while len(self._recent) > 2 and self._recent[0][0] < t_ns - _WINDOW_NS:
            self._recent.popleft()

    def _rate_now(self) -> float | None:
        if len(self._recent) < 2:
            return None
        elapsed = self._recent[-1][0] - self._recent[0][0]
        # The first entry only marks where the window begins: its tokens came before it.
        tokens = sum(count for _, count, _ in self._recent) - self._recent[0][1]
        return tokens * 1e9 / elapsed if elapsed >= _MIN_WINDOW_NS else None

    def _idle_share(self) -> float | None:
        """What the steps of the window leave over of the time between their ends."""
        steps = list(self._recent)[1:]
        busy = [ms for _, _, ms in steps if ms is not None]
        elapsed = self._recent[-1][0] - self._recent[0][0] if steps else 0
        if elapsed < _MIN_WINDOW_NS or len(busy) != len(steps):
            return None
        return min(max(1.0 - sum(busy) * 1e6 / elapsed, 0.0), 1.0)

    def _rate_average(self) -> float | None:
        if self._reported is not None:
            return self._reported
        if self._first_ns is None or self._last_ns is None or self._last_ns <= self._first_ns:
            return None
        return self._counts["committed"] * 1e9 / (self._last_ns - self._first_ns)

    def snapshot(self, bonus_text: str | None = None) -> Snapshot:
        counts = self._counts
        return Snapshot(
            num_steps=counts["steps"],
            num_tokens=counts["tokens"],
            num_proposed=counts["proposed"],
            num_verified=counts["verified"],
            num_accepted=counts["accepted"],
            num_committed=counts["committed"],
            tokens_per_second_now=self._rate_now(),
            tokens_per_second=self._rate_average(),
            step=self._step,
            bonus_text=bonus_text,
            strip=tuple(self._strip),
            mean_step_ms=self._step_ms.value,
            mean_predicted_ms=self._predicted_ms.value,
            idle_share=self._idle_share(),
            rows_reclaimed=counts["rows_reclaimed"],
            bytes_reclaimed=counts["bytes_reclaimed"],
            calibration=self._calibration.numbers,
            reported=self._figures,
        )


class _Mean:
    """Mean of the values that were measured."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._sum += value
            self._count += 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


def number(value: float | None, digits: int = 1, unknown: str = "-") -> str:
    """A measured number, or a dash when nothing was measured."""
    return unknown if value is None else f"{value:.{digits}f}"


def result_line(result: dict[str, Any], separator: str = "·") -> str:
    """One line about a finished answer: tokens, speed, acceptance, mode, why it ended."""
    speculation = result.get("speculation") or {}
    timing = result.get("timing") or {}
    tokens = (result.get("usage") or {}).get("completion_tokens")
    parts = [f"{tokens if tokens is not None else '-'} tokens", f"{number(timing.get('tokens_per_second'))} tok/s"]
    # Of an answer whose mode changed on the way, one part has drafts all the same.
    if speculation.get("reason_off") and not speculation.get("num_verified_draft_tokens"):
        parts.append(f"no speculation: {speculation['reason_off']}")
    else:
        parts.append(f"acceptance length {number(speculation.get('mean_acceptance_length'), 2)}")
    parts.append(str(result.get("mode") or "-"))
    parts.append(finish_text(result))
    return f" {separator} ".join(" ".join(part.split()) for part in parts)


def finish_text(result: dict[str, Any]) -> str:
    """Why an answer ended, in words."""
    reason = result.get("finish_reason")
    words = {
        "stop": "complete",
        "length": "cut at the token limit",
        "stop_string": f"stopped at {result.get('stop')!r}",
        "cancelled": "stopped",
        "error": f"error: {result.get('error') or 'unknown'}",
    }
    return words.get(str(reason), str(reason))
