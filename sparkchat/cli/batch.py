"""``sparkchat batch``: requests as JSON lines on stdin, results as JSON lines on stdout, in the same order."""

from __future__ import annotations

import codecs
import os
import select
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from sparkchat import strict_json
from sparkchat.cli import arguments as a
from sparkchat.cli.lines import Lines
from sparkchat.cli.output import json_text, note
from sparkchat.cli.prepare import prepare
from sparkchat.client import EngineClient
from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, UsageError, error_from_name
from sparkchat.params import MODES
from sparkchat.requests import BadLine, build_request, parse_line
from sparkchat.ui.partial import PartialAnswer

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 64 << 20
_TOO_LONG = BadLine(f"the line is longer than {_MOST_LINE_BYTES >> 20} MiB, which no context holds; split it")
_LINES_AHEAD = 4
"""Lines read per concurrent request, so that the engine never waits for input and memory stays bounded."""
_SIGNAL_SECONDS = 0.1
"""How soon a signal is seen."""
_CANCEL_SECONDS = 2.0
"""How long stopped answers may take to say that they have ended; their lines may take as long to be written."""


def register(app: typer.Typer) -> None:
    app.command()(batch)


@a.with_options(a.ANSWERING)
def batch(
    ctx: typer.Context,
    model: a.RequiredModel,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests decoded together.", show_default=True)
    ] = 1,
) -> int:
    """Answer the requests on stdin (JSON lines with prompt, messages or prompt_ids) and write one result a line.

    A signal stops them: every line that was read still gets its result, a partial one says "cancelled".
    """
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency} is not possible; give a whole number of 1 or more")
    config = prepare(ctx)
    config = replace(config, spec=replace(config.spec, concurrency=concurrency))
    if sys.stdin is None:
        raise UsageError("batch reads requests on stdin, and it is closed; pipe JSON lines in")
    from sparkchat.ui.answering import Signals

    with Signals(patience=2 * _CANCEL_SECONDS) as signals, EngineClient(config.spec) as client:
        _Batch(client, config, concurrency * _LINES_AHEAD, signals).run(sys.stdin.fileno())
        signals.raise_noted()
    return 0


@dataclass
class _Line:
    """One line of input on its way: its own id, and its result once there is one."""

    fields: dict[str, Any]
    partial: PartialAnswer
    result: dict[str, Any] | None = None


@dataclass
class _Batch:
    client: EngineClient
    config: RunConfig
    most_waiting: int
    signals: Any
    info: dict[str, Any] | None = None
    waiting: deque[_Line] = field(default_factory=deque)
    by_id: dict[str, _Line] = field(default_factory=dict)
    num_lines: int = 0
    lines: Lines = field(default_factory=lambda: Lines(_MOST_LINE_BYTES))
    trace: Any = None

    def run(self, stdin: int) -> None:
        self._load()
        has_input = self.signals.is_noting = True
        deadline: float | None = None
        try:
            while has_input or self.waiting:
                can_read = has_input and len(self.waiting) < self.most_waiting
                sources = [self.client.fileno(), *([stdin] if can_read else [])]
                ready, _, _ = select.select(sources, [], [], _SIGNAL_SECONDS)
                if self.client.fileno() in ready:
                    self._take_events()
                if self.signals.count and deadline is None:
                    has_input, deadline = False, time.monotonic() + _CANCEL_SECONDS
                    self._cancel()
                elif stdin in ready:
                    has_input = self._read(stdin)
                if deadline is not None and time.monotonic() > deadline:
                    self._end_waiting("cancelled")
                self._write_finished()
        except EngineCrash as error:
            self._end_waiting("error", error.message)
            raise
        finally:
            if self.trace is not None:
                self.trace.close()

    def _load(self) -> None:
        for event in self.client.events():
            if event["event"] == "loading" and self.config.verbose:
                note(event["message"])
            if event["event"] == "ready":
                self.info = event["info"]
                for sentence in self.info.get("notices", ()):
                    note(sentence)
                self._open_trace(event)
                return
            self._raise_if_ended(event)
        raise EngineCrash("the engine ended while it was loading")

    def _open_trace(self, ready: dict[str, Any]) -> None:
        if self.config.trace_path is not None:
            from sparkchat.trace import TraceWriter

            self.trace = TraceWriter(self.config.trace_path, self.config.trace_force, argv=self.config.argv)
            self._record(ready)

    def _record(self, event: dict[str, Any]) -> None:
        lost = self.trace.event(event) if self.trace is not None else None
        if lost is not None:
            note(lost)

    def _read(self, stdin: int) -> bool:
        """Take what has arrived; False at the end of input."""
        chunk = os.read(stdin, _READ_BYTES)
        for line in self.lines.take(chunk) if chunk else self.lines.end():
            self._accept(line)
        return bool(chunk)

    def _accept(self, text: bytes | None) -> None:
        """One line; None stands for one that is too long."""
        # Editors and shells of Windows begin a file with a mark, which is no line where nothing else stands on it.
        if text is not None and not text.removeprefix(codecs.BOM_UTF8).strip():
            return
        self.num_lines += 1
        parsed = _TOO_LONG if text is None else parse_line(text)
        line = self._new_line(parsed.fields if isinstance(parsed, BadLine) else parsed)
        self.waiting.append(line)
        if isinstance(parsed, BadLine):
            line.result = line.partial.result("error", parsed.error)
            return
        request_id = f"line-{self.num_lines}"
        try:
            request = build_request(parsed, request_id, self.config)
        except SparkchatError as error:
            line.result = line.partial.result("error", error.message)
            return
        self.by_id[request_id] = line
        # Nobody looks at the steps of a batch but its trace.
        self.client.generate(replace(request, steps=self.trace is not None))

    def _new_line(self, fields: dict[str, Any]) -> _Line:
        assert self.info is not None
        mode = fields.get("mode")
        return _Line(fields, PartialAnswer({**self.info, "mode": mode if mode in MODES else self.info["mode"]}))

    def _cancel(self) -> None:
        for request_id in self.by_id:
            self.client.cancel(request_id)

    def _take_events(self) -> None:
        events = self.client.poll(0)
        if not events and not self.client.is_running:
            raise EngineCrash("the engine ended before every request was answered")
        for event in events:
            self._raise_if_ended(event)
            self._record(event)
            line = self.by_id.get(event.get("id"))
            if line is not None:
                line.partial.add(event)
            if line is not None and event["event"] == "end":
                self.by_id.pop(event["id"]).result = event["result"]
            elif event["event"] == "notice" and self.config.verbose:
                note(event["message"])

    def _raise_if_ended(self, event: dict[str, Any]) -> None:
        if event["event"] == "crashed":
            raise EngineCrash(event["message"])
        if event["event"] == "error":
            raise error_from_name(event["error"], event["message"])

    def _write_finished(self) -> None:
        while self.waiting and self.waiting[0].result is not None:
            line = self.waiting.popleft()
            echoed = {"id": line.fields["id"]} if "id" in line.fields else {}
            json_text(strict_json.dumps(echoed | line.result, keep_surrogates=True))

    def _end_waiting(self, reason: str, message: str | None = None) -> None:
        """Close what the engine does not close, with what has come of it."""
        for request_id, line in self.by_id.items():
            line.result = line.partial.result(reason, message)
            self._record({"event": "end", "id": request_id, "result": line.result, "thinking": line.partial.thinking})
        self.by_id.clear()
        self._write_finished()
