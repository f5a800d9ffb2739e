"""The whole live panel as lines of styled text: the newest step, the last steps, and the numbers of the answer."""

from __future__ import annotations

from typing import Any

from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.reported_view import reported_rows
from sparkchat.ui.safe_text import fit, text_width
from sparkchat.ui.stats import Snapshot, number
from sparkchat.ui.step_view import Row, step_rows, strip_rows

Info = dict[str, Any]
_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain_step_ms(info: Info) -> float | None:
    """Milliseconds of a plain decode step by the cost table in use; None without one."""
    table = info.get("cost_table") or {}
    if table.get("plain_ms"):
        return float(table["plain_ms"])
    rows, step_ms = table.get("rows") or (), table.get("step_ms") or ()
    return float(step_ms[0]) if rows and step_ms and rows[0] == 1 else None


def speed_up(rate: float | None, info: Info) -> float | None:
    """Tokens a second over those of plain decoding, one per plain step."""
    plain = plain_step_ms(info)
    return None if rate is None or plain is None else rate * plain / 1000.0


def number_lines(snapshot: Snapshot, info: Info) -> list[str]:
    """The numbers of the answer so far, the most telling first; a dash is "not measured"."""
    step = snapshot.step or {}
    now, plain = speed_up(snapshot.tokens_per_second_now, info), plain_step_ms(info)
    mean = speed_up(snapshot.tokens_per_second, info)
    where = "GPU" if str(info.get("device", "")).startswith("cuda") else "engine"
    lost = "-" if step.get("cap_trim") is None else step["cap_trim"]
    found = snapshot.calibration
    said = "-" if found is None else f"{found.predicted:.0%} -> {found.reached:.0%}, ECE {found.error:.3f}"
    return [
        f"{number(snapshot.tokens_per_second_now)} tok/s now  {number(snapshot.tokens_per_second)} mean",
        f"speed-up {_times(now)} now  {_times(mean)} mean",
        f"acceptance length {number(snapshot.mean_acceptance_length, 2)}",
        f"step {number(step.get('step_ms'))} ms  predicted {number(step.get('predicted_step_ms'))}",
        f"accepted {snapshot.num_accepted} of {snapshot.num_verified} verified",
        f"mean {number(snapshot.mean_step_ms)} ms  predicted {number(snapshot.mean_predicted_ms)}",
        f"plain step {number(plain)} ms  {where} idle {_percent(snapshot.idle_share)}",
        f"rows {step.get('rows', '-')}  spared {step.get('rows_reclaimed', '-')}  lost {lost}",
        f"spared in all {snapshot.rows_reclaimed} rows, {_bytes(snapshot.bytes_reclaimed)}",
        f"calibration {said}",
    ]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def number_rows(snapshot: Snapshot, info: Info, width: int, glyphs: Glyphs) -> list[Row]:
    return [[(fit(line, width, glyphs.ellipsis), "text")] for line in number_lines(snapshot, info)]


def panel_rows(snapshot: Snapshot, info: Info, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The whole panel: side by side when it is wide, one above the other when it is tall."""
    if snapshot.reported is not None:
        return reported_rows(snapshot.reported, width, height, glyphs)
    if snapshot.step is None:
        return step_rows(snapshot, width, height, glyphs)
    if width >= 70:
        return _two_columns(snapshot, info, width, height, glyphs)
    numbers = number_rows(snapshot, info, width, glyphs)
    if height < 12:
        return [*numbers[:1], *step_rows(snapshot, width, height - 1, glyphs)][:height]
    # The step comes first; the last numbers go before any position of it does.
    numbers = numbers[: max(height - len(snapshot.step.get("draft_ids") or ()) - 6, 3)]
    step = step_rows(snapshot, width, height - len(numbers) - 2, glyphs)
    free = height - len(numbers) - len(step) - 2
    strip = strip_rows(snapshot.strip, width, min(free, 9), glyphs)
    return [*step, [], *strip, *([[]] if strip else []), *numbers][:height]


def _two_columns(snapshot: Snapshot, info: Info, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    left_width = min(width // 2, 48)
    right_width = width - left_width - 2
    left = step_rows(snapshot, left_width, height, glyphs)
    numbers = number_rows(snapshot, info, right_width, glyphs)
    strip = strip_rows(snapshot.strip, right_width, max(height - len(numbers), min(3, height - 3)), glyphs)
    right = [*strip, *numbers][:height]
    return [_beside(left, right, row, left_width) for row in range(max(len(left), len(right)))]


def _beside(left: list[Row], right: list[Row], row: int, left_width: int) -> Row:
    first = left[row] if row < len(left) else []
    second = right[row] if row < len(right) else []
    used = sum(text_width(text) for text, _ in first)
    return [*first, (" " * (left_width - used + 2), "text"), *second]
