"""What the title and the status bar say, as parts that go one by one when the row is short."""

from __future__ import annotations

from typing import Any

from sparkchat.ui.reported_view import reported_parts
from sparkchat.ui.stats import Snapshot, number
from sparkchat.ui.widgets.bars import Part


def title_parts(label: str, info: dict[str, Any], trace: str | None, branch: str, has_more_below: bool) -> list[Part]:
    where = f"{info.get('device', '')} {info.get('dtype', '')}".strip()
    return [
        (1, "sparkchat", "strong"),
        (0, label, "text"),
        (4, where, "dim"),
        (5, f"block {info['block_size']}" if info.get("block_size") else "", "dim"),
        (3, branch, "text"),
        (3, f"trace {trace}" if trace else "", "dim"),
        (2, "more below (End)" if has_more_below else "", "strong"),
    ]


def status_parts(mode: str, state: str, snapshot: Snapshot) -> list[Part]:
    step = snapshot.step or {}
    parts: list[Part] = [(0, mode, "strong"), (1, state, "text")]
    if snapshot.num_steps:
        parts += [
            (2, f"{number(snapshot.tokens_per_second_now)} tok/s", "text"),
            (6, f"mean {number(snapshot.tokens_per_second)}", "dim"),
            (3, f"acceptance {number(snapshot.mean_acceptance_length, 2)}", "text"),
            (4, f"verify {step.get('verify_len', '-')}", "text"),
            (5, f"step {number(step.get('step_ms'))}/{number(step.get('predicted_step_ms'))} ms", "dim"),
        ]
    if snapshot.reported is not None:
        parts += reported_parts(snapshot.reported)
    return [*parts, (7, "F1 help", "dim")]
