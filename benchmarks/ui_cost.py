"""What the full-screen chat costs while an answer streams, measured in a real pseudo-terminal.

    python benchmarks/ui_cost.py pace    # processor time of the screen at a fixed number of tokens a second
    python benchmarks/ui_cost.py load    # steps that a processor-bound engine loses to the screen
    python benchmarks/ui_cost.py growth  # processor time of an update as an answer grows
    python benchmarks/ui_cost.py bars    # the bars that the screen is held to: five minutes at 600 tokens a second

``pace``: a scripted engine in its own process plays an answer at a steady rate; the figure is the processor time of the
screen's process between the question and the end of the answer, over the time that passed.
``load``: the engine's process computes on every core in each step, as a model on the processor does; the figure is its
steps a second with the screen, over those with a reader that throws the events away.
``growth``: 400 updates of one long answer in a headless screen of 120x40, drawn one by one; the figures are medians of
the first and of the last tenth.
``bars``: one answer of prose, code fences of 5,000 tokens and tables, 600 tokens a second for five minutes. Bars: under
60 % of one core in processor time; 99 of 100 keys on the screen within 100 ms, which holds on a quiet machine only; and
memory that grows by little more than the text. ``--minutes`` makes it shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import json
import math
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
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
from sparkchat.ui.step_log import MOST_STEPS

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


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


class Terminal:
    """A program in a pseudo-terminal whose output is read and thrown away, as fast as it comes."""

    def __init__(self, arguments: list[str], columns: int, lines: int) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", PYTHONPATH=str(ROOT))
            # What is asked here is no chat of the user's.
            folder = tempfile.mkdtemp(prefix="sparkchat-ui-cost-")
            os.environ.update(XDG_DATA_HOME=folder, XDG_STATE_HOME=folder)
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
        return processor_seconds(self.pid)

    def engine_pid(self) -> int:
        """The one process that the program has started."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == self.pid:
                return int(stat.parent.name)
        raise SystemExit("the engine's process is gone")

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


