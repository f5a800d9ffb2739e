"""The full-screen chat inside tmux, as many people run it: keys, copy, resizing, and the way out."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("chat_program.py")

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Tmux:
    """A server of its own with one window that runs the chat, then a shell that says how it ended."""

    def __init__(self, folder: Path, size: tuple[int, int], environment: dict[str, str], wish: dict[str, Any]) -> None:
        self._socket = str(folder / "tmux")
        names = {"PYTHONPATH": str(ROOT), **environment}
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in names.items())
        program = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROGRAM))} {shlex.quote(json.dumps(wish))}"
        # After a sudden death the keeper leaves the full screen a moment later: what a shell says before is gone.
        after = "code=$?; sleep 2; echo left with $code; stty -a | grep -c -- '-echo ' ; sleep 600"
        script = f"env {assigned} {program}; {after}"
        self._run("-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), script)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", self._socket, *arguments], capture_output=True, text=True, check=False, timeout=20
        )
        return done.stdout

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def keys(self, *names: str) -> None:
        self._run("send-keys", *names)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    def value(self, name: str) -> str:
        return self._run("display-message", "-p", f"#{{{name}}}").strip()

    @property
    def buffer(self) -> str:
        return self._run("show-buffer")

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"in vain; the screen shows:\n{self.screen}"
            time.sleep(0.05)

    def shows(self, words: str) -> None:
        self.until(lambda: words in self.screen)

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., Tmux]]:
    opened: list[Tmux] = []
    # A socket's path may not be long.
    folder = Path(f"/tmp/spark-{os.getpid()}-{time.monotonic_ns() % 10**9}")
    folder.mkdir(mode=0o700)

    def start(size: tuple[int, int] = (80, 24), environment: dict[str, str] | None = None, **wish: Any) -> Tmux:
        opened.append(Tmux(folder, size, environment or {}, {"front": "tui", **wish}))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_chat_in_tmux(tmux: Callable[..., Tmux]) -> None:
    window = tmux(size=(100, 30), options={"tokens_per_second": 200, "text": "say\n```\nprint('ü [/]')\n```\nend"})
    window.shows("ready")
    assert window.value("alternate_on") == "1"
    window.type("a question")
    window.keys("Enter")
    window.shows("complete")
    window.keys("F7")
    window.shows("tmux's buffer")
    assert window.buffer == "print('ü [/]')"
    window.keys("M-Left")
    window.shows("F4 step")
    window.keys("F4")
    window.shows("tokens before it")
    window.keys("Escape")
    window.resize(40, 12)
    window.until(lambda: "tokens before it" not in window.screen and "ready" in window.screen)
    window.resize(100, 30)
    window.keys("BTab")
    window.shows("mode compact")
    window.keys("C-q")
    window.shows("left with 0")
    assert window.value("alternate_on") == "0" and window.value("mouse_any_flag") == "0"
    window.until(lambda: "\n0" in window.screen)  # the terminal echoes again


def test_ctrl_c_and_a_kill_in_tmux(tmux: Callable[..., Tmux]) -> None:
    window = tmux(options={"tokens_per_second": 40})
    window.shows("ready")
    window.type("prose")
    window.keys("Enter")
    window.shows("A draft is a guess")
    window.keys("C-c")
    window.shows("stopped")
    pid = subprocess.run(
        ["pgrep", "-P", window.value("pane_pid"), "-f", "chat_program"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    os.kill(int(pid), 9)
    window.shows("left with 137")
    window.until(lambda: window.value("alternate_on") == "0" and window.value("mouse_any_flag") == "0")


def test_without_colour_and_with_ascii_in_tmux(tmux: Callable[..., Tmux]) -> None:
    window = tmux(
        size=(40, 12),
        environment={"NO_COLOR": "1", "TERM": "screen"},
        config={"ascii": True, "color": "never"},
        options={"tokens_per_second": 300},
    )
    window.shows("ready")
    window.type("short")
    window.keys("Enter")
    window.shows("complete")
    assert window.screen.isascii()
    colored = window._run("capture-pane", "-p", "-e")
    assert "[38;" not in colored and "[3" not in colored.replace("[39m", "")
