"""Verified blocks, which confidence temperatures are fitted to: from answers, traces, or what ``train`` leaves."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.params import SamplingParams
from sparkchat.sampling_kind import sampling_kind
from sparkchat.trace.calibration import judged_labels

_SHAPING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass
class Blocks:
    """N blocks of up to g drafts each, as lists that JSON can carry."""

    logits: list[list[float]] = field(default_factory=list)
    """Raw confidence logits, as many as were drafted."""
    accepted: list[int] = field(default_factory=list)
    """Leading drafts accepted."""
    judged: list[int] = field(default_factory=list)
    """Leading drafts that the target judged."""
    chat: list[int] = field(default_factory=list)
    """Which answer a block is from: fitting and measuring never share an answer."""
    kind: list[str | None] = field(default_factory=list)
    """Kind of sampling (sampling_kind.py) of the answer at that step; None where that is not known."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def width(self) -> int:
        return max(map(len, self.logits), default=0)

    def add_step(self, step: Mapping[str, Any], chat: int, kind: str | None = None) -> None:
        """One ``step`` event or trace line. One that says nothing about its drafts is left out."""
        labels, logits = judged_labels(step), step.get("confidence_logit") or []
        if labels and len(logits) >= len(labels) and None not in logits:
            self._add([float(value) for value in logits], sum(labels), len(labels), chat, kind)

    def extend(self, other: Blocks) -> None:
        first = max(self.chat, default=-1) + 1
        self.logits += other.logits
        self.accepted += other.accepted
        self.judged += other.judged
        self.chat += [first + chat for chat in other.chat]
        self.kind += other.kind

    def to_json(self) -> dict[str, Any]:
        """Rows padded to one width; what pads them is never judged."""
        width = self.width
        rows = [row + [0.0] * (width - len(row)) for row in self.logits]
        return {
            "logits": rows,
            "accepted": self.accepted,
            "judged": self.judged,
            "chat": self.chat,
            "kind": self.kind,
        }

    def _add(self, logits: list[float], accepted: int, judged: int, chat: int, kind: str | None = None) -> None:
        self.logits.append(logits)
        self.accepted.append(accepted)
        self.judged.append(judged)
        self.chat.append(chat)
        self.kind.append(kind)


def read_blocks(files: Sequence[Path]) -> Blocks:
    """Blocks of traces (``*.spark.jsonl``) and of the ``confidence-*.npz`` files of ``sparkchat train``.

    Raises UsageError for a file that is neither, DamagedFile for one that cannot be read.
    """
    blocks = Blocks()
    for file in files:
        blocks.extend(_from_arrays(file) if file.suffix == ".npz" else _from_trace(file))
    return blocks


def _from_trace(file: Path) -> Blocks:
    from sparkchat.trace import read_lines

    blocks = Blocks()
    settings: dict[int, dict[str, Any]] = {}
    for line in read_lines(file):
        turn = int(line.data.get("turn") or 0)
        if line.type == "turn":
            settings[turn] = dict(line.data.get("sampling") or {})
        elif line.type == "setting_change" and turn in settings:
            settings[turn] |= {name: change.get("to") for name, change in (line.data.get("changes") or {}).items()}
        elif line.type == "step":
            blocks.add_step(line.data, turn, _kind_of(settings.get(turn)))
    return blocks


def _kind_of(settings: Mapping[str, Any] | None) -> str | None:
    """None for settings that a trace of another version tells otherwise."""
    if not settings:
        return None
    known = {name: settings[name] for name in _SHAPING if settings.get(name) is not None}
    try:
        bias = tuple((int(token), float(value)) for token, value in settings.get("logit_bias") or ())
        return sampling_kind(SamplingParams(**known, logit_bias=bias))
    except (TypeError, ValueError, UsageError):
        return None


def _from_arrays(file: Path) -> Blocks:
    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as arrays:
            logits, accepted, counted = (arrays[name] for name in ("logits", "accepted", "counted"))
    except FileNotFoundError:
        raise UsageError(f"{file} is not there; give a trace or a confidence-*.npz of sparkchat train") from None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedFile(f"{file} holds no confidences of sparkchat train ({error})") from None
    if not logits.ndim == accepted.ndim == counted.ndim == 2 or not logits.shape == accepted.shape == counted.shape:
        raise DamagedFile(f"{file} holds no confidences of sparkchat train (the arrays differ in shape)")
    counted = counted.astype(bool).cumprod(axis=1)
    reached = accepted.astype(bool).cumprod(axis=1) * counted
    blocks = Blocks()
    # Rounds of all chats lie one behind the other; neighbours are of different chats.
    for number, row in enumerate(logits.tolist()):
        if np.isfinite(logits[number]).all():
            blocks._add(row, int(reached[number].sum()), int(counted[number].sum()), number)
    return blocks


def blocks_of(events: Iterable[Mapping[str, Any]], chat: int) -> Blocks:
    """Blocks of the ``step`` events among these."""
    blocks = Blocks()
    for event in events:
        if event.get("event") == "step":
            blocks.add_step(event, chat)
    return blocks
