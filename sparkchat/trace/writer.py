"""Writes a session's trace from engine events, one whole line at a time.

A line is written with one system call and is never changed, so a killed process loses at most the line in the making.
When the disk refuses, the trace ends at its last whole line, one notice is returned, and the chat goes on.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from sparkchat.errors import NotEnoughDisk, SparkchatError, UsageError
from sparkchat.strict_json import dumps
from sparkchat.trace.calibration import CalibrationScores, observations
from sparkchat.trace.schema import SCHEMA

Redaction = Literal["none", "prompt"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENVELOPE = ("event", "id")


class TraceWriter:
    """One trace file, mode 0600.

    An existing file is refused; with ``force`` it is replaced in one move when the new header is on disk, and kept if
    that never happens. ``redaction`` "prompt" writes a sha256 in place of the prompt's token ids and leaves ``argv``
    and the question out. Raises UsageError, NotEnoughDisk or SparkchatError when the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        force: bool = False,
        *,
        argv: Sequence[str] | None = None,
        redaction: Redaction = "none",
    ) -> None:
        self.path = Path(path)
        self._argv = list(sys.argv if argv is None else argv)
        self._redaction = redaction
        self._turns: dict[Any, _OpenTurn] = {}
        self._num_turns = 0
        self._has_header = False
        self._size = 0
        self._part: str | None = None
        """The temporary file that takes the place of the old one once it has a header."""
        self._file = self._open(force)

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def event(self, event: Mapping[str, Any]) -> str | None:
        """Record one engine event; events that have no line are ignored.

        Returns a sentence for the user when the file could not be written and tracing has ended, else None.
        """
        if not self.is_open:
            return None
        write = _HANDLERS.get(event["event"])
        lines = write(self, event) if write is not None else []
        if lines and not self._has_header:
            header = [] if event["event"] == "ready" else [self._header({})]
            lines, self._has_header = header + lines, True
        for line in lines:
            notice = self._append(line)
            if notice is not None:
                return notice
        return None

    def close(self) -> str | None:
        """End the file; returns a sentence for the user when its last lines may not have reached the disk."""
        if not self.is_open:
            return None
        try:
            os.fsync(self._file)
        except OSError as error:
            # Pipes and some file systems know no fsync; that is no loss.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                return self._give_up(error)
        self._release()
        return None

    # lines of each event -------------------------------------------------------------------------------------------

    def _ready(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._turns.clear()  # a new engine knows nothing of the old one's answers
        return [self._header(event["info"])]

    def _start(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns[event["id"]] = _OpenTurn(self._num_turns)
        self._num_turns += 1
        rest = _without(event, *_ENVELOPE, "prompt_text", "prompt_token_ids", "sampling", "t_ns")
        prompt = event["prompt_token_ids"]
        is_hidden = self._redaction == "prompt"
        return [
            _line(
                "turn",
                turn=turn.number,
                id=event["id"],
                t_ns=event.get("t_ns"),
                sampling=event["sampling"],
                seed=event["sampling"].get("seed"),
                **rest,
                prompt_text=None if is_hidden else event.get("prompt_text"),
                prompt_token_ids=None if is_hidden else prompt,
                **({"prompt_sha256": prompt_sha256(prompt)} if is_hidden and prompt is not None else {}),
                num_prompt_tokens=None if prompt is None else len(prompt),
            )
        ]

    def _delta(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns.get(event["id"])
        if turn is not None:
            turn.deltas.append(_without(event, *_ENVELOPE))
        return []

    def _step(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns.get(event["id"])
        if turn is None:
            return []  # the trace was opened in the middle of this answer
        fields = _without(event, *_ENVELOPE)
        turn.calibration.add(observations(fields))
        return [_line("step", turn=turn.number, id=event["id"], **fields, deltas=turn.take_deltas())]

    def _mode_change(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns.get(event.get("id"))
        number = turn.number if turn is not None else None
        return [_line("mode_change", turn=number, id=event.get("id"), **_without(event, *_ENVELOPE))]

    def _setting_change(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns.get(event["id"])
        number = turn.number if turn is not None else None
        return [_line("setting_change", turn=number, id=event["id"], **_without(event, *_ENVELOPE))]

    def _end(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn, result = self._turns.pop(event["id"], None), event["result"]
        if turn is None:
            if result.get("finish_reason") != "error":
                return []
            name = event.get("error") or SparkchatError.__name__
            return [_line("error", turn=None, id=event["id"], error=name, message=result.get("error") or "")]
        fields = _without(result, "schema", "model", "drafter", "prompt_token_ids")
        fields["speculation"] = _reported(result["speculation"])
        fields["token_ids"] = result["token_ids"] or []  # another engine need not tell them
        return [
            _line(
                "end",
                turn=turn.number,
                id=event["id"],
                **fields,
                thinking=event.get("thinking", ""),
                calibration=turn.calibration.to_json(),
                deltas=turn.take_deltas(),
            )
        ]

    def _error(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        turn = self._turns.get(event.get("id"))
        number = turn.number if turn is not None else None
        name = event.get("error") or ("EngineCrash" if event["event"] == "crashed" else SparkchatError.__name__)
        return [_line("error", turn=number, id=event.get("id"), error=name, message=event.get("message", ""))]

    def _header(self, info: Mapping[str, Any]) -> dict[str, Any]:
        argv = None if self._redaction == "prompt" else self._argv
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        return _line("header", created=created, argv=argv, redaction=self._redaction, **info)

    # the file ------------------------------------------------------------------------------------------------------

    def _open(self, force: bool) -> int:
        try:
            if force and os.path.lexists(self.path):
                return self._open_beside()
            return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UsageError(
                f"trace file {self.path} exists already; give another name, or --force to replace it"
            ) from None
        except OSError as error:
            kind = NotEnoughDisk if error.errno in _FULL else SparkchatError
            raise kind(
                f"trace file {self.path} cannot be written: {error.strerror}; give another --trace FILE"
            ) from None

    def _open_beside(self) -> int:
        # A link keeps pointing at its file, which is the one replaced.
        self.path = Path(os.path.realpath(self.path))
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise UsageError(f"trace file {self.path} is no ordinary file and is not replaced; give another name")
        file, self._part = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".part", dir=self.path.parent)
        return file

    def _append(self, line: Mapping[str, Any]) -> str | None:
        data = (dumps(line) + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._part is not None:
                os.replace(self._part, self.path)
                self._part = None
        except OSError as error:
            return self._give_up(error)
        self._size += len(data)
        return None

    def _give_up(self, error: OSError) -> str:
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            pass  # a cut last line is what readers expect after a crash anyway
        self._release()
        return f"the trace {self.path} cannot be written any more ({error.strerror}) and ends here; the chat goes on"

    def _release(self) -> None:
        file, self._file = self._file, -1
        try:
            os.close(file)
        except OSError:
            pass  # nothing is left to write, and the descriptor is gone either way
        if self._part is not None:
            Path(self._part).unlink(missing_ok=True)
            self._part = None


class _OpenTurn:
    """An answer that has started and not ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.deltas: list[dict[str, Any]] = []
        self.calibration = CalibrationScores()

    def take_deltas(self) -> list[dict[str, Any]]:
        taken, self.deltas = self.deltas, []
        return taken


_HANDLERS = {
    "ready": TraceWriter._ready,
    "start": TraceWriter._start,
    "delta": TraceWriter._delta,
    "step": TraceWriter._step,
    "mode_change": TraceWriter._mode_change,
    "setting_change": TraceWriter._setting_change,
    "end": TraceWriter._end,
    "error": TraceWriter._error,
    "crashed": TraceWriter._error,
}


def prompt_sha256(token_ids: Sequence[int]) -> str:
    """sha256 of the prompt's token ids written as decimals with commas between."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def _reported(speculation: Mapping[str, Any]) -> dict[str, Any]:
    """Counts that an engine did not report have no place in the line; a mean and a reason may be null."""
    return {k: v for k, v in speculation.items() if v is not None or k in ("mean_acceptance_length", "reason_off")}


def _line(kind: str, **fields: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "type": kind, **fields}


def _without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}
