"""What the full-screen chat costs while an answer streams, measured in a real pseudo-terminal.

    python benchmarks/ui_cost.py pace    # processor time of the screen at a fixed number of tokens a second
    python benchmarks/ui_cost.py load    # steps that a processor-bound engine loses to the screen

``pace``: a scripted engine in its own process plays an answer at a steady rate; the figure is the processor time of the
screen's process between the question and the end of the answer, over the time that passed.
``load``: the engine's process computes on every core in each step, as a model on the processor does; the figure is its
steps a second with the screen, over those with a reader that throws the events away.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkchat.client import EngineClient
from sparkchat.config import RunConfig
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams
from sparkchat.ui.scripted import ScriptedEngine, ScriptedOptions

ROOT = Path(__file__).resolve().parent.parent
HERTZ = os.sysconf("SC_CLK_TCK")


# The engine's process


class BusyEngine(ScriptedEngine):
    """Plays as fast as it computes: every step hashes a fixed amount of data in one thread per core."""

    STEP_BYTES = 6_000_000

    def _play(self, running: Any) -> Iterator[tuple[float, dict[str, Any]]]:
        for _, event in super()._play(running):
            if event["event"] == "step":
                started = time.perf_counter()
                self._compute()
                event["step_ms"] = (time.perf_counter() - started) * 1000
                event["t_ns"] = time.monotonic_ns()
            yield 0.0, event

    def _compute(self) -> None:
        data = bytes(self.STEP_BYTES)
        threads = [threading.Thread(target=hashlib.sha256, args=(data,)) for _ in range(os.cpu_count() or 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def serve(kind: str, options: dict[str, Any], commands: int, events: int) -> None:
    """Run an engine behind two pipes, as the real one does."""
    engine: ScriptedEngine = (BusyEngine if kind == "busy" else ScriptedEngine)(ScriptedOptions(**options))

    def read_commands() -> None:
        with os.fdopen(commands) as lines:
            for line in lines:
                command = json.loads(line)
                if command["op"] == "generate":
                    engine.generate(GenerateRequest.from_json(command["request"]))
                elif command["op"] == "set_mode":
                    engine.set_mode(command["mode"])
                elif command["op"] == "cancel":
                    engine.cancel(command["id"])
        os._exit(0)

    engine.start()
    threading.Thread(target=read_commands, daemon=True).start()
    while True:
        for event in engine.poll(1.0):
            os.write(events, json.dumps(event).encode() + b"\n")


class ServedEngine(EngineClient):
    """The real client, with the scripted engine at the other end of its pipes."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__(LoadSpec("scripted", "/nowhere"))
        self._serve = [sys.executable, __file__, "serve", kind, json.dumps(options)]

    def start(self) -> None:
        command_read, self._commands = os.pipe()
        self._events, event_write = os.pipe()
        os.set_blocking(self._events, False)
        self._process = subprocess.Popen(
            [*self._serve, str(command_read), str(event_write)],
            pass_fds=(command_read, event_write),
            start_new_session=True,
        )
        os.close(command_read)
        os.close(event_write)


def run_program(kind: str, options: dict[str, Any], max_tokens: int) -> int:
    """The full-screen chat over a served engine."""
    from sparkchat.ui.app import run_tui

    config = RunConfig(
        spec=LoadSpec("scripted", "/nowhere", mode="compact"), sampling=SamplingParams(max_tokens=max_tokens)
    )
    return run_tui(config, lambda: ServedEngine(kind, options))


# The driver


class Terminal:
    """A program in a pseudo-terminal whose output is read and thrown away, as fast as it comes."""

    def __init__(self, arguments: list[str], columns: int, lines: int) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", PYTHONPATH=str(ROOT))
            os.execv(sys.executable, [sys.executable, *arguments])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.num_bytes = 0

    def read_until(self, mark: bytes, seconds: float) -> bool:
        tail, deadline = b"", time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    chunk = os.read(self._fd, 65536)
                except OSError:
                    return False  # the program has ended and closed its side
                self.num_bytes += len(chunk)
                tail = (tail + chunk)[-70_000:]
                if mark in tail:
                    return True
        return False

    def drain(self, seconds: float) -> None:
        self.read_until(b"\x00 is never written", seconds)

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / HERTZ

    def close(self) -> None:
        self.send("\x11")
        self.drain(1.0)
        os.close(self._fd)
        os.waitpid(self.pid, 0)


