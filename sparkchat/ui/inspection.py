"""One recorded step in full, as rows of styled text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit, one_line
from sparkchat.ui.stats import Snapshot, StepMark, number
from sparkchat.ui.step_view import Row, position_mark, step_rows, strip_rows

KEYS = "left/right: one step  page up/down: ten  home/end: first, last  esc: close"


class StepRecord(NamedTuple):
    """A step event, and the text of the token that the target added in it."""

    step: dict[str, Any]
    bonus_text: str | None


def inspection_rows(records: Sequence[StepRecord], index: int, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Step ``index``: its picture, a table of its positions, its times, and where it lies among the others."""
    if not records:
        return [[(fit("no step yet: ask something first; esc closes", width, glyphs.ellipsis), "dim")]]
    record = records[index]
    step = record.step
    snapshot = Snapshot(num_steps=1, step=step, bonus_text=record.bonus_text)
    head = f"{index + 1} of {len(records)} steps, {step.get('prefix_len', '-')} tokens before it"
    rows: list[Row] = [[(fit(head, width, glyphs.ellipsis), "title")]]
    rows += step_rows(snapshot, width, max(height - 6, 4), glyphs)
    rows += [[], *_position_rows(step, width, glyphs), []]
    rows += [[(fit(one_line(line), width, glyphs.ellipsis), "text")] for line in _fact_lines(step)]
    rows += [[], *_strip_with_cursor(records, index, width, glyphs)]
    rows = rows[: max(height - 1, 1)]
    return [*rows, [(fit(KEYS, width, glyphs.ellipsis), "dim")]]


def _position_rows(step: dict[str, Any], width: int, glyphs: Glyphs) -> list[Row]:
    drafts = step.get("draft_text") or ()
    if not drafts:
        return []
    rows: list[Row] = [[(fit("pos  logit  confidence  survival  p(draft)  token", width, glyphs.ellipsis), "dim")]]
    for position, text in enumerate(drafts):
        mark, style = position_mark(step, position, glyphs)
        numbers = (
            f"{position + 1:>3}  {_number(step, 'confidence_logit', position, 5)}  "
            f"{_number(step, 'confidence', position, 10)}  {_number(step, 'survival', position, 8)}  "
            f"{_number(step, 'draft_prob', position, 8)}  "
        )
        token = one_line(repr(str(text))[1:-1], glyphs.bullet.isascii())
        row = [(numbers, "text"), (f"{mark} ", style), (token, "text")]
        used = len(numbers) + 2
        rows.append([*row[:2], (fit(token, max(width - used, 0), glyphs.ellipsis), "text")] if used < width else [])
    return rows


def _number(step: dict[str, Any], name: str, position: int, width: int) -> str:
    values = step.get(name) or ()
    return number(values[position] if position < len(values) else None, 2).rjust(width)


def _fact_lines(step: dict[str, Any]) -> list[str]:
    reject = step.get("reject")
    lines = []
    if reject is not None:
        lines.append(
            f"rejected at {reject.get('pos', 0) + 1}: p(draft) {number(reject.get('p_draft'), 3)}, "
            f"p(target) {number(reject.get('p_target'), 3)}, rank {reject.get('target_rank', '-')} for the target"
        )
    times = ", ".join(f"{name} {number(step.get(f'{name}_ms'))}" for name in ("draft", "plan", "verify", "accept"))
    lines.append(f"ms: {times}; step {number(step.get('step_ms'))}, predicted {number(step.get('predicted_step_ms'))}")
    lines.append(
        f"budget {step.get('budget', '-')}  rows {step.get('rows', '-')}  spared {step.get('rows_reclaimed', '-')}  "
        f"lost to the cut {'-' if step.get('cap_trim') is None else step['cap_trim']}"
    )
    if step.get("fallback"):
        lines.append(f"not as asked: {step['fallback']}")
    return lines


def _strip_with_cursor(records: Sequence[StepRecord], index: int, width: int, glyphs: Glyphs) -> list[Row]:
    begin = max(0, min(index - width // 2, len(records) - width))
    shown = records[begin : begin + width]
    steps = [record.step for record in shown]
    marks = [StepMark(s.get("verify_len") or 0, s.get("correct_drafts") or 0, str(s.get("mode"))) for s in steps]
    cursor = " " * (index - begin) + ("^" if glyphs.bullet.isascii() else "▲")
    return [*strip_rows(marks, width, 9, glyphs)[1:], [(cursor, "tick")]]
