"""A program in a pseudo-terminal: its screen through an emulator that knows widths, and the raw bytes as well."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte
from wcwidth import wcwidth

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("chat_program.py")


class WideScreen(pyte.Screen):
    """pyte drops what follows a zero-width character that is no combining mark; a terminal puts it on the cell."""

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) > 0:
                super().draw(character)
            elif wcwidth(character) == 0 and self.cursor.x:
                line = self.buffer[self.cursor.y]
                at = self.cursor.x - 1
                at -= line[at].data == ""
                line[at] = line[at]._replace(data=line[at].data + character)


class PtyProgram:
    def __init__(
        self,
        size: tuple[int, int] = (80, 24),
        environment: dict[str, str] | None = None,
        command: list[str] | None = None,
        **wish: Any,
    ) -> None:
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        self.raw = b""
        self.screen = WideScreen(*size)
        self._stream = pyte.ByteStream(self.screen)
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LINES": "", "COLUMNS": ""}
        env = {key: value for key, value in env.items() if value} | (environment or {})
        self.process = subprocess.Popen(
            command or [sys.executable, str(PROGRAM), json.dumps({"front": "tui", **wish})],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=env,
            preexec_fn=self._take_terminal,
        )

    def _take_terminal(self) -> None:
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def __enter__(self) -> PtyProgram:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self.master, self.slave):
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def rows(self) -> list[str]:
        return list(self.screen.display)

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def read(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and select.select([self.master], [], [], left)[0]:
            chunk = os.read(self.master, 65536)
            self.raw += chunk
            self._stream.feed(chunk)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"in vain; exit code {self.process.poll()}; screen:\n{self.text}"
            self.read(0.02)

    def shows(self, words: str, seconds: float = 60.0) -> None:
        self.until(lambda: words in self.text, seconds)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 60.0) -> int:
        self.until(lambda: self.process.poll() is not None, seconds)
        # All that it wrote, also when this process was held up meanwhile.
        while select.select([self.master], [], [], 0.1)[0]:
            self.read(0.1)
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = -1

    def mode_is_on(self, number: int) -> bool | None:
        """What the program last asked of a private mode, or None when it never did."""
        found = re.findall(rb"\x1b\[\?%d([hl])" % number, self.raw)
        return found[-1] == b"h" if found else None

    def assert_restored(self) -> None:
        for number in (1049, 1000, 1002, 1003, 1006, 1004, 2004):
            assert not self.mode_is_on(number), f"mode {number} was left on"
        assert self.mode_is_on(25) and self.mode_is_on(7) is not False
        assert self.raw.count(b"\x1b[>") <= self.raw.count(b"\x1b[<u"), "the kitty keyboard was left on"
        assert termios.tcgetattr(self.slave) == self.settings, "the line settings were changed"
