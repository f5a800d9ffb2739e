"""What a trace says in total, by mode and by draft position; as an object for scripts and as text.

Everything is counted from the step lines, so a trace without its end lines still has a summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkchat.trace.calibration import calibration, observations
from sparkchat.trace.counts import SpeculationCounts
from sparkchat.trace.reader import Trace, Turn

SUMMARY_SCHEMA = "sparkchat.trace-summary/1"


@dataclass(frozen=True)
class TraceSummary:
    """Totals of one trace. None means not measured, or a ratio whose denominator is 0."""

    data: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(self.data)

    def to_text(self) -> str:
        return "\n".join(_text_lines(self.data))


def summarize(trace: Trace) -> TraceSummary:
    """Count every step of the trace."""
    header = trace.header or {}
    steps = [line.data for turn in trace.turns for line in turn.steps]
    counts = SpeculationCounts.of(steps)
    ends = [turn.end.data for turn in trace.turns if turn.end is not None]
    by_mode = {mode: _mode_figures(group) for mode, group in _by_mode(steps).items()}
    return TraceSummary(
        {
            "schema": SUMMARY_SCHEMA,
            "file": str(trace.path),
            "model": header.get("model"),
            "drafter": header.get("drafter"),
            "device": header.get("device"),
            "block_size": header.get("block_size"),
            "num_turns": len(trace.turns),
            "num_complete_turns": len(ends),
            "num_errors": len(trace.errors) + sum(end["finish_reason"] == "error" for end in ends),
            "num_mode_changes": sum(line.type == "mode_change" for line in trace.lines),
            "finish_reasons": _tally(end["finish_reason"] for end in ends),
            "num_prompt_tokens": sum(_prompt_tokens(turn) for turn in trace.turns),
            "num_completion_tokens": sum(_delivered(turn) for turn in trace.turns),
            "num_committed_tokens": counts.num_committed,
            **counts.to_json(),
            "acceptance_by_position": counts.acceptance_by_position(),
            "tokens_per_second": _tokens_per_second(ends),
            "mean_ttft_ms": _mean((end.get("timing") or {}).get("ttft_ms") for end in ends),
            "mean_step_ms": _mean(step.get("step_ms") for step in steps),
            "modes": list(by_mode),
            "by_mode": by_mode,
            "calibration": calibration(found for step in steps for found in observations(step)),
            "is_cut": trace.is_cut,
            "damaged_lines": [{"line": line.number, "reason": line.reason} for line in trace.damaged],
        }
    )


def _by_mode(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Steps by effective mode, in the order the modes first ran."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for step in steps:
        groups.setdefault(step["mode"], []).append(step)
    return groups


def _mode_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = SpeculationCounts.of(steps)
    times = [step.get("step_ms") for step in steps]
    total_ms = None if any(time is None for time in times) else sum(times)
    trims = [step.get("cap_trim") for step in steps]
    return {
        **counts.to_json(),
        "num_committed_tokens": counts.num_committed,
        "acceptance_by_position": counts.acceptance_by_position(),
        "mean_verify_len": counts.num_verified / counts.num_steps,
        "mean_step_ms": _mean(times),
        "mean_predicted_step_ms": _mean(step.get("predicted_step_ms") for step in steps),
        # The time of a step is shared by all answers decoded in it.
        "tokens_per_second": counts.num_committed / total_ms * 1e3 if total_ms else None,
        # What a cap cost is known only where the whole block was verified.
        "num_trimmed_tokens": None if any(trim is None for trim in trims) else sum(trims),
        "num_rows_reclaimed": sum(step.get("rows_reclaimed") or 0 for step in steps),
        "num_fallback_steps": sum(step.get("fallback") is not None for step in steps),
        "calibration": calibration(found for step in steps for found in observations(step)),
    }


def _delivered(turn: Turn) -> int:
    if turn.end is not None:
        return len(turn.end.data["token_ids"])
    committed = sum(len(step.data["committed_ids"]) for step in turn.steps)
    return committed + 1 if turn.steps else 0  # the first token comes from the prompt pass


def _prompt_tokens(turn: Turn) -> int:
    start = turn.start.data if turn.start is not None else {}
    number = start.get("num_prompt_tokens")
    return number if number is not None else len(start.get("prompt_token_ids") or [])


def _tokens_per_second(ends: Sequence[Mapping[str, Any]]) -> float | None:
    """Delivered tokens after each answer's first, over the time from its first token to its last."""
    tokens, total_ms = 0, 0.0
    for end in ends:
        decode_ms = (end.get("timing") or {}).get("decode_ms")
        if decode_ms is not None and len(end["token_ids"]) > 1:
            tokens += len(end["token_ids"]) - 1
            total_ms += decode_ms
    return tokens / total_ms * 1e3 if total_ms > 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _tally(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


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
    lines += _position_table(data["acceptance_by_position"])
    for mode, figures in data["by_mode"].items():
        lines.append(_mode_line(mode, figures))
    lines += _calibration_lines(data["calibration"])
    lines += [f"line {damage['line']} is damaged: {damage['reason']}" for damage in data["damaged_lines"]]
    return lines


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
