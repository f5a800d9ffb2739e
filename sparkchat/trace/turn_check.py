"""Checks the lines of one answer as they come. Of its steps only ids and line numbers are kept, eight bytes each."""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkchat.speculation import SpeculationCounts
from sparkchat.trace.calibration import CalibrationScores, observations
from sparkchat.trace.counts import count_step
from sparkchat.trace.reader import TraceLine
from sparkchat.trace.schema import COUNT_FIELDS, LIST_FIELDS
from sparkchat.trace.step_checks import step_problems
from sparkchat.trace.summary import num_prompt_tokens

FINISH_REASONS = ("stop", "length", "stop_string", "cancelled", "error")
_STOPS: dict[str, type | tuple[type, ...]] = {"stop": (int, str), "stop_string": str}
"""What may have ended an answer: an end token (another engine may tell its text), a stop string."""
MOST_FAILURES = 50
"""Failures of one answer that are named; the others are counted."""
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Failure:
    """One thing that does not hold."""

    line: int | None
    """Line number in the file, from 1; None for the file as a whole."""
    check: str
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"line": self.line, "check": self.check, "message": self.message}


@dataclass(frozen=True)
class TurnReport:
    """The result for one answer."""

    turn: int
    id: Any
    num_steps: int
    is_complete: bool
    """It has an end line; without one only its steps could be checked."""
    failures: tuple[Failure, ...]
    """The first ones, in order of their lines."""
    num_failures: int

    @property
    def ok(self) -> bool:
        return not self.num_failures

    def keep(self, failure: Failure) -> tuple[Failure, ...]:
        """The failures with one more, as far as there is room."""
        return (*self.failures, failure)[:MOST_FAILURES]

    def to_json(self) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "id": self.id,
            "ok": self.ok,
            "num_steps": self.num_steps,
            "is_complete": self.is_complete,
            "num_failures": self.num_failures,
            "failures": [failure.to_json() for failure in self.failures],
        }


