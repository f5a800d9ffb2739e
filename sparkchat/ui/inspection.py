"""One recorded step in full, as rows of styled text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit, one_line
from sparkchat.ui.stats import Snapshot, StepMark, number
from sparkchat.ui.step_log import StepRecord, first_number
from sparkchat.ui.step_view import Row, position_mark, step_rows, strip_rows
from sparkchat.ui.wrap import wrap

KEYS = "left/right: step  page up/down: 10  home/end  up/down: scroll  esc: close"


def inspection_rows(
    records: Sequence[StepRecord],
    index: int,
    width: int,
    height: int,
    glyphs: Glyphs,
    offset: int = 0,
    notice: str | None = None,
) -> list[Row]:
    """Step ``index``: its picture, a table of its positions, its times, and where it lies among the others.

    Where that does not fit, ``offset`` rows are scrolled away. ``notice`` is said first.
    """
    said = _wrapped(notice, width, "warning") if notice else []
    if not records:
        empty = "" if notice else "no step yet: ask something first; "
        return [*said, [(fit(f"{empty}esc closes", width, glyphs.ellipsis), "dim")]]
    record = records[index]
    step = record.step
    snapshot = Snapshot(num_steps=1, step=step, bonus_text=record.bonus_text)
    dropped = first_number(records)
    head = f"{dropped + index + 1} of {dropped + len(records)} steps, {step.get('prefix_len', '-')} tokens before it"
    rows = [*said, [(fit(head, width, glyphs.ellipsis), "title")]]
    if dropped:
        rows.append([(fit(f"the first {dropped} steps are not at hand any more", width, glyphs.ellipsis), "dim")])
    rows += step_rows(snapshot, width, len(step.get("draft_ids") or ()) + 6, glyphs)
    rows += [[], *_position_rows(step, width, glyphs), []]
    for line in _fact_lines(record):
        rows += _wrapped(one_line(line, glyphs.bullet.isascii()), width, "text")
    rows += [[], *_strip_with_cursor(records, index, width, glyphs)]
    room = max(height - 1, 1)
    offset = max(0, min(offset, len(rows) - room))
    rows = rows[offset : offset + room]
    return [*rows, [(fit(KEYS, width, glyphs.ellipsis), "dim")]]


def _wrapped(text: str, width: int, style: str) -> list[Row]:
    starts = wrap(text, max(width, 2), words=True)
    return [[(text[start:end].rstrip(" "), style)] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _position_rows(step: dict[str, Any], width: int, glyphs: Glyphs) -> list[Row]:
    """A table of the drafts, with what both sides gave them: the target's probability where it was asked."""
    drafts = step.get("draft_text") or step.get("draft_ids") or ()
    if not drafts:
        return []
    head = "  ".join(name.rjust(room) for name, _, room in _COLUMNS)
    rows: list[Row] = [[(fit(f"{head}     token", width, glyphs.ellipsis), "dim")]]
    for position, text in enumerate(drafts):
        mark, style = position_mark(step, position, glyphs)
        numbers = [str(position + 1).rjust(3)]
        numbers += [_number(step, field, position, room) for _, field, room in _COLUMNS[1:]]
        line = "  ".join(numbers) + "  "
        token = one_line(repr(str(text))[1:-1], glyphs.bullet.isascii())
        room = max(width - len(line) - 2, 0)
        parts = [(line, "text"), (f"{mark} ", style), (fit(token, room, glyphs.ellipsis), "text")]
        rows.append(parts if room else [(fit(line, width, glyphs.ellipsis), "text")])
    return rows


_COLUMNS = (
    ("pos", "", 3),
    ("logit", "confidence_logit", 6),
    ("confid.", "confidence", 7),
    ("survival", "survival", 8),
    ("p(draft)", "draft_prob", 8),
    ("p(target)", "target_prob", 9),
)
"""(head, field, width); a dash stands where nothing was measured, as for drafts that were never handed over."""


def _number(step: dict[str, Any], name: str, position: int, width: int) -> str:
    values = step.get(name) or ()
    return number(values[position] if position < len(values) else None, 3).rjust(width)


def _fact_lines(record: StepRecord) -> list[str]:
    step = record.step
    lines = []
    if (reject := step.get("reject")) is not None:
        lines.append(_rejection(reject, step, record.bonus_text))
    times = ", ".join(f"{name} {number(step.get(f'{name}_ms'))}" for name in ("draft", "plan", "verify", "accept"))
    theta = step.get("predicted_theta")
    lines.append(f"ms: {times}; step {number(step.get('step_ms'))}, predicted {number(step.get('predicted_step_ms'))}")
    lines.append(
        f"budget {_known(step.get('budget'))}  rows {_known(step.get('rows'))}  "
        f"spared {_known(step.get('rows_reclaimed'))}  lost to the cut {_known(step.get('cap_trim'))}  "
        f"planned tokens/s {number(theta)}"
    )
    graph = step.get("graph") or {}
    if graph.get("replayed"):
        lines.append(f"CUDA graph of {_known(graph.get('key'))} rows")
    if step.get("fallback"):
        lines.append(f"not as asked: {step['fallback']}")
    if step.get("simulated"):
        lines.append(f"acceptance is simulated: {step['simulated']}")
    return lines


def _rejection(reject: dict[str, Any], step: dict[str, Any], chosen: str | None) -> str:
    place, drafts = int(reject.get("pos") or 0), step.get("draft_text") or ()
    draft = repr(str(drafts[place])) if place < len(drafts) else f"token {_known(reject.get('draft_id'))}"
    instead = repr(chosen) if chosen else f"token {_known(reject.get('target_id'))}"
    return (
        f"draft {place + 1} {draft} rejected: p(draft) {number(reject.get('p_draft'), 3)}, "
        f"p(target) {number(reject.get('p_target'), 3)}, rank {_known(reject.get('target_rank'))} for the target, "
        f"which chose {instead}"
    )


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _strip_with_cursor(records: Sequence[StepRecord], index: int, width: int, glyphs: Glyphs) -> list[Row]:
    begin = max(0, min(index - width // 2, len(records) - width))
    shown = records[begin : begin + width]
    steps = [record.step for record in shown]
    marks = [StepMark(s.get("verify_len") or 0, s.get("correct_drafts") or 0, str(s.get("mode"))) for s in steps]
    cursor = " " * (index - begin) + ("^" if glyphs.bullet.isascii() else "▲")
    return [*strip_rows(marks, width, 9, glyphs)[1:], [(cursor, "tick")]]