KEY = "\u0436"
"""A letter that no answer holds."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def key_seconds(terminal: Terminal) -> float | None:
    """From a key to its letter in what the program writes; None when the answer ended meanwhile."""
    before = time.monotonic()
    terminal.send(KEY)
    is_shown = terminal.read_until(KEY.encode(), 5.0)
    elapsed = time.monotonic() - before
    terminal.send("\x7f")
    return elapsed if is_shown else None


def measure_bars(minutes: float, rate: float, size: tuple[int, int]) -> dict[str, Any]:
    num_tokens = round(minutes * 60 * rate)
    options = {"tokens_per_second": rate, "mode": "compact", "repeat": num_tokens // 5000 + 1}
    terminal = open_chat("paced", options, num_tokens, size)
    terminal.send("mixed\r")
    terminal.drain(2.0)
    started, before = time.monotonic(), terminal.processor_seconds()
    waits: list[float] = []
    memory: list[tuple[float, int]] = []
    deadline = started + minutes * 60 - 4.0
    while time.monotonic() < deadline:
        wait = key_seconds(terminal)
        if wait is not None:
            waits.append(wait)
        memory.append((time.monotonic() - started, resident_bytes(terminal.pid)))
        terminal.drain(0.25)
    elapsed, used = time.monotonic() - started, terminal.processor_seconds() - before
    is_done = terminal.read_until("· cut".encode(), minutes * 60 * 0.5 + 20)
    whole = time.monotonic() - started + 2.0
    terminal.close()
    fifths = [statistics.median(size for at, size in memory if n <= at * 5 / elapsed < n + 1) for n in range(5)]
    percentiles = statistics.quantiles(waits, n=100)
    kept = MOST_STEPS * 3 / rate
    return {
        "minutes": round(elapsed / 60, 2),
        "tokens_per_second": rate,
        "tokens_arrived": is_done,
        "tokens_per_second_kept": round(num_tokens / whole, 1) if is_done else None,
        "size": "x".join(map(str, size)),
        "core_share": round(used / elapsed, 3),
        "keys": len(waits),
        "key_ms_median": round(1000 * statistics.median(waits), 1),
        "key_ms_p95": round(1000 * percentiles[94], 1),
        "key_ms_p99": round(1000 * percentiles[98], 1),
        "key_ms_most": round(1000 * max(waits), 1),
        "resident_mb_by_fifths": [round(fifth / 1e6, 1) for fifth in fifths],
        # From when the log of steps is full, which holds a fixed number of them.
        "resident_bytes_per_token": round(_slope([(at, size) for at, size in memory if at > kept]) / rate, 1),
    }


def _slope(points: list[tuple[float, int]]) -> float:
    """Bytes a second, by least squares."""
    if len(points) < 2:
        return math.nan
    slope, _ = statistics.linear_regression([at for at, _ in points], [size for _, size in points])
    return slope


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


def screen_steps(script: str, num_tokens: int, trace: Path) -> tuple[float, float]:
    """(steps a second of the busy engine with the screen, screen's part of the processor time that both used).

    The steps are timed by the engine itself. The part does not depend on what else the machine is doing.
    """
    terminal = open_chat("busy", {"mode": "compact"}, num_tokens, (120, 40))
    engine = terminal.engine_pid()
    terminal.send(f"/trace {trace}\r")
    terminal.drain(0.5)
    before = terminal.processor_seconds(), processor_seconds(engine)
    terminal.send(f"{script}\r")
    if not terminal.read_until(b"cut at the token", 300):
        raise SystemExit("the answer did not end")
    screen_used, engine_used = terminal.processor_seconds() - before[0], processor_seconds(engine) - before[1]
    terminal.close()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    times = [line["t_ns"] for line in lines if line["type"] == "step"]
    trace.unlink()
    rate = (len(times) - 1) * 1e9 / (times[-1] - times[0])
    return rate, screen_used / (screen_used + engine_used)


def measure_load(script: str, num_tokens: int, repeat: int, trace: Path) -> dict[str, Any]:
    alone, shown, parts = [], [], []
    for _ in range(repeat):
        alone.append(headless_steps(script, num_tokens))
        rate, part = screen_steps(script, num_tokens, trace)
        shown.append(rate)
        parts.append(part)
    return {
        "script": script,
        "steps_per_second_headless": [round(rate, 1) for rate in alone],
        "steps_per_second_with_screen": [round(rate, 1) for rate in shown],
        "kept": round(statistics.median(shown) / statistics.median(alone), 3),
        "screen_part_of_processor_time": [round(part, 3) for part in parts],
    }


GROWTH = {
    "prose": "Some words **of** prose, and a few more.\n- list item\n" * 8000,
    "fence of 5000 lines": "```python\n" + "    x = call(argument, 'other')  # note\n" * 5000,
    "table 60 x 300": "|" + " h |" * 60 + "\n|" + "---|" * 60 + "\n" + ("|" + " cell |" * 60 + "\n") * 300,
    "one line of 100000": "x" * 100_000,
    "quotes and marks": (">" * 200 + " deep *a **b `c ") * 400,
}


async def measure_growth(name: str, text: str) -> dict[str, Any]:
    from sparkchat.ui.app import SparkApp
    from sparkchat.ui.bridge import Batch, TextUpdate
    from sparkchat.ui.token_text import TextRun
    from sparkchat.ui.trace_sink import TraceSink

    config = RunConfig(spec=LoadSpec("scripted", "/nowhere"))
    app = SparkApp(config, lambda: ScriptedEngine(ScriptedOptions(prompt_seconds=1e6)), TraceSink())
    size, times = max(len(text) // 400, 1), []
    async with app.run_test(size=(120, 40)) as pilot:
        while app.chat.state != "ready":
            await pilot.pause(0.05)
        app.chat.send("x")
        assert app.chat.active is not None
        request_id = app.chat.active.turn.request_id
        for at in range(0, len(text), size):
            update = TextUpdate(request_id, "answer", (TextRun(text[at : at + size], "draft"),))
            before = time.process_time()
            app.chat.receive([Batch([update])])
            await asyncio.sleep(0.025)
            times.append(1000 * (time.process_time() - before))
        num_rows = app.transcript.num_rows
    app.bridge.close()
    tenth = len(times) // 10
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    return {
        "text": name,
        "characters": len(text),
        "rows": num_rows,
        "first_ms": round(first, 1),
        "last_ms": round(last, 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    if sys.argv[1:2] == ["program"]:
        return sys.exit(run_program(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pace", "load", "growth", "bars"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens-per-second", type=float, default=600.0)
    parser.add_argument("--size", default="120x40", help="columns x lines of the terminal (bars)")
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
    if arguments.what == "bars":
        columns, lines = map(int, arguments.size.split("x"))
        figures = measure_bars(arguments.minutes, arguments.tokens_per_second, (columns, lines))
        return print(json.dumps(figures), flush=True)
    if arguments.what == "growth":
        for name, text in GROWTH.items():
            print(json.dumps(asyncio.run(measure_growth(name, text))), flush=True)
        return
    trace = Path(tempfile.mkdtemp()) / "cost.spark.jsonl"
    for script in ("prose", "code"):
        print(json.dumps(measure_load(script, arguments.tokens, arguments.repeat, trace)), flush=True)


if __name__ == "__main__":
    main()
