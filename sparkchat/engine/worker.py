"""The engine process: reads commands from one pipe, writes events to another.

Messages are JSON lines on descriptors of their own, so nothing that a library prints can get between
them. When the parent goes away its pipe closes, and the process ends at once: it holds no data that
only it has.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from typing import Any

from sparkchat.collector import REST_SECONDS, look_at_rest, take_over
from sparkchat.errors import NotEnoughMemory, SparkchatError
from sparkchat.params import GenerateRequest, LoadSpec
from sparkchat.strict_json import dumps, loads

Event = dict[str, Any]


class Channel:
    """Both pipes. Commands are read by a thread, so that a step never waits for them."""

    def __init__(self, command_fd: int, event_fd: int) -> None:
        self._command_fd = command_fd
        self._event_fd = event_fd
        for fd in (command_fd, event_fd):
            # What a library starts must not hold the pipes open when this process is gone.
            os.set_inheritable(fd, False)
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()

    def next_command(self) -> dict[str, Any]:
        """Waits for the next command; while none comes there is time to look for garbage."""
        try:
            return self.commands.get(timeout=REST_SECONDS)
        except queue.Empty:
            look_at_rest()
        return self.commands.get()

    def send(self, *events: Event) -> None:
        data = "".join(dumps(event) + "\n" for event in events).encode()
        try:
            while data:
                data = data[os.write(self._event_fd, data) :]
        except BrokenPipeError:
            os._exit(0)

    def _read_commands(self) -> None:
        with os.fdopen(self._command_fd, "rb") as pipe:
            for line in pipe:
                self.commands.put(_parse(line))
        os._exit(0)


def _parse(line: bytes) -> dict[str, Any]:
    """The command of one line; a line that is none becomes a command that is refused like any unknown one."""
    try:
        command = loads(line)
    except ValueError:
        command = None
    return command if isinstance(command, dict) else {"op": line.decode("utf-8", "replace")[:40]}


def main() -> None:
    """Entry of the child: ``argv`` holds the descriptors of the command and the event pipe."""
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    try:
        _serve(channel)
    except SparkchatError as error:
        channel.send(_fatal(error))
    except Exception as error:
        # The boundary of this process: the log keeps the whole story, the parent says its last line.
        _log_exception()
        if not _is_out_of_memory(error):
            os._exit(70)
        reason = f"the engine ran out of memory ({str(error)[:160]}); try a smaller --context"
        channel.send(_fatal(NotEnoughMemory(reason)))
    os._exit(0)


def _fatal(error: SparkchatError) -> Event:
    return {"event": "error", "error": type(error).__name__, "message": error.message}


def _log_exception() -> None:
    traceback.print_exc()
    sys.stderr.flush()


def _is_out_of_memory(error: Exception) -> bool:
    # torch reports exhausted memory as RuntimeError; only the text tells.
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def _serve(channel: Channel) -> None:
    spec = LoadSpec.from_json(channel.commands.get()["spec"])
    engine = _load(spec, channel)
    take_over()
    channel.send({"event": "ready", "info": engine.info})
    while True:
        while not engine.has_work or not channel.commands.empty():
            if not _obey(engine, channel.next_command(), channel):
                return
        channel.send(*engine.step())


def _load(spec: LoadSpec, channel: Channel) -> Any:
    channel.send({"event": "loading", "stage": "libraries", "message": "loading torch", "done": None, "total": None})
    from sparkchat.engine.engine import Engine

    try:
        return Engine(spec, progress=channel.send)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise NotEnoughMemory(
            f"{spec.name} does not fit in memory ({str(error)[:160]}); try a smaller --context or a smaller model"
        ) from None


def _obey(engine: Any, command: dict[str, Any], channel: Channel) -> bool:
    """Carry out one command; False ends the process. A command that makes no sense harms no running answer."""
    op = command.get("op")
    if op == "shutdown":
        return False
    if op == "generate":
        channel.send(*_submit(engine, command.get("request")))
        return True
    try:
        if op == "set_mode":
            channel.send(*engine.set_mode(command.get("mode")))
        elif op == "change":
            channel.send(*engine.change(command.get("id"), command.get("sampling"), command.get("think")))
        elif op == "plan_by_table":
            channel.send(*engine.plan_by_table(bool(command.get("on"))))
        elif op == "measure_together":
            engine.measure_together(bool(command.get("on")))
        elif op in ("num_graphs", "capture_ahead"):
            if op == "capture_ahead":
                engine.capture_ahead(*map(command.get, ("above", "most", "blocks", "draws")))
            channel.send({"event": "num_graphs", "count": engine.num_graphs})
        elif op == "tune_cost":
            channel.send(*engine.tune_cost())
        elif op == "cancel":
            channel.send(*engine.cancel(command.get("id")))
        else:
            raise SparkchatError(f"the engine was sent {op!r}, which it does not know")
    except SparkchatError as error:
        if op == "tune_cost":  # whoever asked waits for an answer
            channel.send({"event": "cost_table", "id": None, "error": type(error).__name__, "message": error.message})
        else:
            channel.send({"event": "notice", "id": None, "message": error.message})
    return True


def _submit(engine: Any, data: Any) -> list[Event]:
    """The events of a new request; a request that is none ends at once with the reason."""
    # An error kept in a variable of the function that it went through is a circle: both live on until they are found.
    try:
        return engine.submit(GenerateRequest.from_json(data))
    except SparkchatError as error:
        return [engine.refuse(_id_of(data), error)]
    except (MemoryError, RuntimeError):
        raise  # of the device, not of the request
    except Exception as error:
        # A boundary too: nothing of the request has run, so the engine is as sound as before.
        _log_exception()
        reason = f"the request cannot be read ({type(error).__name__}: {error}); check its fields"
    return [engine.refuse(_id_of(data), SparkchatError(reason))]


def _id_of(data: Any) -> Any:
    return data.get("id") if isinstance(data, dict) else None
