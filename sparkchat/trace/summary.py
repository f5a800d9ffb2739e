"""What a trace says in total, by mode and by draft position; as an object for scripts and as text.

Everything is counted from the step lines, so a trace without its end lines still has a summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkchat.speculation import SpeculationCounts
from sparkchat.trace.calibration import CalibrationScores, observations
from sparkchat.trace.counts import acceptance_by_position, count_step
from sparkchat.trace.open_answers import OpenAnswers
from sparkchat.trace.reader import Damage, TraceLine, read_lines

SUMMARY_SCHEMA = "sparkchat.trace-summary/1"
_MOST_NAMES = 32
"""Different modes and finish reasons that are told apart; a file that has more is not ours."""
_OTHER = "(other)"


@dataclass(frozen=True)
class TraceSummary:
    """Totals of one trace. None means not measured, or a ratio whose denominator is 0."""

    data: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(self.data)

    def to_text(self) -> str:
        return "\n".join(_text_lines(self.data))


def summarize(path: str | Path) -> TraceSummary:
    """Count every step of the trace in one pass; see ``read_lines`` for its errors."""
    damage, totals = Damage(), Totals()
    for line in read_lines(path, damage):
        totals.add(line)
    return TraceSummary({"schema": SUMMARY_SCHEMA, "file": str(path), **totals.to_json(), **_damage_json(damage)})


class Totals:
    """What the lines seen so far come to."""

    def __init__(self) -> None:
        self.header: Mapping[str, Any] | None = None
        self.all = StepFigures()
        self.by_mode: dict[str, StepFigures] = {}
        """By effective mode, in the order the modes first ran."""
        self._answers: OpenAnswers[_Delivered] = OpenAnswers(_Delivered)
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._decoded = _Ratio()
        self._ttft = _Ratio()
        self._reported = _Ratio()
        """Acceptance lengths that another engine told, weighted by its steps where it told those."""

    def add(self, line: TraceLine) -> None:
        data = line.data
        if line.type == "header":
            self.header = self.header or data
        elif line.type == "turn":
            self._answers.of(line)
            self._counts["prompt_tokens"] += num_prompt_tokens(data) or 0
        elif line.type == "step":
            self._add_step(line)
        elif line.type == "end":
            self._add_end(line)
        elif line.type in ("mode_change", "error"):
            self._counts[line.type] += 1

    def _add_step(self, line: TraceLine) -> None:
        step = line.data
        self.all.add(step)
        self.by_mode.setdefault(_known(step["mode"], self.by_mode), StepFigures()).add(step)
        answer = self._answers.of(line)
        if answer is not None:
            answer.num_tokens = (answer.num_tokens or 1) + len(step["committed_ids"])

    def _add_end(self, line: TraceLine) -> None:
        end = line.data
        self._answers.close(line)
        self._counts["ends"] += 1
        self._counts["errors_at_end"] += end["finish_reason"] == "error"
        self._counts["tokens"] += len(end["token_ids"])
        self._reasons[_known(end["finish_reason"], self._reasons)] += 1
        timing = end.get("timing") or {}
        self._ttft.add(timing.get("ttft_ms"))
        if self.header is not None and self.header.get("engine"):
            told = end["speculation"]
            mean, weight = told.get("mean_acceptance_length"), told.get("num_steps", 1)
            self._reported.add(None if mean is None else mean * weight, weight)
        if len(end["token_ids"]) > 1:
            # The first token comes from the prompt pass, and decode_ms begins with it.
            self._decoded.add(timing.get("decode_ms"), len(end["token_ids"]) - 1)

    def to_json(self) -> dict[str, Any]:
        header, counts = self.header or {}, self._counts
        open_tokens = sum(answer.num_tokens for answer in self._answers.left_open)
        return {
            "model": header.get("model"),
            "drafter": header.get("drafter"),
            "device": header.get("device"),
            "block_size": header.get("block_size"),
            "num_turns": self._answers.num_seen,
            "num_complete_turns": counts["ends"],
            "num_errors": counts["error"] + counts["errors_at_end"],
            "num_mode_changes": counts["mode_change"],
            "finish_reasons": dict(self._reasons),
            "num_prompt_tokens": counts["prompt_tokens"],
            "num_completion_tokens": counts["tokens"] + open_tokens,
            "num_committed_tokens": self.all.counts.num_committed,
            **self.all.counts.figures(),
            "acceptance_by_position": acceptance_by_position(self.all.counts),
            "tokens_per_second": self._decoded.weight_per_value(1e3),
            "mean_ttft_ms": self._ttft.mean,
            "mean_step_ms": self.all.step_ms.mean,
            "modes": list(self.by_mode),
            "by_mode": {mode: figures.to_json() for mode, figures in self.by_mode.items()},
            "calibration": self.all.calibration.to_json(),
            "engine": header.get("engine"),
            "reported_acceptance_length": self._reported.mean,
        }


class _Delivered:
    """Tokens of an answer that has no end yet."""

    num_tokens = 0


class StepFigures:
    """Counts and times of some steps."""

    def __init__(self) -> None:
        self.counts = SpeculationCounts()
        self.calibration = CalibrationScores()
        self.step_ms = _Ratio()
        self.predicted_ms = _Ratio()
        self._trimmed = _Ratio()
        self._num_reclaimed: float = 0
        self._num_fallbacks = 0

    def add(self, step: Mapping[str, Any]) -> None:
        count_step(self.counts, step)
        self.calibration.add(observations(step))
        self.step_ms.add(step.get("step_ms"))
        self.predicted_ms.add(step.get("predicted_step_ms"))
        self._trimmed.add(step.get("cap_trim"))
        self._num_reclaimed += step.get("rows_reclaimed") or 0
        self._num_fallbacks += step.get("fallback") is not None

    def to_json(self) -> dict[str, Any]:
        counts, total_ms = self.counts, self.step_ms.complete_total
        return {
            **counts.figures(),
            "num_committed_tokens": counts.num_committed,
            "acceptance_by_position": acceptance_by_position(counts),
            "mean_verify_len": counts.num_verified / counts.num_steps if counts.num_steps else None,
            "mean_step_ms": self.step_ms.mean,
            "mean_predicted_step_ms": self.predicted_ms.mean,
            # The time of a step is shared by all answers decoded in it.
            "tokens_per_second": counts.num_committed / total_ms * 1e3 if total_ms else None,
            # What a cap cost is known only where the whole block was verified.
            "num_trimmed_tokens": self._trimmed.complete_total,
            "num_rows_reclaimed": self._num_reclaimed,
            "num_fallback_steps": self._num_fallbacks,
            "calibration": self.calibration.to_json(),
        }


@dataclass
class _Ratio:
    """A sum of measured values and of their weights; unmeasured values are counted apart."""

    total: float = 0
    weight: float = 0
    num_missing: int = 0

    def add(self, value: float | None, weight: float = 1) -> None:
        if value is None:
            self.num_missing += 1
        else:
            self.total += value
            self.weight += weight

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None

    @property
    def complete_total(self) -> float | None:
        """The sum, or None when a value of it was not measured."""
        return None if self.num_missing else self.total

    def weight_per_value(self, scale: float) -> float | None:
        return self.weight / self.total * scale if self.total > 0 else None


def num_prompt_tokens(turn: Mapping[str, Any]) -> int | None:
    """Prompt tokens by a turn line, or None when it does not say."""
    number, ids = turn.get("num_prompt_tokens"), turn.get("prompt_token_ids")
    return number if number is not None else None if ids is None else len(ids)


def _known(name: str, names: Mapping[str, Any]) -> str:
    return name if name in names or len(names) < _MOST_NAMES else _OTHER


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {
        "is_cut": damage.is_cut,
        "num_damaged_lines": damage.num_lines,
        "damaged_lines": [line.to_json() for line in damage.lines],
    }


# text ----------------------------------------------------------------------------------------------------------------


def _text_lines(data: Mapping[str, Any]) -> list[str]:
    pair = f"{data['model'] or 'unknown model'} + {data['drafter'] or 'no drafter'}"
    open_turns = data["num_turns"] - data["num_complete_turns"]
    speed = f"{_shown(data['tokens_per_second'])} tokens/s, first token after {_shown(data['mean_ttft_ms'])} ms"
    verified, accepted = data["num_verified_draft_tokens"], data["num_accepted_draft_tokens"]
    drafts = f"drafts proposed {data['num_proposed_draft_tokens']}, verified {verified}, accepted {accepted}"
    lines = [
        f"{data['file']}: {pair} on {data['device'] or 'unknown device'}, block size {_shown(data['block_size'])}",
        f"turns {data['num_turns']}" + (f" ({open_turns} without an end)" if open_turns else ""),
        f"tokens: prompt {data['num_prompt_tokens']}, answers {data['num_completion_tokens']}",
        f"speed: {speed}, step {_shown(data['mean_step_ms'])} ms",
        f"steps {data['num_steps']}: {drafts}",
        f"mean acceptance length {_shown(data['mean_acceptance_length'])} (committed tokens a step, bonus included)",
        f"accepted drafts a step (0, 1, ...): {_counts(data['acceptance_histogram'])}",
        f"verify length (0, 1, ...): {_counts(data['verify_len_histogram'])}",
    ]
    if data["engine"] is not None:
        # Without step records everything that is counted from steps is a dash.
        lines.append(
            f"acceptance length by {data['engine']}'s own report: {_shown(data['reported_acceptance_length'])}"
        )
    lines += _position_table(data["acceptance_by_position"])
    for mode, figures in data["by_mode"].items():
        lines.append(_mode_line(mode, figures))
    lines += _calibration_lines(data["calibration"])
    lines += [f"line {damage['line']} is damaged: {damage['reason']}" for damage in data["damaged_lines"]]
    unnamed = data["num_damaged_lines"] - len(data["damaged_lines"])
    return [*lines, f"and {unnamed} damaged lines more"] if unnamed else lines


def _position_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = "position  proposed  verified  accepted  of all steps  of verified"
    body = [
        f"{row['position']:8}  {row['proposed']:8}  {row['verified']:8}  {row['accepted']:8}"
        f"  {_shown(row['rate_of_all_steps']):>12}  {_shown(row['rate_of_verified_steps']):>11}"
        for row in rows
    ]
    return [head, *body]


def _mode_line(mode: str, figures: Mapping[str, Any]) -> str:
    return (
        f"{mode}: steps {figures['num_steps']}, acceptance length {_shown(figures['mean_acceptance_length'])}, "
        f"verify length {_shown(figures['mean_verify_len'])}, step {_shown(figures['mean_step_ms'])} ms "
        f"(predicted {_shown(figures['mean_predicted_step_ms'])}), {_shown(figures['tokens_per_second'])} tokens/s, "
        f"trimmed tokens {_shown(figures['num_trimmed_tokens'])}"
    )


def _calibration_lines(scores: Mapping[str, Any] | None) -> list[str]:
    if scores is None:
        return ["calibration: not measured"]

    def line(name: str, part: Mapping[str, Any]) -> str:
        return (
            f"calibration {name}: {part['count']} drafts, survival {_shown(part['mean_survival'])}, "
            f"reached {_shown(part['reached_rate'])}, ECE {_shown(part['ece'])}, AUC {_shown(part['auc'])}"
        )

    return [line("all", scores), *(line(f"at {part['position']}", part) for part in scores["by_position"])]


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _counts(values: Sequence[int]) -> str:
    return " ".join(map(str, values)) or "-"
