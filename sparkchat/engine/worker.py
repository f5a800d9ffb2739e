"""The engine process: reads commands from one pipe, writes events to another.

Messages are JSON lines on descriptors of their own, so nothing that a library prints can get between
them. When the parent goes away its pipe closes, and the process ends at once: it holds no data that
only it has.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

from sparkchat.errors import DamagedFile, NotEnoughMemory, SparkchatError
from sparkchat.params import GenerateRequest, LoadSpec
from sparkchat.strict_json import dumps

Event = dict[str, Any]


class Channel:
    """Both pipes. Commands are read by a thread, so that a step never waits for them."""

    def __init__(self, command_fd: int, event_fd: int) -> None:
        self._command_fd = command_fd
        self._event_fd = event_fd
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()

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
                self.commands.put(json.loads(line))
        os._exit(0)


def main() -> None:
    """Entry of the child: ``argv`` holds the descriptors of the command and the event pipe."""
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    try:
        _serve(channel)
    except SparkchatError as error:
        channel.send({"event": "error", "error": type(error).__name__, "message": error.message})
        os._exit(0)
    except MemoryError:
        channel.send({"event": "error", "error": NotEnoughMemory.__name__, "message": "the engine ran out of memory"})
        os._exit(0)
    except Exception:
        # The boundary of this process: the log keeps the whole story, the parent says its last line.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


def _serve(channel: Channel) -> None:
    spec = LoadSpec.from_json(channel.commands.get()["spec"])
    engine = _load(spec, channel)
    channel.send({"event": "ready", "info": engine.info})
    while True:
        while not engine.has_work or not channel.commands.empty():
            if not _obey(engine, channel.commands.get(), channel):
                return
        channel.send(*engine.step())


def _load(spec: LoadSpec, channel: Channel) -> Any:
    channel.send({"event": "loading", "stage": "libraries", "message": "loading torch", "done": None, "total": None})
    from sparkchat.engine.engine import Engine

    try:
        return Engine(spec, progress=channel.send)
    except RuntimeError as error:
        # torch reports exhausted memory as RuntimeError; only the text tells.
        text = str(error)
        if "out of memory" in text or "can't allocate memory" in text:
            raise NotEnoughMemory(
                f"{spec.name} does not fit in memory ({text.splitlines()[0][:160]}); "
                "try a smaller --context or a smaller model"
            ) from None
        raise


def _obey(engine: Any, command: dict[str, Any], channel: Channel) -> bool:
    """Carry out one command; False ends the process."""
    op = command.get("op")
    if op == "generate":
        channel.send(*engine.submit(GenerateRequest.from_json(command["request"])))
    elif op == "set_mode":
        channel.send(*engine.set_mode(command["mode"]))
    elif op == "cancel":
        channel.send(*engine.cancel(command["id"]))
    elif op == "shutdown":
        return False
    else:
        raise DamagedFile(f"the engine was sent {op!r}, which it does not know")
    return True
