"""A recorded session on stdout, one line a step, each at its time; for pipes and terminals without a screen."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sparkchat.ui.glyphs import Glyphs, glyphs
from sparkchat.ui.recorded import RecordedEngine, Recording
from sparkchat.ui.safe_text import one_line
from sparkchat.ui.stats import number, result_line
from sparkchat.ui.step_view import position_mark

Event = dict[str, Any]


def run_plain_replay(path: Path, *, speed: float = 1.0, ascii_only: bool = False) -> int:
    """Print the session; ``speed`` 2 is twice as fast, 0 prints it at once. Raises as ``Recording`` does."""
    recording = Recording(path)
    engine = RecordedEngine(recording, speed)
    printer = _Printer(glyphs(ascii_only))
    engine.start()
    has_ended = False
    while not has_ended:
        for event in engine.poll(None):
            line = printer.line(event)
            has_ended = has_ended or event["event"] == "recording_end"
            if line is not None:
                sys.stdout.write(one_line(line, ascii_only) + "\n")
        sys.stdout.flush()
    return 0


class _Printer:
    def __init__(self, marks: Glyphs) -> None:
        self._glyphs = marks
        self._texts: dict[str | None, str] = defaultdict(str)
        self._first_ns: int | None = None

    def line(self, event: Event) -> str | None:
        """What an event says, or None where it says nothing by itself."""
        kind, request_id = event["event"], event.get("id")
        if kind == "delta":
            self._texts[request_id] += event["text"]
            return None
        if kind == "ready":
            info = event["info"]
            notices = "".join(f"; {sentence}" for sentence in info["notices"])
            return f"{info.get('model') or 'unknown model'} + {info.get('drafter') or 'no drafter'}{notices}"
        if kind == "start":
            tokens, text = event.get("num_prompt_tokens"), event.get("prompt_text")
            asked = f" {self._quoted(text)}" if text else ""
            size = "-" if tokens is None else tokens
            return f"{request_id}: a question of {size} tokens, mode {event.get('mode')}{asked}"
        if kind == "step":
            return self._step(event, self._texts.pop(request_id, ""))
        if kind == "mode_change":
            return f"mode {event.get('from')} to {event['to']}"
        if kind == "end":
            rest = self._texts.pop(request_id, "")
            text = f"{self._quoted(rest)}  " if rest else ""
            return f"{request_id}: {text}{result_line(event['result'], self._glyphs.separator)}"
        return event["message"] if kind == "notice" else None

    def _step(self, step: Event, text: str) -> str:
        t_ns = step.get("t_ns")
        if t_ns is not None and self._first_ns is None:
            self._first_ns = t_ns
        seconds = None if t_ns is None or self._first_ns is None else (t_ns - self._first_ns) / 1e9
        drafts = len(step["draft_ids"])
        marks = "".join(position_mark(step, position, self._glyphs)[0] for position in range(min(drafts, 64)))
        reason = f"  {step['fallback']}" if step.get("fallback") else ""
        return (
            f"{number(seconds, 2):>8} s  {step['id']} step {step['i'] + 1}  {step['mode']}  "
            f"verified {step['verify_len']} of {drafts}  accepted {step['correct_drafts']}  "
            f"{marks + '  ' if marks else ''}{number(step.get('step_ms'))} ms  {self._quoted(text)}{reason}"
        )

    def _quoted(self, text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
