"""Checks that a trace agrees with itself: every turn's identities, and every step with its neighbours.

Identities: histogram sums to the steps; its weighted sum is the accepted drafts; committed ids in order are the
delivered ids after the first; acceptance length is committed over steps; a static turn proposes steps times block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparkchat.trace.calibration import calibration, observations
from sparkchat.trace.counts import SpeculationCounts, accepted_drafts
from sparkchat.trace.reader import Trace, Turn, read_trace
from sparkchat.trace.schema import COUNT_FIELDS, LIST_FIELDS

VERIFY_SCHEMA = "sparkchat.trace-verify/1"
FINISH_REASONS = ("stop", "length", "stop_string", "cancelled", "error")
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

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "id": self.id,
            "ok": self.ok,
            "num_steps": self.num_steps,
            "is_complete": self.is_complete,
            "failures": [failure.to_json() for failure in self.failures],
        }


@dataclass(frozen=True)
class Verification:
    """The result for a file."""

    path: Path
    turns: tuple[TurnReport, ...]
    failures: tuple[Failure, ...]
    """Of the file as a whole: damaged lines, no header."""
    notes: tuple[str, ...]
    """What could not be checked, without being wrong: a cut last line, an answer without an end."""

    @property
    def ok(self) -> bool:
        return not self.failures and all(turn.ok for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": VERIFY_SCHEMA,
            "file": str(self.path),
            "ok": self.ok,
            "failures": [failure.to_json() for failure in self.failures],
            "turns": [turn.to_json() for turn in self.turns],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        lines = [_failure_text(failure) for failure in self.failures]
        for turn in self.turns:
            state = "ok" if turn.ok else f"{len(turn.failures)} failed"
            lines.append(f"turn {turn.turn}: {state}, {turn.num_steps} steps")
            lines += [f"  {_failure_text(failure)}" for failure in turn.failures]
        lines += list(self.notes)
        lines.append(f"{self.path}: {'all checks hold' if self.ok else 'checks failed'}")
        return "\n".join(lines)


def verify(trace: Trace | str | Path) -> Verification:
    """Check a trace, or the file at a path; see ``read_trace`` for its errors."""
    if not isinstance(trace, Trace):
        trace = read_trace(trace)
    failures = []
    if trace.header is None:
        failures.append(Failure(None, "header", "the file has no readable header line"))
    notes = []
    for line in trace.damaged:
        if trace.is_cut and line is trace.damaged[-1]:
            notes.append(f"line {line.number} is {line.reason}; it is not checked")
        else:
            failures.append(Failure(line.number, "readable", line.reason))
    notes += [
        f"turn {turn.number} has no end line; only its steps are checked" for turn in trace.turns if turn.end is None
    ]
    return Verification(trace.path, tuple(map(_turn_report, trace.turns)), tuple(failures), tuple(notes))


def _failure_text(failure: Failure) -> str:
    where = f"line {failure.line}" if failure.line is not None else "file"
    return f"{where}: {failure.check}: {failure.message}"


def _turn_report(turn: Turn) -> TurnReport:
    failures = [failure for check in _TURN_CHECKS for failure in check(turn)]
    failures.sort(key=lambda failure: failure.line or 0)
    return TurnReport(turn.number, turn.id, len(turn.steps), turn.end is not None, tuple(failures))


def _structure(turn: Turn) -> Iterator[Failure]:
    """One turn line first, then steps counted from 0, one end line last."""
    for line in turn.repeated:
        yield Failure(line.number, "structure", f"a second {line.type} line for turn {turn.number}")
    first = min((line.number for line in (*turn.steps, turn.end) if line is not None), default=None)
    if turn.start is None:
        yield Failure(first, "structure", f"turn {turn.number} has no turn line")
    elif first is not None and first < turn.start.number:
        yield Failure(first, "structure", f"a line of turn {turn.number} before its turn line")
    for line in turn.steps:
        if turn.end is not None and line.number > turn.end.number:
            yield Failure(line.number, "structure", f"a step of turn {turn.number} after its end line")
    for expected, line in enumerate(turn.steps):
        if line.data["i"] != expected:
            yield Failure(line.number, "structure", f"step i is {line.data['i']}, expected {expected}")
            return


def _steps(turn: Turn) -> Iterator[Failure]:
    """Each step by itself."""
    for line in turn.steps:
        for name, check in _STEP_CHECKS:
            for message in check(line.data):
                yield Failure(line.number, name, message)
        size = turn.block_size
        if line.data["mode"] == "static" and size is not None and len(line.data["draft_ids"]) != size:
            message = f"a static step proposed {len(line.data['draft_ids'])} drafts, expected block size {size}"
            yield Failure(line.number, "static block", message)


def _neighbours(turn: Turn) -> Iterator[Failure]:
    """prefix_len grows by what was committed; time does not go back; only the last step may commit nothing."""
    num_prompt = _num_prompt_tokens(turn)
    if turn.steps and num_prompt is not None:
        first = turn.steps[0]
        # Whether the anchor, the newest token, counts as prefix is the engine's choice.
        if first.data["prefix_len"] not in (num_prompt, num_prompt + 1):
            message = f"the first step has prefix_len {first.data['prefix_len']} after a prompt of {num_prompt} tokens"
            yield Failure(first.number, "prefix_len", message)
    for before, after in pairwise(turn.steps):
        committed = len(before.data["committed_ids"])
        grown = after.data["prefix_len"] - before.data["prefix_len"]
        if grown != committed:
            message = f"prefix_len grew by {grown} after a step (line {before.number}) that committed {committed}"
            yield Failure(after.number, "prefix_len", message)
        if not committed:
            yield Failure(before.number, "committed", "a step before the last one committed nothing")
        if (before.data.get("t_ns") or 0) > (after.data.get("t_ns") or math.inf):
            yield Failure(after.number, "time", f"t_ns is earlier than that of the step before (line {before.number})")


def _delivered(turn: Turn) -> Iterator[Failure]:
    """Steps against the delivered ids and the usage of the end line."""
    if turn.end is None:
        return
    end, number = turn.end.data, turn.end.number
    token_ids, committed = end["token_ids"], [i for line in turn.steps for i in line.data["committed_ids"]]
    if committed != token_ids[1:]:
        yield _first_difference(turn, committed, token_ids[1:])
    if turn.steps and not token_ids:
        yield Failure(number, "delivered ids", "steps ran but no token was delivered")
    usage = end.get("usage") or {}
    if usage.get("completion_tokens") not in (None, len(token_ids)):
        message = f"usage says {usage['completion_tokens']} completion tokens, delivered are {len(token_ids)}"
        yield Failure(number, "usage", message)
    if usage.get("prompt_tokens") not in (None, _num_prompt_tokens(turn)):
        message = f"usage says {usage['prompt_tokens']} prompt tokens, the turn line has {_num_prompt_tokens(turn)}"
        yield Failure(number, "usage", message)
    if end["finish_reason"] not in FINISH_REASONS:
        yield Failure(number, "finish reason", f"{end['finish_reason']!r} is none of {', '.join(FINISH_REASONS)}")


def _first_difference(turn: Turn, committed: Sequence[int], delivered: Sequence[int]) -> Failure:
    """Points at the step line where the ids part."""
    pairs = zip(committed, delivered, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(committed), len(delivered)))
    reached, where = 0, turn.end.number if turn.end is not None else None
    for line in turn.steps:
        reached += len(line.data["committed_ids"])
        if reached > same:
            where = line.number
            break
    message = (
        f"{len(committed)} ids committed by steps, {len(delivered)} delivered after the first; "
        f"they differ from number {same + 1} on"
    )
    return Failure(where, "committed ids = delivered ids after the first", message)


def _summary(turn: Turn) -> Iterator[Failure]:
    """The end line's own identities, then its numbers against those counted again from the steps."""
    if turn.end is None:
        return
    given, number = turn.end.data["speculation"], turn.end.number
    counts = SpeculationCounts.of(line.data for line in turn.steps)
    for name, message in _identities(given, counts, turn):
        yield Failure(number, name, message)
    again = counts.to_json()
    for name in COUNT_FIELDS:
        if name in given and given[name] != again[name]:
            yield Failure(number, name, f"the end line says {given[name]}, the steps give {again[name]}")
    for name in LIST_FIELDS:
        if name in given and _trimmed(given[name]) != _trimmed(again[name]):
            yield Failure(number, name, f"the end line says {given[name]}, the steps give {again[name]}")
    found = calibration(item for line in turn.steps for item in observations(line.data))
    if "calibration" in turn.end.data and not _is_close(turn.end.data["calibration"], found):
        yield Failure(number, "calibration", "the end line's calibration is not that of the steps")