def open_chat(kind: str, options: dict[str, Any], max_tokens: int, size: tuple[int, int]) -> Terminal:
    terminal = Terminal([__file__, "program", kind, json.dumps(options), str(max_tokens)], *size)
    if not terminal.read_until(b"ready", 20):
        raise SystemExit("the chat did not become ready")
    terminal.drain(0.5)
    return terminal


def measure_pace(script: str, rate: float, num_tokens: int, size: tuple[int, int]) -> dict[str, Any]:
    terminal = open_chat("paced", {"tokens_per_second": rate, "mode": "compact"}, num_tokens, size)
    before, started = terminal.processor_seconds(), time.monotonic()
    sent = terminal.num_bytes
    terminal.send(f"{script}\r")
    if not terminal.read_until(b"cut at the token", num_tokens / rate * 2 + 20):
        raise SystemExit("the answer did not end")
    elapsed = time.monotonic() - started
    used = terminal.processor_seconds() - before
    result = {
        "script": script,
        "tokens_per_second": rate,
        "tokens": num_tokens,
        "size": "x".join(map(str, size)),
        "seconds": round(elapsed, 2),
        "ideal_seconds": round(num_tokens / rate, 2),
        "core_share": round(used / elapsed, 3),
        "ms_per_update": round(1000 * used / (elapsed * 12), 1),
        "terminal_bytes_per_second": round((terminal.num_bytes - sent) / elapsed),
    }
    terminal.close()
    return result


def headless_steps(script: str, num_tokens: int) -> float:
    """Steps a second of the busy engine with a reader that does nothing."""
    engine = ServedEngine("busy", {"mode": "compact"})
    engine.start()
    times: list[int] = []
    for event in engine.events():
        if event["event"] == "ready":
            engine.generate(GenerateRequest("1", prompt=script, sampling=SamplingParams(max_tokens=num_tokens)))
        elif event["event"] == "step":
            times.append(event["t_ns"])
        elif event["event"] == "end":
            break
    engine.close()
    return (len(times) - 1) * 1e9 / (times[-1] - times[0])


def screen_steps(script: str, num_tokens: int, trace: Path) -> float:
    """Steps a second of the busy engine with the screen, from the times that the engine itself wrote down."""
    terminal = open_chat("busy", {"mode": "compact"}, num_tokens, (120, 40))
    terminal.send(f"/trace {trace}\r")
    terminal.drain(0.5)
    terminal.send(f"{script}\r")
    if not terminal.read_until(b"cut at the token", 300):
        raise SystemExit("the answer did not end")
    terminal.close()
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    times = [line["t_ns"] for line in steps if line["type"] == "step"]
    trace.unlink()
    return (len(times) - 1) * 1e9 / (times[-1] - times[0])


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    if sys.argv[1:2] == ["program"]:
        return sys.exit(run_program(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pace", "load"))
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}", file=sys.stderr)
    if arguments.what == "pace":
        for script in ("prose", "code"):
            for rate in (100, 300, 600):
                for size in ((120, 40), (80, 24)):
                    print(json.dumps(measure_pace(script, rate, arguments.tokens, size)), flush=True)
        return
    trace = Path(f"/tmp/ui-cost-{os.getpid()}.spark.jsonl")
    for script in ("prose", "code"):
        pairs = [
            (headless_steps(script, arguments.tokens), screen_steps(script, arguments.tokens, trace))
            for _ in range(arguments.repeat)
        ]
        alone, shown = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [round(with_screen / without, 3) for without, with_screen in pairs]
        print(
            json.dumps(
                {
                    "script": script,
                    "steps_per_second_headless": round(alone, 1),
                    "steps_per_second_with_screen": round(shown, 1),
                    "ratios": ratios,
                    "kept": round(statistics.median(ratios), 3),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
