"""CSV: one row a step. An empty cell is "not measured".

Lists are numbers with spaces between. Text is written as a JSON string, so that a cell is one line, loses nothing, and
never begins with a sign that a spreadsheet would take for a formula.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkchat.strict_json import dumps
from sparkchat.trace.counts import accepted_drafts
from sparkchat.trace.export.words import UNSHOWN
from sparkchat.trace.reader import Damage, read_lines

Write = Callable[[str], object]
Cell = Callable[[Mapping[str, Any]], Any]


def write_step_table(trace: Path, write: Write, damage: Damage) -> list[str]:
    table = csv.writer(_Sink(write), lineterminator="\n")
    has_head = False
    for line in read_lines(trace, damage):
        if not has_head:
            # Not before the first line: a file that is no trace gives an error and nothing else.
            table.writerow(("line", *COLUMNS))
            has_head = True
        if line.type == "step":
            table.writerow((line.number, *(cell(line.data) for cell in COLUMNS.values())))
    return []


class _Sink:
    def __init__(self, write: Write) -> None:
        self.write = write


def _plain(name: str) -> Cell:
    return lambda step: step.get(name)


def _text(name: str) -> Cell:
    return lambda step: None if step.get(name) is None else _quoted(step[name])


def _numbers(name: str) -> Cell:
    return lambda step: " ".join("-" if value is None else f"{value}" for value in step.get(name) or ())


def _reject(name: str) -> Cell:
    return lambda step: (step.get("reject") or {}).get(name)


def _streamed(step: Mapping[str, Any]) -> str:
    return _quoted("".join(piece["text"] for piece in step.get("deltas") or ()))


def _quoted(value: Any) -> str:
    """JSON with every character escaped that is not seen, or turns the direction of writing."""
    return UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", dumps(value))


COLUMNS: dict[str, Cell] = {
    **{name: _plain(name) for name in ("turn",)},
    "id": _text("id"),
    **{name: _plain(name) for name in ("i", "t_ns")},
    **{name: _text(name) for name in ("mode", "mode_requested")},
    **{name: _plain(name) for name in ("prefix_len", "budget", "verify_len", "rows", "correct_drafts", "cap_trim")},
    "num_drafts": lambda step: len(step["draft_ids"]),
    "num_accepted": accepted_drafts,
    "num_committed": lambda step: len(step["committed_ids"]),
    "bonus_token": _plain("bonus_token"),
    **{
        f"reject_{name}": _reject(name)
        for name in ("pos", "draft_id", "target_id", "p_draft", "p_target", "target_rank")
    },
    **{
        name: _plain(name)
        for name in (
            *("draft_ms", "plan_ms", "verify_ms", "accept_ms", "step_ms", "predicted_step_ms", "predicted_theta"),
            *("tokens_per_second", "rows_reclaimed", "bytes_reclaimed"),
        )
    },
    "fallback": _text("fallback"),
    **{
        name: _numbers(name) for name in ("draft_ids", "committed_ids", "draft_prob", "target_prob", "confidence_logit")
    },
    **{name: _numbers(name) for name in ("confidence", "survival")},
    "draft_text": _text("draft_text"),
    "text": _streamed,
}
"""Name of the column -> its cell."""