def _identities(given: Mapping[str, Any], counts: SpeculationCounts, turn: Turn) -> Iterator[tuple[str, str]]:
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
    size = turn.block_size
    if turn.steps and size is not None and all(line.data["mode"] == "static" for line in turn.steps):
        proposed = given.get("num_proposed_draft_tokens")
        if proposed != counts.num_steps * size:
            yield "proposed = steps*gamma in static", f"{proposed} is not {counts.num_steps}*{size}"


def _deltas(turn: Turn) -> Iterator[Failure]:
    """Text pieces joined are the texts of the end line, and their ids the delivered ids."""
    if turn.end is None or "deltas" not in turn.end.data:
        return
    end, number = turn.end.data, turn.end.number
    pieces = [piece for line in (*turn.steps, turn.end) for piece in line.data.get("deltas") or ()]
    for channel, name in (("answer", "text"), ("thinking", "thinking")):
        joined = "".join(piece["text"] for piece in pieces if piece["channel"] == channel)
        if end.get(name) is not None and joined != end[name]:
            yield Failure(number, "streamed text = final text", f"the {channel} pieces do not join to {name}")
    token_ids = [token_id for piece in pieces for token_id in piece["token_ids"]]
    if token_ids != end["token_ids"]:
        message = f"{len(token_ids)} ids were streamed, {len(end['token_ids'])} are in the end line, or they differ"
        yield Failure(number, "streamed ids = delivered ids", message)


