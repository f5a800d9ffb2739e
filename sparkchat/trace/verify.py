"""Checks that a trace agrees with itself: every turn's identities, and every step with its neighbours.

Identities: histogram sums to the steps; its weighted sum is the accepted drafts; committed ids in order are the
delivered ids after the first; acceptance length is committed over steps; a static turn proposes steps times block size.

One pass; memory is that of the answers open at a time, and of the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkchat.trace.open_answers import OpenAnswers
from sparkchat.trace.reader import Damage, TraceLine, read_lines
from sparkchat.trace.turn_check import Failure, TurnCheck, TurnReport

VERIFY_SCHEMA = "sparkchat.trace-verify/1"
MOST_REPORTS = 10_000
"""Answers that are reported one by one, and failed ones that are after that; the others are counted."""


@dataclass(frozen=True)
class Verification:
    """The result for a file."""

    path: Path
    turns: tuple[TurnReport, ...]
    num_turns: int
    num_failed_turns: int
    failures: tuple[Failure, ...]
    """Of the file as a whole: damaged lines, no header."""
    num_failures: int
    notes: tuple[str, ...]
    """What could not be checked, without being wrong: a cut last line, an answer without an end."""

    @property
    def ok(self) -> bool:
        return not self.num_failures and not self.num_failed_turns

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": VERIFY_SCHEMA,
            "file": str(self.path),
            "ok": self.ok,
            "num_failures": self.num_failures,
            "failures": [failure.to_json() for failure in self.failures],
            "num_turns": self.num_turns,
            "num_failed_turns": self.num_failed_turns,
            "turns": [turn.to_json() for turn in self.turns],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        lines = [_failure_text(failure) for failure in self.failures]
        lines += _more(self.num_failures - len(self.failures), "damaged lines")
        for turn in self.turns:
            state = "ok" if turn.ok else f"{turn.num_failures} failed"
            lines.append(f"turn {turn.turn}: {state}, {turn.num_steps} steps")
            lines += [f"  {_failure_text(failure)}" for failure in turn.failures]
            lines += [f"  {line}" for line in _more(turn.num_failures - len(turn.failures), "failures")]
        lines += _more(self.num_turns - len(self.turns), "turns")
        lines += list(self.notes)
        lines.append(f"{self.path}: {'all checks hold' if self.ok else 'checks failed'}")
        return "\n".join(lines)


def verify(path: str | Path) -> Verification:
    """Check the file at ``path``; see ``read_lines`` for its errors."""
    damage, checker = Damage(), _Checker()
    for line in read_lines(path, damage):
        checker.add(line)
    checker.finish()
    failures = [] if checker.header is not None else [Failure(None, "header", "the file has no readable header line")]
    failures += [Failure(line.number, "readable", line.reason) for line in damage.lines if not line.is_cut]
    num_damaged = damage.num_lines - damage.is_cut
    notes = []
    if damage.last is not None and damage.is_cut:
        notes.append(f"line {damage.last.number} is {damage.last.reason}; it is not checked")
    return Verification(
        path=Path(path),
        turns=tuple(checker.reports[number] for number in sorted(checker.reports)),
        num_turns=checker.num_turns,
        num_failed_turns=len(checker.failed),
        failures=tuple(failures),
        num_failures=num_damaged + (checker.header is None),
        notes=(*notes, *checker.notes),
    )


class _Checker:
    """Hands the lines to the checks of their answers, and keeps the reports."""

    def __init__(self) -> None:
        self.header: Mapping[str, Any] | None = None
        self.reports: dict[int, TurnReport] = {}
        self.failed: set[int] = set()
        self.notes: list[str] = []
        self._newest_header: Mapping[str, Any] = {}
        self._answers: OpenAnswers[TurnCheck] = OpenAnswers(lambda: TurnCheck(self._newest_header.get("block_size")))

    @property
    def num_turns(self) -> int:
        return self._answers.num_seen

    def add(self, line: TraceLine) -> None:
        if line.type == "header":
            self._newest_header = line.data
            self.header = self.header or line.data
        if line.type not in ("turn", "step", "end"):
            return
        check = self._answers.of(line)
        if check is None:
            self._late(line)
        elif line.type == "turn":
            check.start(line)
        elif line.type == "step":
            check.step(line)
        else:
            check.end(line)
            self._answers.close(line)
            self._report(check)

    def finish(self) -> None:
        for check in self._answers.left_open:
            check.finish()
            self._report(check)
            if len(self.notes) < MOST_REPORTS:
                self.notes.append(f"turn {check.number} has no end line; only its steps are checked")

    def _report(self, check: TurnCheck) -> None:
        report = check.report()
        if not report.ok:
            self.failed.add(report.turn)
        if len(self.reports) < MOST_REPORTS or (not report.ok and len(self.failed) < MOST_REPORTS):
            self.reports[report.turn] = report

    def _late(self, line: TraceLine) -> None:
        """A line of an answer that has ended."""
        number = line.data["turn"]
        what = f"a second {line.type} line for turn {number}"
        if line.type == "step":
            what = f"a step of turn {number} after its end line"
        failure = Failure(line.number, "structure", what)
        self.failed.add(number)
        if number in self.reports:
            self.reports[number] = _with_failure(self.reports[number], failure)


def _with_failure(report: TurnReport, failure: Failure) -> TurnReport:
    return replace(report, num_failures=report.num_failures + 1, failures=report.keep(failure))


def _failure_text(failure: Failure) -> str:
    where = f"line {failure.line}" if failure.line is not None else "file"
    return f"{where}: {failure.check}: {failure.message}"


def _more(number: int, what: str) -> list[str]:
    return [f"and {number} {what} more"] if number > 0 else []
