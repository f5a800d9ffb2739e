"""Where the events of a session are recorded, if anywhere. A trace can begin and end in the middle of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from sparkchat.trace.writer import TraceWriter

Event = dict[str, Any]


class TraceSink:
    """Hands every event to a trace file while one is open. Safe to use from two threads."""

    def __init__(self, argv: Sequence[str] = ()) -> None:
        self._argv = tuple(argv)
        self._writer: TraceWriter | None = None
        self._ready: Event | None = None
        self._lock = Lock()

    @property
    def path(self) -> Path | None:
        """The file that is being written."""
        writer = self._writer
        return writer.path if writer is not None and writer.is_open else None

    def open(self, path: Path, force: bool = False) -> None:
        """Start recording into ``path``; when it cannot, raises SparkchatError and leaves an open trace alone."""
        writer = TraceWriter(path, force, argv=self._argv)
        with self._lock:
            if self._writer is not None:
                self._writer.close()
            self._writer = writer
            if self._ready is not None:
                # A trace that starts in mid-session still says which model and machine it is from.
                writer.event(self._ready)

    def event(self, event: Event) -> str | None:
        """Record one event; returns a sentence for the user when the trace had to be given up."""
        with self._lock:
            if event.get("event") in ("ready", "info"):
                self._ready = {**event, "event": "ready"}
            return self._writer.event(event) if self._writer is not None else None

    def close(self) -> Path | None:
        """Stop recording; returns the file that was being written."""
        with self._lock:
            path, writer = self.path, self._writer
            self._writer = None
            if writer is not None:
                writer.close()
            return path
