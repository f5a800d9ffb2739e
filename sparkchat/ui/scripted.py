"""An engine that plays written answers at a steady pace: for tests of the front ends and for measuring their cost.

It speaks the same events as the real engine, from a seeded generator, without a model. What it answers is chosen by
words in the prompt (see :data:`SCRIPTS`); drafts are right with a fixed probability, so lengths vary as in real runs.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkchat.params import GenerateRequest, Mode

Event = dict[str, Any]

_PIECE = re.compile(r"\n+|[^\S\n]*[^\s]{1,5}|[^\S\n]+")

HOSTILE = (
    "[/] [/INST] [bold red]x [0] Hello [r [/home/me] [link=x]y a[i][j] [b + should\n"
    "if 0<foo or foo>10 std::vector<int> <div>hi</div> <!-- x --> &lt;b&gt;\n"
    "escape \x1b[31mred\x1b[0m \x1b]0;title\x07 bell\x07 back\x08space c1 \x9b31m bidi \u202egnp.exe\u202c end\n"
    "wide 你好 full ＡＢ family 👨‍👩‍👧 keycap 1️⃣ flag 🇫🇷 Hebrew שלום Thai ไทย marks e\u0301\u0302 done\n"
)
_PROSE = (
    "A draft is a guess about what comes next, and a **guess** costs little when it is checked in one pass. "
    "The target reads the whole block at once, keeps the part it agrees with and adds one token of its own. "
    "So the text is the target's, word for word, and only the time it takes is different.\n\n"
    "- the drafter proposes\n- the target verifies\n- the rest is thrown away\n\n"
)
_CODE = (
    "def verify(block, target):\n    # compare each draft with the target's choice\n"
    "    for position, draft in enumerate(block):\n        if target[position] != draft:\n"
    '            return position, "rejected"\n    return len(block), "accepted"\n\n'
)
_TABLE = "| mode | rows | tokens |\n|---|---:|---|\n" + "".join(f"| row {i} | {i * 7} | `x{i}` |\n" for i in range(40))

SCRIPTS: dict[str, str] = {
    "prose": _PROSE * 120,
    "code": "Here it is:\n\n```python\n" + _CODE * 120 + "```\n\nThat is all.\n",
    "table": _TABLE + "\nafter the table\n",
    "mixed": _PROSE * 20 + "```python\n" + _CODE * 60 + "```\n\n" + _TABLE + "\n",
    "hostile": HOSTILE,
    "line": "x" * 100_000,
    "short": "Hello there, this is a short answer.",
}


@dataclass(frozen=True)
class ScriptedOptions:
    """How the scripted engine behaves."""

    tokens_per_second: float = 50.0
    seed: int = 1
    block_size: int = 5
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    mode: Mode = "static"
    accuracy: float = 0.75
    """Chance that a draft is what the target wants, at the first position; it falls by a tenth per position."""
    has_drafter: bool = True
    reason_off: str | None = None
    has_cost_table: bool = True
    text: str | None = None
    """Answer every prompt with this."""
    repeat: int = 1
    """How often an answer says what it says."""
    load_error: tuple[str, str] | None = None
    """(error class name, message) instead of becoming ready."""


@dataclass
class _Running:
    request: GenerateRequest
    events: Iterator[tuple[float, Event]]
    due: float
    event: Event | None = None
    delivered: list[int] = field(default_factory=list)
    text: str = ""
    thinking: str = ""
    steps: list[Event] = field(default_factory=list)


class ScriptedEngine:
    """The face of ``EngineClient`` over a script; usable from two threads, without a process."""

    def __init__(self, options: ScriptedOptions | None = None) -> None:
        self.options = options or ScriptedOptions()
        self._random = random.Random(self.options.seed)
        self._mode: Mode = self.options.mode
        self._wake = threading.Condition()
        self._out: list[tuple[float, Event]] = []
        self._waiting: list[GenerateRequest] = []
        self._running: _Running | None = None
        self._ids: dict[str, int] = {}
        self._is_open = False
        self.requests: list[GenerateRequest] = []

    @property
    def is_running(self) -> bool:
        return self._is_open

    def start(self) -> None:
        now, load = time.monotonic(), self.options.load_seconds
        self._is_open = True
        stages = ("weights", "drafter", "cost_table")
        for index, stage in enumerate(stages):
            event = {"event": "loading", "stage": stage, "message": f"loading {stage}", "done": index, "total": 3}
            self._out.append((now + load * index / 3, event))
        if self.options.load_error:
            name, message = self.options.load_error
            self._out.append((now + load, {"event": "error", "error": name, "message": message}))
        else:
            self._out.append((now + load, {"event": "ready", "info": self._info()}))

    def finish_loading(self) -> None:
        """Become ready now."""
        with self._wake:
            self._out = [(0.0, event) for _, event in self._out]
            self._wake.notify_all()

    def generate(self, request: GenerateRequest) -> None:
        with self._wake:
            self.requests.append(request)
            self._waiting.append(request)
            self._wake.notify_all()

    def set_mode(self, mode: Mode) -> None:
        with self._wake:
            event = {"event": "mode_change", "id": None, "from": self._mode, "to": mode, "t_ns": time.monotonic_ns()}
            self._mode = mode
            self._out.append((time.monotonic(), event))
            self._wake.notify_all()

    def change(self, request_id: str, sampling: dict[str, Any] | None = None, think: bool | None = None) -> None:
        with self._wake:
            running = self._running
            if running is None or running.request.id != request_id:
                return
            before, changes = running.request.sampling, {}
            for name, value in (sampling or {}).items():
                changes[name] = {"from": getattr(before, name), "to": value}
            if think is not None:
                changes["think"] = {"from": not think, "to": think}
            running.request = running.request.with_sampling(**(sampling or {}))
            event = {"event": "setting_change", "id": request_id, "changes": changes, "t_ns": time.monotonic_ns()}
            self._out.append((time.monotonic(), event))
            self._wake.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._wake:
            if self._running is not None and self._running.request.id == request_id:
                self._end_step(self._running)
                self._finish("cancelled")
            else:
                self._waiting = [request for request in self._waiting if request.id != request_id]
            self._wake.notify_all()

    def crash(self, message: str = "the engine was ended by SIGABRT") -> None:
        """End as if the process had died."""
        with self._wake:
            self._running = None
            self._out.append((time.monotonic(), {"event": "crashed", "message": message, "log": ""}))
            self._is_open = False
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            self._is_open = False
            self._wake.notify_all()

    def poll(self, timeout: float | None = 0.0) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wake:
            while True:
                now = time.monotonic()
                found = self._due(now)
                if found or (deadline is not None and now >= deadline) or not self._is_open:
                    return found
                upcoming = [due for due, _ in self._out]
                if self._running is not None:
                    upcoming.append(self._running.due)
                ends = [t for t in (deadline, min(upcoming, default=None)) if t is not None]
                self._wake.wait(max(0.0, min(ends) - now) if ends else None)

    def _due(self, now: float) -> list[Event]:
        found = [event for due, event in self._out if due <= now]
        self._out = [(due, event) for due, event in self._out if due > now]
        is_ready = not any(event.get("event") in ("ready", "error") for _, event in self._out)
        if self._running is None and self._waiting and is_ready and self._is_open:
            self._begin(self._waiting.pop(0), now)
        while self._running is not None and self._running.due <= now:
            running = self._running
            if running.event is not None:
                found.append(running.event)
            following = next(running.events, None)
            if following is None:
                self._finish("stop")
                found += [event for _, event in self._out]
                self._out = []
            else:
                running.due += following[0]
                running.event = following[1]
        return found

    def _begin(self, request: GenerateRequest, now: float) -> None:
        running = _Running(request, iter(()), now)
        running.events = self._play(running)
        self._running = running

    def _finish(self, reason: str) -> None:
        running, self._running = self._running, None
        assert running is not None
        self._out.append((0.0, {"event": "end", "id": running.request.id, **self._end(running, reason)}))

    def _end_step(self, running: _Running) -> None:
        """Hand out what is under way, up to the step it belongs to: an engine stops between steps."""
        event = running.event
        while event is not None:
            self._out.append((0.0, event))
            following = next(running.events, None) if event["event"] == "delta" else None
            event = following[1] if following is not None else None
        running.event = None

    def _text_for(self, request: GenerateRequest) -> tuple[str, str]:
        """(thinking, answer) for the last thing that was asked."""
        asked = request.prompt or (request.messages[-1]["content"] if request.messages else "")
        if self.options.text is not None:
            return "", self.options.text
        answer = next((text for word, text in SCRIPTS.items() if word in asked.lower()), SCRIPTS["short"])
        answer *= self.options.repeat
        thinking = "Let me think about this.\nIt is not hard.\n" if "think" in asked.lower() else ""
        return thinking, answer

    def _mode_of(self, running: _Running) -> Mode:
        return running.request.mode or self._mode

    def _token(self, piece: str) -> int:
        return self._ids.setdefault(piece, len(self._ids))

    def _play(self, running: _Running) -> Iterator[tuple[float, Event]]:
        """(seconds after the event before, event) of one answer."""
        request, options = running.request, self.options
        thinking, answer = self._text_for(request)
        pieces = [(p, "thinking") for p in _PIECE.findall(thinking)] + [(p, "answer") for p in _PIECE.findall(answer)]
        limit = request.sampling.max_tokens
        pieces = pieces[:limit] if limit is not None else pieces
        prompt_ids = list(range(12))
        yield (
            options.prompt_seconds,
            {
                "event": "start",
                "id": request.id,
                "sampling": {"temperature": request.sampling.temperature, "seed": options.seed},
                "mode": self._mode,
                "block_size": options.block_size,
                "prompt_token_ids": prompt_ids,
                "cached_tokens": 0,
                "t_ns": time.monotonic_ns(),
            },
        )
        if pieces:
            yield 0.01, self._delta(running, pieces[:1], ["prefill"])
        at = 1
        while at < len(pieces):
            step = self._step(
                running, [piece for piece, _ in pieces[at : at + options.block_size + 1]], len(prompt_ids) + at
            )
            count = len(step["committed_ids"])
            run = pieces[at : at + count]
            origins = ["draft"] * step["correct_drafts"] + ["bonus"] * (count - step["correct_drafts"])
            pause = count / options.tokens_per_second
            channels = sorted({channel for _, channel in run}, reverse=True)
            for channel in channels:
                part = [(piece, origin) for (piece, c), origin in zip(run, origins, strict=True) if c == channel]
                yield pause, self._delta(running, [(p, channel) for p, _ in part], [origin for _, origin in part])
                pause = 0.0
            step["step_ms"] = 1000.0 * count / options.tokens_per_second
            running.steps.append(step)
            yield 0.0, step
            at += count

    def _delta(self, running: _Running, run: list[tuple[str, str]], origins: list[str]) -> Event:
        text = "".join(piece for piece, _ in run)
        ids = [self._token(piece) for piece, _ in run]
        running.delivered += ids
        if run[0][1] == "answer":
            running.text += text
        else:
            running.thinking += text
        return {
            "event": "delta",
            "id": running.request.id,
            "text": text,
            "token_ids": ids,
            "channel": run[0][1],
            "origins": origins if self._mode_of(running) != "off" else ["plain"] * len(ids),
        }

    def _step(self, running: _Running, wanted: list[str], prefix_len: int) -> Event:
        """One step whose target text is ``wanted``: drafts, their confidence, what was verified and accepted."""
        options, mode = self.options, self._mode_of(running)
        drafting = options.has_drafter and mode != "off"
        size = min(options.block_size, len(wanted) - 1) if drafting else 0
        right = [self._random.random() < options.accuracy * 0.9**k for k in range(size)]
        confidence = [
            min(0.99, max(0.02, 0.9 * options.accuracy * 0.9**k + (0.2 if ok else -0.2))) for k, ok in enumerate(right)
        ]
        survival: list[float] = []
        for value in confidence:
            survival.append(value * (survival[-1] if survival else 1.0))
        planned = sum(value > 0.3 for value in survival) if options.has_cost_table else size
        verify_len = planned if mode == "compact" else size
        alive = next((k for k, ok in enumerate(right) if not ok), size)
        full = min(alive, verify_len, len(wanted) - 1)
        correct = min(full, planned) if mode == "cap-accept" else full
        drafts = [wanted[k] if right[k] and k < len(wanted) else f" no{k}" for k in range(size)]
        committed = wanted[: correct + 1]
        rejected = full == alive < verify_len and correct == full
        return {
            "event": "step",
            "id": running.request.id,
            "i": len(running.steps),
            "t_ns": time.monotonic_ns(),
            "mode": mode if options.has_drafter else "off",
            "mode_requested": mode,
            "prefix_len": prefix_len,
            "draft_ids": [self._token(piece) for piece in drafts],
            "draft_text": drafts,
            "draft_prob": confidence,
            "target_prob": [(0.9 if right[k] else 0.1) if k < verify_len else None for k in range(size)],
            "confidence_logit": [0.0] * size,
            "confidence": confidence,
            "survival": survival,
            "budget": verify_len + 1,
            "verify_len": verify_len,
            "rows": verify_len + 1,
            "correct_drafts": correct,
            "cap_trim": None if mode == "compact" else full - correct,
            "committed_ids": [self._token(piece) for piece in committed],
            "bonus_token": self._token(committed[-1]) if committed else None,
            "reject": {
                "pos": full,
                "draft_id": self._token(drafts[full]),
                "target_id": self._token(committed[-1]),
                "p_draft": confidence[full],
                "p_target": 0.1,
                "target_rank": 2,
            }
            if rejected
            else None,
            "draft_ms": 1.0,
            "plan_ms": 0.1,
            "verify_ms": 5.0,
            "accept_ms": 0.2,
            "step_ms": None,
            "predicted_step_ms": 6.0 + verify_len if options.has_cost_table else None,
            "predicted_theta": None,
            "graph": {"replayed": False, "key": None},
            "fallback": None if options.has_cost_table or mode != "compact" else "no cost table",
            "rows_reclaimed": size - verify_len,
            "bytes_reclaimed": 0,
            "tokens_per_second": options.tokens_per_second,
        }

    def _end(self, running: _Running, reason: str) -> dict[str, Any]:
        steps = running.steps
        accepted = [step["correct_drafts"] for step in steps]
        histogram = [accepted.count(n) for n in range(self.options.block_size + 1)]
        committed = sum(len(step["committed_ids"]) for step in steps)
        if running.request.sampling.max_tokens == len(running.delivered) and reason == "stop":
            reason = "length"
        result = {
            "schema": "sparkchat.result/1",
            "model": "scripted",
            "drafter": "scripted-drafter" if self.options.has_drafter else None,
            "mode": self._mode_of(running),
            "text": running.text,
            "prompt_token_ids": list(range(12)),
            "token_ids": list(running.delivered),
            "finish_reason": reason,
            "stop": None,
            "error": None,
            "usage": {"prompt_tokens": 12, "completion_tokens": len(running.delivered), "cached_tokens": 0},
            "speculation": {
                "num_steps": len(steps),
                "num_proposed_draft_tokens": sum(len(step["draft_ids"]) for step in steps),
                "num_verified_draft_tokens": sum(step["verify_len"] for step in steps),
                "num_accepted_draft_tokens": sum(accepted),
                "mean_acceptance_length": committed / len(steps) if steps else None,
                "acceptance_histogram": histogram,
                **_by_position(steps, self.options.block_size),
                "reason_off": self.options.reason_off,
            },
            "timing": {
                "load_ms": self.options.load_seconds * 1000,
                "ttft_ms": self.options.prompt_seconds * 1000 + 10,
                "decode_ms": committed * 1000 / self.options.tokens_per_second,
                "tokens_per_second": self.options.tokens_per_second if committed else None,
            },
        }
        return {"result": result, "thinking": running.thinking}

    def _info(self) -> dict[str, Any]:
        table = {"id": "scripted", "source": "profile", "rows": [1, 2, 6], "step_ms": [6.0, 7.0, 9.0], "plain_ms": 6.0}
        return {
            "model": "scripted",
            "drafter": "scripted-drafter" if self.options.has_drafter else None,
            "block_size": self.options.block_size if self.options.has_drafter else None,
            "mode": self._mode,
            "reason_off": self.options.reason_off,
            "device": "cpu",
            "dtype": "float32",
            "context": 4096,
            "vocab_size": 1000,
            "threads": 1,
            "load_ms": self.options.load_seconds * 1000,
            "temperatures": None,
            "cost_table": table if self.options.has_cost_table else None,
            "versions": {"sparkchat": "0", "python": "3", "torch": None, "transformers": None},
            "model_revision": None,
            "drafter_revision": None,
            "model_sha256": None,
            "drafter_sha256": None,
            "heads": {"markov": "vanilla", "confidence": True},
            "kernels": {},
            "graphs": False,
            "chat_template": "checkpoint",
            "notices": [],
        }


def _by_position(steps: list[Event], size: int) -> dict[str, list[int]]:
    """Counts of a result by the place of a draft in its block."""
    proposed = [len(step["draft_ids"]) for step in steps]
    verified = [step["verify_len"] for step in steps]
    accepted = [step["correct_drafts"] for step in steps]
    found = {
        name: [sum(count > place for count in counts) for place in range(size)]
        for name, counts in (
            ("proposed_at_pos", proposed),
            ("verified_at_pos", verified),
            ("accepted_at_pos", accepted),
        )
    }
    return {**found, "verify_len_histogram": [verified.count(n) for n in range(size + 1)]}