class TurnCheck:
    """One answer. ``start``, ``step`` and ``end`` take its lines in file order; ``report`` says what did not hold."""

    def __init__(self, header_block_size: int | None) -> None:
        self.number = 0
        self._id: Any = None
        self._header_block_size = header_block_size
        self._turn: Mapping[str, Any] | None = None
        self._first_line: int | None = None
        """Of its steps and its end."""
        self._first_step: tuple[int, int] | None = None
        """(line, prefix_len)"""
        self._before: tuple[int, int, int, int | None] | None = None
        """(line, prefix_len, committed, t_ns) of the newest step"""
        self._counts = SpeculationCounts()
        self._calibration = CalibrationScores()
        self._committed = array("q")
        self._step_ends, self._step_lines = array("q"), array("q")
        """Committed ids up to and with each step, and its line."""
        self._is_static = True
        self._counts_from_0 = True
        self._has_end = False
        self._pieces = _Pieces()
        self._failures: list[Failure] = []
        self._num_failures = 0

    def start(self, line: TraceLine) -> None:
        if self._turn is not None:
            self._fail(line.number, "structure", f"a second turn line for turn {line.data['turn']}")
            return
        self._name(line)
        self._turn = {name: line.data.get(name) for name in ("block_size", "engine")}
        self._turn["num_prompt_tokens"] = num_prompt_tokens(line.data)
        if self._first_line is not None:
            self._fail(self._first_line, "structure", f"a line of turn {self.number} before its turn line")

    def step(self, line: TraceLine) -> None:
        self._name(line)
        self._first_line = self._first_line or line.number
        step = line.data
        for check, message in step_problems(step, self._block_size):
            self._fail(line.number, check, message)
        if self._counts_from_0 and step["i"] != self._counts.num_steps:
            self._counts_from_0 = False
            self._fail(line.number, "structure", f"step i is {step['i']}, expected {self._counts.num_steps}")
        self._check_neighbours(line)
        count_step(self._counts, step)
        self._calibration.add(observations(step))
        self._is_static = self._is_static and step["mode"] == "static"
        self._committed.extend(step["committed_ids"])
        self._step_ends.append(len(self._committed))
        self._step_lines.append(line.number)
        self._pieces.add(step.get("deltas") or ())

    def end(self, line: TraceLine) -> None:
        self._name(line)
        self._first_line = self._first_line or line.number
        self._has_end = True
        self._pieces.add(line.data.get("deltas") or ())
        self._finish_structure()
        # Another engine sends no step records: there is nothing that its own figures could be counted again from.
        checks = (_usage, _texts) if self.is_reported else (_identities, _totals, _usage, _texts)
        for check in checks:
            for name, message in check(self, line.data):
                self._fail(line.number, name, message)
        if not self.is_reported:
            self._check_delivered(line)

    def finish(self) -> None:
        """The file ends without an end line of this answer."""
        self._finish_structure()

    def report(self) -> TurnReport:
        failures = tuple(sorted(self._failures, key=lambda failure: failure.line or 0))
        return TurnReport(self.number, self._id, self._counts.num_steps, self._has_end, failures, self._num_failures)

    @property
    def counts(self) -> SpeculationCounts:
        return self._counts

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self._calibration.to_json()

    @property
    def pieces(self) -> _Pieces:
        return self._pieces

    @property
    def is_reported(self) -> bool:
        """The answer is another engine's, reached over HTTP; a server need not tell token ids."""
        return self._turn is not None and self._turn["engine"] is not None

    @property
    def num_prompt_tokens(self) -> int | None:
        return self._turn["num_prompt_tokens"] if self._turn is not None else None

    @property
    def static_block_size(self) -> int | None:
        """The block size that every step of the answer owes, or None."""
        return self._block_size if self._is_static and self._counts.num_steps else None

    @property
    def _block_size(self) -> int | None:
        own = self._turn["block_size"] if self._turn is not None else None
        return own if own is not None else self._header_block_size

    def _name(self, line: TraceLine) -> None:
        self.number = line.data["turn"]
        if self._id is None:
            self._id = line.data.get("id")
        elif line.data.get("id") not in (None, self._id):
            self._fail(line.number, "structure", f"id {_shown(line.data['id'])} in turn {self.number} of {self._id!r}")

    def _fail(self, line: int | None, check: str, message: str) -> None:
        self._num_failures += 1
        if len(self._failures) < MOST_FAILURES:
            self._failures.append(Failure(line, check, message))

    def _check_neighbours(self, line: TraceLine) -> None:
        """prefix_len grows by what was committed; time does not go back; only the last step may commit nothing."""
        step, before = line.data, self._before
        self._before = (line.number, step["prefix_len"], len(step["committed_ids"]), step.get("t_ns"))
        if before is None:
            self._first_step = (line.number, step["prefix_len"])
            return
        number, prefix_len, committed, t_ns = before
        grown = step["prefix_len"] - prefix_len
        if grown != committed:
            message = f"prefix_len grew by {grown} after a step (line {number}) that committed {committed}"
            self._fail(line.number, "prefix_len", message)
        if not committed:
            self._fail(number, "committed", "a step before the last one committed nothing")
        if (t_ns or 0) > (step.get("t_ns") or math.inf):
            self._fail(line.number, "time", f"t_ns is earlier than that of the step before (line {number})")

    def _finish_structure(self) -> None:
        if self._turn is None:
            self._fail(self._first_line, "structure", f"turn {self.number} has no turn line")
        num_prompt = self.num_prompt_tokens
        # Whether the anchor, the newest token, counts as prefix is the engine's choice.
        if self._first_step is not None and num_prompt is not None:
            line, prefix_len = self._first_step
            if prefix_len not in (num_prompt, num_prompt + 1):
                message = f"the first step has prefix_len {prefix_len} after a prompt of {num_prompt} tokens"
                self._fail(line, "prefix_len", message)

    def _check_delivered(self, line: TraceLine) -> None:
        """Committed ids in order are the delivered ids after the first; the failure names the step where they part."""
        committed, delivered = self._committed, line.data["token_ids"][1:]
        if self._counts.num_steps and not line.data["token_ids"]:
            self._fail(line.number, "delivered ids", "steps ran but no token was delivered")
        if len(committed) == len(delivered) and all(map(int.__eq__, committed, delivered)):
            return
        pairs = zip(committed, delivered, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(committed), len(delivered)))
        step = bisect_right(self._step_ends, same)
        where = self._step_lines[step] if step < len(self._step_lines) else line.number
        message = (
            f"{len(committed)} ids committed by steps, {len(delivered)} delivered after the first; "
            f"they differ from number {same + 1} on"
        )
        self._fail(where, "committed ids = delivered ids after the first", message)