_TURN_CHECKS: tuple[Callable[[Turn], Iterator[Failure]], ...] = (
    _structure,
    _steps,
    _neighbours,
    _delivered,
    _summary,
    _deltas,
)


def _check_rows(step: Mapping[str, Any]) -> Iterator[str]:
    if step["rows"] != step["verify_len"] + 1:
        yield f"rows is {step['rows']}, verify_len + 1 is {step['verify_len'] + 1}"


def _check_verify_len(step: Mapping[str, Any]) -> Iterator[str]:
    if step["verify_len"] > len(step["draft_ids"]):
        yield f"verify_len {step['verify_len']} of {len(step['draft_ids'])} drafts"
    if step["mode"] == "off" and step["draft_ids"]:
        yield f"{len(step['draft_ids'])} drafts in mode off"


def _check_accepted(step: Mapping[str, Any]) -> Iterator[str]:
    if step["correct_drafts"] > step["verify_len"]:
        yield f"{step['correct_drafts']} drafts accepted of {step['verify_len']} verified"
    accepted = accepted_drafts(step)
    if step["committed_ids"][:accepted] != step["draft_ids"][:accepted]:
        yield f"the first {accepted} committed ids are not the first {accepted} drafts"


def _check_committed(step: Mapping[str, Any]) -> Iterator[str]:
    committed = len(step["committed_ids"])
    if committed > step["verify_len"] + 1:
        yield f"{committed} ids committed from {step['verify_len'] + 1} verified rows"
    if committed > step["correct_drafts"] + 1:
        yield f"{committed} ids committed with {step['correct_drafts']} accepted drafts"
    bonus = step.get("bonus_token")
    if bonus is not None and step["committed_ids"][-1:] != [bonus]:
        yield f"bonus_token {bonus} is not the last committed id"


def _check_cap(step: Mapping[str, Any]) -> Iterator[str]:
    trim = step.get("cap_trim")
    if step["mode"] == "compact" and trim is not None:
        yield f"cap_trim is {trim} in compact, where it cannot be known"
    if trim is not None and step["correct_drafts"] + trim > len(step["draft_ids"]):
        yield f"{step['correct_drafts']} accepted and {trim} trimmed of {len(step['draft_ids'])} drafts"


def _check_reject(step: Mapping[str, Any]) -> Iterator[str]:
    reject = step.get("reject")
    if reject is None:
        return
    position = reject.get("pos")
    if not isinstance(position, int) or not 0 <= position < step["verify_len"]:
        yield f"reject.pos is {position!r} with {step['verify_len']} drafts verified"
    elif position < len(step["draft_ids"]) and reject.get("draft_id") != step["draft_ids"][position]:
        yield f"reject.draft_id {reject.get('draft_id')!r} is not the draft at {position}"


def _check_lengths(step: Mapping[str, Any]) -> Iterator[str]:
    for name in ("draft_text", "draft_prob", "confidence_logit", "confidence", "survival"):
        values = step.get(name)
        if values and len(values) != len(step["draft_ids"]):
            yield f"{name} has {len(values)} entries for {len(step['draft_ids'])} drafts"


def _check_survival(step: Mapping[str, Any]) -> Iterator[str]:
    values = [value for value in step.get("survival") or [] if value is not None]
    if any(not 0.0 <= value <= 1.0 for value in values):
        yield "a survival is not between 0 and 1"
    if any(after > before + _TOLERANCE for before, after in pairwise(values)):
        yield "survival rises along the block"


_STEP_CHECKS: tuple[tuple[str, Callable[[Mapping[str, Any]], Iterator[str]]], ...] = (
    ("rows = verify_len + 1", _check_rows),
    ("verify_len", _check_verify_len),
    ("accepted", _check_accepted),
    ("committed", _check_committed),
    ("cap_trim", _check_cap),
    ("reject", _check_reject),
    ("lengths", _check_lengths),
    ("survival", _check_survival),
)


def _num_prompt_tokens(turn: Turn) -> int | None:
    if turn.start is None:
        return None
    number, ids = turn.start.data.get("num_prompt_tokens"), turn.start.data.get("prompt_token_ids")
    return number if number is not None else None if ids is None else len(ids)


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
