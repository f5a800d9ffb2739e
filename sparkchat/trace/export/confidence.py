"""Confidence records, as DeepSpec's calibration script reads them: one line of ``logits`` and ``labels`` a block.

``logits`` are the confidence head's own, before any temperature; ``labels[k]`` is 1 when the accepted prefix reached
draft k + 1. A block is as long as the target judged it: whole in static and cap-accept, the verified part in compact
(DeepSpec pull request 63; its script takes rows of different lengths).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from sparkchat.errors import UsageError
from sparkchat.strict_json import dumps
from sparkchat.trace.calibration import judged_labels
from sparkchat.trace.reader import Damage, read_lines


def write_confidence(trace: Path, write: Callable[[str], object], damage: Damage) -> list[str]:
    """Raises UsageError when no step has a confidence to record."""
    num_records = num_cut = 0
    for line in read_lines(trace, damage):
        record = confidence_record(line.data) if line.type == "step" else None
        if record is not None:
            write(dumps(record) + "\n")
            num_records += 1
            num_cut += len(record["logits"]) < len(line.data["draft_ids"])
    if not num_records:
        raise UsageError(
            f"trace {trace} has no step with confidences that the target judged; record one with --mode static "
            "and a drafter that has a confidence head"
        )
    if not num_cut:
        return []
    return [
        f"{num_cut} of {num_records} blocks were verified in part, so later positions have fewer labels; "
        "for a calibration of every position record with --mode static"
    ]


def confidence_record(step: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """None where nothing is known of the first draft."""
    judged = zip(step.get("confidence_logit") or (), judged_labels(step), strict=False)
    pairs = list(takewhile(lambda pair: pair[0] is not None, judged))
    if not pairs:
        return None
    return {"logits": [logit for logit, _ in pairs], "labels": [int(label) for _, label in pairs]}
