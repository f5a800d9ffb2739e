"""Chrome trace events: a JSON file that ui.perfetto.dev and chrome://tracing open.

A process is a session (one engine), a thread a lane of answers: answers that ran side by side lie in different lanes.
An answer is a slice; in it lie the prompt, the steps, and in each step its phases. Counters follow verify length,
accepted drafts, confidence and speed; instants mark rejections, changes of mode and of settings, and errors. Times are
microseconds from the first line, to the nanosecond. Within a thread and within a counter they never go back, and what
lies in a slice ends within it to the nanosecond: readers of the format repair neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkchat.strict_json import dumps
from sparkchat.trace.counts import accepted_drafts
from sparkchat.trace.open_answers import OpenAnswers
from sparkchat.trace.reader import Damage, TraceLine, read_lines

Event = dict[str, Any]
PHASES = ("draft", "plan", "verify", "accept")


def write_perfetto(trace: Path, write: Callable[[str], object], damage: Damage) -> list[str]:
    timeline = _Timeline()
    separator = '{"traceEvents":[\n'
    for event in timeline.all(read_lines(trace, damage)):
        write(separator + dumps(event))
        separator = ",\n"
    header = {name: timeline.header.get(name) for name in ("model", "drafter", "device", "versions", "created")}
    write(f'\n],"displayTimeUnit":"ms","otherData":{dumps({"source": trace.name, **header})}}}\n')
    return []


@dataclass
class _Lane:
    """Where an answer is drawn."""

    tid: int = 0
    number: int = -1
    """Of the answer; -1 before its first line."""
    end_us: float = 0.0
    """Where the newest slice of the answer ends."""
    start_us: float = 0.0
    has_steps: bool = False
    is_over: bool = False


class _Timeline:
    def __init__(self) -> None:
        self.header: Mapping[str, Any] = {}
        self._pid = 0
        self._answers: OpenAnswers[_Lane] = OpenAnswers(_Lane)
        self._lanes: dict[int, _Lane] = {}
        """The answers of the present session, by lane."""
        self._lane_ends: dict[int, float] = {}
        """Where each lane of the present session is free from."""
        self._newest_mark = 0.0
        self._first_ns: int | None = None
        self._last_us = 0.0

    def all(self, lines: Iterable[TraceLine]) -> Iterator[Event]:
        """The events of a whole file. The first one names the process, also where no header does."""
        for number, line in enumerate(lines):
            if number == 0 and line.type != "header":
                yield from self._header({})
            yield from self._events(line)
        yield from self._close_all()

    def _events(self, line: TraceLine) -> Iterator[Event]:
        if line.type == "header":
            yield from self._header(line.data)
        elif line.type in ("turn", "step", "end"):
            lane = self._answers.of(line)
            if lane is not None and not lane.is_over:
                yield from self._open(lane, line)
                if line.type == "step":
                    yield from self._step(lane, line)
                elif line.type == "end":
                    yield from self._end(lane, line)
        elif line.type == "mode_change":
            name = f"mode {line.data.get('from')} to {line.data['to']}"
            yield self._mark(name, self._us(line.data), {"turn": line.data.get("turn")})
        elif line.type == "setting_change":
            names = ", ".join(map(str, line.data["changes"])) if isinstance(line.data.get("changes"), dict) else "?"
            args = {"turn": line.data.get("turn"), "changes": line.data.get("changes")}
            yield self._mark(f"setting {names}", self._us(line.data), args)
        elif line.type == "error":
            yield self._mark("error", self._last_us, {"message": line.data["message"]})

    def _header(self, header: Mapping[str, Any]) -> Iterator[Event]:
        # A new engine knows nothing of the old one's answers.
        yield from self._close_all()
        self.header = self.header or header
        self._pid += 1
        self._lane_ends.clear()
        self._newest_mark = 0.0
        name = f"{header.get('model') or 'unknown model'} + {header.get('drafter') or 'no drafter'}"
        yield self._metadata("process_name", 0, f"sparkchat: {name} on {header.get('device') or 'unknown device'}")

    def _open(self, lane: _Lane, line: TraceLine) -> Iterator[Event]:
        """Give a new answer the first free lane, and begin its slice."""
        if lane.number >= 0:
            return
        lane.tid = next(tid for tid in range(1, len(self._lanes) + 2) if tid not in self._lanes)
        self._lanes[lane.tid] = lane
        lane.number = line.data["turn"]
        lane.start_us = lane.end_us = max(self._start_us(line), self._lane_ends.get(lane.tid, 0.0))
        if lane.tid not in self._lane_ends:
            yield self._metadata("thread_name", lane.tid, f"answers {lane.tid}")
        names = ("mode", "sampling", "block_size", "num_prompt_tokens", "cached_tokens", "id")
        args = {name: line.data[name] for name in names if line.type == "turn" and name in line.data}
        yield {**self._at("B", lane.tid, lane.start_us), "name": f"answer {lane.number}", "cat": "answer", "args": args}

    def _step(self, lane: _Lane, line: TraceLine) -> Iterator[Event]:
        step = line.data
        begin, end = self._start_us(line), self._us(step)
        # Times of different clocks may overlap by rounding, and slices of a lane must not.
        begin = max(begin, lane.end_us)
        end = max(end, begin)
        if not lane.has_steps:
            lane.has_steps = True
            if begin > lane.start_us:
                yield self._slice("prompt", lane.tid, lane.start_us, begin, {})
        accepted = accepted_drafts(step)
        name = f"step {step['i']}: {accepted} of {step['verify_len']} accepted"
        yield self._slice(name, lane.tid, begin, end, _step_args(step))
        at = begin
        for phase in PHASES:
            length = step.get(f"{phase}_ms")
            if length is not None and length > 0 and at < end:
                until = min(at + length * 1e3, end)
                yield self._slice(phase, lane.tid, at, until, {})
                at = until
        lane.end_us = end
        yield from self._counters(lane, step, end, accepted)
        reject = step.get("reject")
        if reject is not None:
            position = reject.get("pos")
            where = f"rejected at {position + 1}" if position is not None else "rejected"
            yield self._instant(where, "t", lane.tid, end, reject)

    def _counters(self, lane: _Lane, step: Mapping[str, Any], at: float, accepted: int) -> Iterator[Event]:
        confidence = [value for value in step.get("confidence") or () if value is not None]
        values = {
            "verify length": step["verify_len"],
            "accepted drafts": accepted,
            "mean confidence": sum(confidence) / len(confidence) if confidence else None,
            "tokens/s": step.get("tokens_per_second"),
        }
        lane_name = "" if lane.tid == 1 else f" ({lane.tid})"
        for name, value in values.items():
            if value is not None:
                yield {**self._at("C", 0, at), "name": name + lane_name, "args": {"value": value}}

    def _end(self, lane: _Lane, line: TraceLine) -> Iterator[Event]:
        yield {**self._close(lane), "args": {"finish_reason": line.data["finish_reason"]}}
        self._answers.close(line)

    def _close(self, lane: _Lane) -> Event:
        lane.is_over = True
        self._lane_ends[lane.tid] = lane.end_us
        del self._lanes[lane.tid]
        return {**self._at("E", lane.tid, lane.end_us), "name": f"answer {lane.number}", "cat": "answer"}

    def _close_all(self) -> Iterator[Event]:
        for lane in list(self._lanes.values()):
            yield self._close(lane)

    # Events

    def _at(self, phase: str, tid: int, us: float) -> Event:
        return {"ph": phase, "pid": self._pid, "tid": tid, "ts": round(us, 3)}

    def _slice(self, name: str, tid: int, begin: float, end: float, args: Mapping[str, Any]) -> Event:
        begin, end = round(begin, 3), round(end, 3)
        return {**self._at("X", tid, begin), "dur": round(end - begin, 3), "name": name, "cat": "step", "args": args}

    def _instant(self, name: str, scope: str, tid: int, us: float, args: Mapping[str, Any]) -> Event:
        return {**self._at("i", tid, us), "s": scope, "name": name, "cat": "mark", "args": args}

    def _mark(self, name: str, us: float, args: Mapping[str, Any]) -> Event:
        """Something that happened to the whole session."""
        self._newest_mark = max(us, self._newest_mark)
        return self._instant(name, "p", 0, self._newest_mark, args)

    def _metadata(self, name: str, tid: int, value: str) -> Event:
        return {**self._at("M", tid, 0.0), "name": name, "args": {"name": value}}

    # Times

    def _us(self, line: Mapping[str, Any]) -> float:
        """Microseconds of a line from the first one; lines without a time are where the line before was."""
        t_ns = line.get("t_ns")
        if t_ns is not None:
            self._first_ns = t_ns if self._first_ns is None else self._first_ns
            if (t_ns - self._first_ns) / 1e3 < self._last_us - _MOST_BACK_US:
                # Another machine's clock, or the same one after a restart: go on from where the file was.
                self._first_ns = t_ns - round(self._last_us * 1e3)
            self._last_us = max((t_ns - self._first_ns) / 1e3, 0.0)
        return self._last_us

    def _start_us(self, line: TraceLine) -> float:
        """When what the line tells began: a step line is written at its end."""
        length = line.data.get("step_ms") if line.type == "step" else None
        return max(self._us(line.data) - (length or 0.0) * 1e3, 0.0)


_MOST_BACK_US = 60e6
"""Lines of answers side by side may stand in another order than their times; by more than this they never do."""


def _step_args(step: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("mode", "mode_requested", "prefix_len", "budget", "verify_len", "rows", "correct_drafts", "cap_trim"),
        *("draft_text", "confidence", "survival", "committed_ids", "bonus_token", "predicted_step_ms", "fallback"),
    )
    return {name: step[name] for name in names if step.get(name) is not None}
