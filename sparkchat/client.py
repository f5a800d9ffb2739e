"""The parent's end of the engine pipe: starts the engine process, sends commands, yields events.

Standard library only. The engine runs in its own process group, so ctrl+c at the terminal reaches
the parent alone, and a crash of the engine (a CUDA abort, the OOM killer) leaves the parent usable.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparkchat
from sparkchat.errors import EngineCrash, UsageError
from sparkchat.params import GenerateRequest, LoadSpec, Mode

Event = dict[str, Any]

_SHUTDOWN_SECONDS = 2.0
_READ_BYTES = 1 << 16
_PROGRAM = "from sparkchat.engine.worker import main; main()"
_WAITING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
"""How OpenMP threads wait for each other. What the user set stays."""
_SPINS = "5000"
"""Left alone (300,000 turns) they spin for so long that on cores which others use they keep the very thread they wait
for from running: steps of 250 to 1300 ms instead of 40 to 60. At 1000 they sleep in the gaps between the products of a
step and must be woken: 31 to 42 ms a plain step instead of 24 to 28 on two idle AVX2 cores (2026-11-30)."""
_logs: list[str] = []
"""What the newest engine that ended unasked had written; for ``take_crash_log``."""


class EngineClient:
    """One engine process. ``start`` returns at once; loading progress arrives as events.

    After the process has ended unasked, one ``{"event": "crashed", "message": ...}`` event is
    yielded and sending raises :class:`EngineCrash`; ``start`` may then be called again. One thread
    polls; others may send meanwhile.
    """

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._commands = -1
        self._events = -1
        self._partial: list[bytes] = []
        self._log: Any = None
        self._is_end_expected = False
        self._sending = threading.RLock()

    def __enter__(self) -> EngineClient:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._events >= 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def fileno(self) -> int:
        """The descriptor that becomes readable when events wait; -1 when none is open."""
        return self._events

    def start(self) -> None:
        """Start the process and ask it to load the pair. Raises EngineCrash when no process can be started."""
        self.close()
        command_read, self._commands = os.pipe()
        self._events, event_write = os.pipe()
        os.set_blocking(self._events, False)
        self._partial, self._is_end_expected = [], False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)
        try:
            self._process = subprocess.Popen(
                # -P keeps the current folder off the module path: a torch.py lying there must not be run.
                [sys.executable, "-P", "-c", _PROGRAM, str(command_read), str(event_write)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(command_read, event_write),
                start_new_session=True,
                env=child_environment(),
                cwd=None if _has_current_folder() else "/",
            )
        except OSError as error:
            self.close()
            raise EngineCrash(f"the engine process cannot be started: {error}") from None
        finally:
            os.close(command_read)
            os.close(event_write)
        try:
            self._send({"op": "load", "spec": self.spec.to_json()})
        except EngineCrash:
            pass  # ended already: the crashed event says how

    def generate(self, request: GenerateRequest) -> None:
        self._send({"op": "generate", "request": request.to_json()})

    def set_mode(self, mode: Mode) -> None:
        self._send({"op": "set_mode", "mode": mode})

    def change(self, request_id: str, sampling: dict[str, Any] | None = None, think: bool | None = None) -> None:
        """Other settings for a running answer, from its next step on."""
        self._send({"op": "change", "id": request_id, "sampling": sampling, "think": think})

    def send(self, command: dict[str, Any]) -> None:
        """Any other command of the engine's."""
        self._send(command)

    def cancel(self, request_id: str) -> None:
        self._send({"op": "cancel", "id": request_id})

    def events(self) -> Iterator[Event]:
        """Yield events as they come, until the engine ends."""
        while self.is_running:
            yield from self.poll(None)

    def poll(self, timeout: float | None = 0.0) -> list[Event]:
        """Events that have arrived; waits up to ``timeout`` seconds (None: for ever) for the first."""
        if self._events < 0:
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._events], [], [], remaining)
            if not readable:
                return []
            found = self._read()
            if found or self._events < 0:
                return found

    def close(self) -> None:
        """Ask the engine to stop; kill it when it does not."""
        process, self._is_end_expected = self._process, True
        if process is not None:
            if process.poll() is None and self._commands >= 0:
                try:
                    self._send({"op": "shutdown"})
                except EngineCrash:
                    pass
            self._close_pipes()
            try:
                process.wait(_SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._close_pipes()
        if self._log is not None:
            self._log.close()
        self._process, self._log = None, None

    def _send(self, command: dict[str, Any]) -> None:
        try:
            data = memoryview(json.dumps(command, allow_nan=False).encode() + b"\n")
        except ValueError:
            raise UsageError("a request holds a number that is not finite; give finite numbers") from None
        with self._sending:
            if self._commands < 0:
                raise EngineCrash("the engine is not running; send the message again to start it")
            try:
                while data:
                    data = data[os.write(self._commands, data) :]
            except BrokenPipeError:
                raise EngineCrash("the engine has ended; send the message again to start it") from None

    def _read(self) -> list[Event]:
        found: list[Event] = []
        try:
            chunk = os.read(self._events, _READ_BYTES)
        except BlockingIOError:
            return found
        if not chunk:
            return self._ended()
        # A long event comes in many chunks, which are joined once.
        first, *others = chunk.split(b"\n")
        self._partial.append(first)
        for rest in others:
            event = json.loads(b"".join(self._partial))
            self._is_end_expected |= event["event"] == "error"
            found.append(event)
            self._partial = [rest]
        return found

    def _ended(self) -> list[Event]:
        assert self._process is not None
        try:
            code: int | None = self._process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        log = self._log_tail()
        self._close_pipes()
        if self._is_end_expected:
            return []
        _logs[:] = [log]
        return [{"event": "crashed", "message": _describe_end(code, log), "log": log}]

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4000))
        return self._log.read().decode("utf-8", "replace")

    def _close_pipes(self) -> None:
        with self._sending:
            for name in ("_commands", "_events"):
                fd = getattr(self, name)
                if fd >= 0:
                    os.close(fd)
                    setattr(self, name, -1)


def take_crash_log() -> str:
    """The end of what the newest engine that ended unasked has written, its traceback in it; once, then nothing."""
    return _logs.pop() if _logs else ""


def child_environment() -> dict[str, str]:
    """What a process of ours that imports torch is started with."""
    environment = dict(os.environ)
    root = str(Path(sparkchat.__file__).resolve().parent.parent)
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if not environment.keys() & _WAITING:
        environment["GOMP_SPINCOUNT"] = _SPINS
    return environment


def _has_current_folder() -> bool:
    """Libraries of torch cannot be loaded from a folder that was removed; every path of ours is absolute."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _describe_end(code: int, log: str) -> str:
    if code < 0:
        try:
            what = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            what = f"was ended by signal {-code}"
        if code == -signal.SIGKILL:
            what += " (often: the machine ran out of memory)"
    else:
        what = f"ended with code {code}"
    lines = [line for line in log.splitlines() if line.strip()]
    last = f"; its last words: {lines[-1].strip()[:300]}" if lines else ""
    return f"the engine {what}{last}"
