"""A server in a process of its own, and plain ways to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


class Served:
    """``python -m sparkchat serve ARGS`` on a free port; reads its stderr line by line."""

    def __init__(self, *args: str | Path, port: int = 0, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "sparkchat", "serve", *map(str, args), "--port", str(port)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.host, self.port = "", 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def ready(self) -> Served:
        found = self.wait_for(lambda: next((m for m in map(_URL.search, self.lines) if m), None))
        self.host, self.port = found[1], int(found[2])
        return self

    def wait_for(self, what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            if time.monotonic() > deadline or (self.process.poll() is not None and not self._reader.is_alive()):
                if found := what():
                    return found
                raise AssertionError(f"waited in vain; the server said {self.lines}")
            time.sleep(0.01)
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[-1])

    # Asking

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
        connection = self.connection()
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        found = response.status, response.read().decode()
        connection.close()
        return found

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Json]:
        """Status and object of an answer that is no stream; ``body`` may be bytes."""
        connection = self.connection()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        found = response.status, json.loads(response.read())
        connection.close()
        return found

    def chat(self, **fields: Any) -> Json:
        return self._ok("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})

    def text(self, **fields: Any) -> Json:
        return self._ok("/v1/completions", {"prompt": "hello", **fields})

    def _ok(self, path: str, body: Json) -> Json:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: Json) -> list[Json | str]:
        """Every event of a stream in order; the end marker as it is written."""
        connection = self.connection()
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        response = connection.getresponse()
        raw = response.read().decode()
        assert response.status == 200, raw
        connection.close()
        return list(events(raw))

    def begin(self, path: str, body: Json, headers: dict[str, str] | None = None) -> socket.socket:
        """Send a request and return the socket before anything was read from it."""
        data = json.dumps(body).encode()
        more = "".join(f"\r\n{name}: {value}" for name, value in (headers or {}).items() if name != "host")
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json{more}"
        opened = socket.create_connection((self.host, self.port), timeout=PATIENCE)
        opened.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return opened

    def metric(self, name: str, headers: dict[str, str] | None = None, **labels: str) -> float:
        """Sum of the samples of a metric with these labels."""
        status, page = self.get("/metrics", headers)
        assert status == 200
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items())
        ]
        assert found, f"no {name} {labels} in {page}"
        return sum(found)

    def is_idle(self) -> bool:
        return not self.metric("vllm:num_requests_running") and not self.metric("vllm:num_requests_waiting")


_URL = re.compile(r"http://([\d.]+|\[[\da-f:]+\]):(\d+)/v1")


def events(raw: str) -> Iterator[Json | str]:
    """Server-sent events, each one ``data: `` line and a blank one."""
    *blocks, rest = raw.split("\n\n")
    assert rest == "", f"the stream ends in the middle of an event: {rest!r}"
    for block in blocks:
        assert block.startswith("data: "), block
        assert "\n" not in block, block
        data = block.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data, parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


def recorded(trace: Path, prefix: str = "") -> dict[str, list[Json]]:
    """Lines of a trace by the id of their request, for ids that begin with ``prefix``."""
    found: dict[str, list[Json]] = {}
    for text in trace.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line.get("turn") is not None and str(line["id"]).startswith(prefix):
            found.setdefault(line["id"], []).append(line)
    return found


def dechunked(raw: bytes) -> str:
    """The body of a chunked response."""
    _, rest = raw.split(b"\r\n\r\n", 1)
    body = b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body.decode()
