"""One decode step, and the run of the last ones, as lines of styled text; no Textual, so every picture can be tested.

The bar of a position is its survival (the chance that it and all before it are accepted), the tick its own confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.safe_text import fit, one_line, text_width
from sparkchat.ui.stats import Snapshot, StepMark

Run = tuple[str, str]
"""(text, style name); the names are those of the panel's styles."""
Row = list[Run]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MIN_BAR = 6


def position_mark(step: dict[str, Any], position: int, glyphs: Glyphs) -> Run:
    """What became of the draft at ``position`` (0 is the first)."""
    accepted = step.get("correct_drafts") or 0
    if position < accepted:
        return glyphs.accepted, "accepted"
    if position >= (step.get("verify_len") or 0):
        return glyphs.unverified, "unverified"
    if position < accepted + (step.get("cap_trim") or 0):
        return glyphs.trimmed, "trimmed"
    reject = step.get("reject")
    if reject is not None and reject.get("pos") == position:
        return glyphs.rejected, "rejected"
    return glyphs.unverified, "unverified"


def bar(survival: float | None, confidence: float | None, width: int, glyphs: Glyphs) -> Row:
    """Survival as a filled bar, confidence as a tick on it; a dash where nothing was measured."""
    if survival is None:
        return [(fit("- not measured", width, glyphs.ellipsis), "dim")]
    halves = round(min(max(survival, 0.0), 1.0) * width * 2)
    cells = [glyphs.bar] * (halves // 2) + [glyphs.half_bar] * (halves % 2)
    cells += [glyphs.bar_space] * (width - len(cells))
    if confidence is None:
        return [("".join(cells), "bar")]
    tick = min(int(min(max(confidence, 0.0), 1.0) * width), width - 1)
    return [("".join(cells[:tick]), "bar"), (glyphs.tick, "tick"), ("".join(cells[tick + 1 :]), "bar")]


def step_rows(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The newest step: one row per draft position, the cut of the verify length, and the target's own token."""
    step = snapshot.step
    if step is None:
        return [[(fit("no step yet", width, glyphs.ellipsis), "dim")]][:height]
    drafts = list(step.get("draft_text") or step.get("draft_ids") or ())
    title = f"step {step.get('i', 0) + 1}  {_mode_text(step)}"
    rows: list[Row] = [[(fit(title, width, glyphs.ellipsis), "title")]]
    if not drafts:
        reason = step.get("fallback") or ("mode off" if step.get("mode") == "off" else "")
        line = "plain step, nothing drafted" + (f": {one_line(str(reason))}" if reason else "")
        rows.append([(fit(line, width, glyphs.ellipsis), "dim")])
        return rows[:height]
    verify_len = step.get("verify_len") or 0
    positions = [_position_row(step, k, str(text), width, glyphs) for k, text in enumerate(drafts)]
    positions.insert(min(verify_len, len(drafts)), [_cut(verify_len, len(drafts), width, glyphs)])
    if height > len(rows) + len(positions) + 1:
        rows.append([(fit(_legend(glyphs), width, glyphs.ellipsis), "dim")])
    rows += positions
    rows.append(_target_row(snapshot, width, glyphs))
    return _shortened(rows, height, width, glyphs)


def _legend(glyphs: Glyphs) -> str:
    return f"{glyphs.bar} survival {glyphs.tick} confidence {glyphs.accepted} kept {glyphs.rejected} not"


def _mode_text(step: dict[str, Any]) -> str:
    mode, asked = step.get("mode"), step.get("mode_requested")
    return f"{mode}" if asked in (None, mode) else f"{mode} (asked for {asked})"


def _position_row(step: dict[str, Any], position: int, text: str, width: int, glyphs: Glyphs) -> Row:
    mark, style = position_mark(step, position, glyphs)
    survival, confidence = _at(step.get("survival"), position), _at(step.get("confidence"), position)
    token_width = min(12, max(width // 4, 4))
    bar_width = max(width - token_width - 12, _MIN_BAR)
    value = "  - " if survival is None else f"{survival:4.2f}"
    token = fit(repr(one_line(text, glyphs.bullet.isascii()))[1:-1], token_width, glyphs.ellipsis)
    row = [(f"{position + 1:>2} ", "dim"), *bar(survival, confidence, bar_width, glyphs), (f" {value} ", "dim")]
    row += [(f"{mark} ", style), (token, "rejected-text" if style == "rejected" else "text")]
    return _cropped(row, width)


def _cut(verify_len: int, total: int, width: int, glyphs: Glyphs) -> Run:
    label = f" verify {verify_len} of {total} "
    return fit(glyphs.cut * 3 + label + glyphs.cut * width, width, glyphs.cut), "cut"


def _target_row(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Row:
    step = snapshot.step or {}
    if step.get("bonus_token") is None:
        return [(fit(f"   {glyphs.separator} ended inside the block", width, glyphs.ellipsis), "dim")]
    what = "target chose" if step.get("reject") is not None else "bonus"
    text = f" {snapshot.bonus_text!r}" if snapshot.bonus_text else ""
    line = one_line(f"{what}{text}", glyphs.bullet.isascii())
    shown = fit(line, width - 5, glyphs.ellipsis).rstrip(" ")
    return [("   ", "text"), (glyphs.bonus, "bonus"), (" ", "text"), (shown, "bonus")]


def _at(values: Sequence[float | None] | None, index: int) -> float | None:
    return values[index] if values and index < len(values) else None


def _cropped(row: Row, width: int) -> Row:
    kept: Row = []
    left = width
    for text, style in row:
        if left <= 0:
            break
        part = text if text_width(text) <= left else fit(text, left, "")
        kept.append((part, style))
        left -= text_width(part)
    return kept


def _shortened(rows: list[Row], height: int, width: int, glyphs: Glyphs) -> list[Row]:
    """Keep the title, the first positions and the last row, and say how many are not shown."""
    if len(rows) <= height or height < 3:
        return rows[:height]
    hidden = len(rows) - height + 1
    return [*rows[: height - 2], [(fit(f"   {glyphs.ellipsis} {hidden} more", width), "dim")], rows[-1]]


def strip_rows(marks: Sequence[StepMark], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The last steps, one column each: how many drafts were verified, and how many of them were accepted."""
    if height <= 0 or width < 8 or not marks:
        return []
    shown = marks[-width:]
    levels = max((mark.verify_len for mark in shown), default=0)
    if levels and height - 1 >= levels:
        legend = f"{glyphs.step_accepted} accepted {glyphs.step_verified} verified"
        rows = [[("".join(_cell(mark, level, glyphs) for mark in shown), "bar")] for level in range(levels, 0, -1)]
    else:
        verified = [(_sparkline([mark.verify_len for mark in shown], max(levels, 1), glyphs), "dim")]
        accepted = [(_sparkline([mark.accepted for mark in shown], max(levels, 1), glyphs), "bar")]
        legend = "verified / accepted" if height >= 3 else "accepted"
        rows = [verified, accepted] if height >= 3 else [accepted]
    title: Row = [(fit(f"last {len(shown)} steps: {legend}", width, glyphs.ellipsis), "dim")]
    return [title, *rows][:height]


def _cell(mark: StepMark, level: int, glyphs: Glyphs) -> str:
    if level <= mark.accepted:
        return glyphs.step_accepted
    return glyphs.step_verified if level <= mark.verify_len else " "


def _sparkline(values: Sequence[int], top: int, glyphs: Glyphs) -> str:
    if glyphs.bullet.isascii():
        return "".join(str(min(value, 9)) for value in values)
    return "".join(_EIGHTHS[round(min(value, top) * 8 / top)] for value in values)