class _Pieces:
    """The streamed text, as far as it must be known to compare it: a digest for each channel and for the ids."""

    def __init__(self) -> None:
        self._texts = {"answer": hashlib.blake2b(), "thinking": hashlib.blake2b()}
        self._ids = hashlib.blake2b()
        self.num_ids = 0

    def add(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        for piece in pieces:
            if piece["channel"] in self._texts:
                self._texts[piece["channel"]].update(_bytes(piece["text"]))
            self._ids.update(array("q", piece["token_ids"]).tobytes())
            self.num_ids += len(piece["token_ids"])

    def joins_to(self, channel: str, text: str) -> bool:
        return self._texts[channel].digest() == hashlib.blake2b(_bytes(text)).digest()

    def ids_are(self, token_ids: Sequence[int]) -> bool:
        return self._ids.digest() == hashlib.blake2b(array("q", token_ids).tobytes()).digest()


def _identities(check: TurnCheck, end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The end line's own numbers among themselves, and with the steps."""
    given, counts = end["speculation"], check.counts
    histogram, steps = given.get("acceptance_histogram"), given.get("num_steps")
    if histogram is not None and sum(histogram) != steps:
        yield "sum(histogram) = steps", f"{sum(histogram)} is not {steps}"
    accepted = given.get("num_accepted_draft_tokens")
    weighted = sum(value * count for value, count in enumerate(histogram or []))
    if histogram is not None and weighted != accepted:
        yield "sum(i*histogram[i]) = accepted drafts", f"{weighted} is not {accepted}"
    mean = given.get("mean_acceptance_length")
    if not _is_close(mean, counts.mean_acceptance_length):
        message = f"{mean} is not {counts.num_committed}/{counts.num_steps}"
        yield "acceptance length = committed/steps", message
    size = check.static_block_size
    if size is not None:
        proposed = given.get("num_proposed_draft_tokens")
        if proposed != counts.num_steps * size:
            yield "proposed = steps*gamma in static", f"{proposed} is not {counts.num_steps}*{size}"


def _totals(check: TurnCheck, end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The end line's numbers against those counted again from the steps."""
    given, again = end["speculation"], check.counts.figures()
    for name in COUNT_FIELDS:
        if name in given and given[name] != again[name]:
            yield name, f"the end line says {given[name]}, the steps give {again[name]}"
    for name in LIST_FIELDS:
        if name in given and _trimmed(given[name]) != _trimmed(again[name]):
            yield name, f"the end line says {_shown(given[name])}, the steps give {_shown(again[name])}"
    if "calibration" in end and not _is_close(end["calibration"], check.calibration):
        yield "calibration", "the end line's calibration is not that of the steps"


def _usage(check: TurnCheck, end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    usage, token_ids = end.get("usage") or {}, end["token_ids"]
    are_ids_told = bool(token_ids) or not check.is_reported
    if are_ids_told and usage.get("completion_tokens") not in (None, len(token_ids)):
        yield "usage", f"usage says {usage['completion_tokens']} completion tokens, delivered are {len(token_ids)}"
    prompt = check.num_prompt_tokens
    is_prompt_told = prompt is not None or not check.is_reported
    if is_prompt_told and usage.get("prompt_tokens") not in (None, prompt):
        yield "usage", f"usage says {usage['prompt_tokens']} prompt tokens, the turn line has {prompt}"
    reason, stop = end["finish_reason"], end.get("stop")
    if reason not in FINISH_REASONS:
        yield "finish reason", f"{_shown(reason)} is none of {', '.join(FINISH_REASONS)}"
    elif stop is not None and not isinstance(stop, _STOPS.get(reason, ())):
        yield "finish reason", f"the answer ended by {reason}, and stop is {_shown(stop)}"


def _texts(check: TurnCheck, end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Text pieces joined are the texts of the end line, and their ids the delivered ids."""
    if "deltas" not in end:
        return
    for channel, name in (("answer", "text"), ("thinking", "thinking")):
        if end.get(name) is not None and not check.pieces.joins_to(channel, end[name]):
            yield "streamed text = final text", f"the {channel} pieces do not join to {name}"
    if not check.pieces.ids_are(end["token_ids"]):
        message = (
            f"{check.pieces.num_ids} ids were streamed, {len(end['token_ids'])} are in the end line, or they differ"
        )
        yield "streamed ids = delivered ids", message


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _trimmed(counts: Sequence[int]) -> list[int]:
    """Without zeros at the end: lists may be padded to the block size."""
    last = max((n for n, value in enumerate(counts, start=1) if value), default=0)
    return list(counts[:last])


def _is_close(given: Any, expected: Any) -> bool:
    """Equal, floats within a relative 1e-6."""
    if isinstance(given, Mapping) and isinstance(expected, Mapping):
        return given.keys() == expected.keys() and all(_is_close(given[key], expected[key]) for key in given)
    if isinstance(given, Sequence) and isinstance(expected, Sequence) and not isinstance(given, str):
        return len(given) == len(expected) and all(map(_is_close, given, expected))
    if isinstance(given, float) or isinstance(expected, float):
        is_number = isinstance(given, (int, float)) and isinstance(expected, (int, float))
        return is_number and math.isclose(given, expected, rel_tol=_TOLERANCE, abs_tol=1e-9)
    return given == expected
