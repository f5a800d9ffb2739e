"""How a server begins and ends, who may ask it, and what the death of its engine looks like from outside."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.conftest import CONTEXT, HELLO
from serve.served import Served, dechunked, events
from sparkchat.cli.serve import without_key
from sparkchat.errors import SparkchatError
from sparkchat.serve.server import _bind, _share

TEXT = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "mode": "off"}
Start = Callable[..., Served]


def test_a_full_queue_is_a_429_and_a_second_signal_stops_answers_and_tells_their_clients(start: Start) -> None:
    served = start("--concurrency", "1", "--max-waiting", "1").ready()
    status, answer = served.post(TEXT, {"prompt": "x", "n": 3})
    assert (status, answer["error"]["param"]) == (400, "n"), "asking again later would never help"
    running = served.begin(TEXT, {**LONG, "max_tokens": CONTEXT - 1, "stream": True})
    assert b"200 OK" in running.recv(100)
    waiting = served.begin(TEXT, LONG)
    served.wait_for(lambda: served.metric("vllm:num_requests_waiting") == 1)
    status, answer = served.post(TEXT, {"prompt": "x"})
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    served.process.send_signal(signal.SIGINT)
    served.wait_for(lambda: any("ending" in line for line in served.lines))
    served.process.send_signal(signal.SIGINT)
    streamed = b""
    while part := running.recv(65536):
        streamed += part
    assert b"the server is ending" in streamed
    assert b"data: [DONE]" in streamed
    assert b" 503 " in waiting.recv(65536)
    assert served.wait() == 130


def test_a_dead_engine_is_a_503_and_one_line_and_comes_back(start: Start) -> None:
    served = start().ready()
    endless = {**LONG, "max_tokens": CONTEXT - 1}
    whole, streamed = served.begin(TEXT, endless), served.begin(TEXT, {**endless, "stream": True})
    served.wait_for(lambda: served.metric("vllm:num_requests_running") == 2)
    raw = streamed.recv(65536)
    num_lines = len(served.lines)
    os.kill(served.engine_pid, signal.SIGKILL)
    assert b" 503 " in whole.recv(65536)
    while b"[DONE]" not in raw:
        part = streamed.recv(65536)
        assert part, raw
        raw += part
    *_, error, end = events(dechunked(raw))
    assert end == "[DONE]"
    assert error["error"]["type"] == "service_unavailable_error"
    status, answer = served.post(TEXT, LONG)
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    assert served.get("/health")[0] == 503
    (line,) = served.lines[num_lines:]
    assert "SIGKILL" in line and "started again" in line
    served.wait_for(lambda: served.get("/health")[0] == 200)
    assert served.text(max_tokens=30)["choices"][0]["text"] == HELLO
    assert served.metric("vllm:request_success_total", finished_reason="error") == 2


def test_an_engine_that_cannot_load_ends_the_server(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    served = Served(tmp_path, "--drafter", "none", environment=environment)
    assert served.wait() not in (0, 143)
    assert len(served.lines) == 1
    served.close()


def test_a_signal_while_loading_ends_it_too(start: Start) -> None:
    served = start()
    time.sleep(0.8)
    assert served.end() == 143


def test_a_taken_port_is_said_before_the_model_is_loaded(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = start(port=taken.getsockname()[1])
        assert served.wait() == 1
    (line,) = served.lines
    assert "--port" in line


def test_a_terminal_that_goes_away_ends_a_server_in_order_unless_it_is_ignored(start: Start) -> None:
    served = start("--grace", "0").ready()
    running = served.begin(TEXT, {**LONG, "max_tokens": CONTEXT - 1, "stream": True})
    assert b"200 OK" in running.recv(100)
    assert served.end(signal.SIGHUP) == 129
    streamed = b""
    while part := running.recv(65536):
        streamed += part
    assert b"the server is ending" in streamed and b"data: [DONE]" in streamed


def test_nohup_keeps_a_server(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as its child it is ignored there, too
    try:
        served = start().ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    served.process.send_signal(signal.SIGHUP)
    assert served.get("/health")[0] == 200
    assert served.end(signal.SIGTERM) == 143


def test_a_server_that_is_still_loading_holds_its_port() -> None:
    with _bind("127.0.0.1", 0) as held, pytest.raises(SparkchatError, match="give another --port"):
        _bind("127.0.0.1", held.getsockname()[1])


def test_what_connections_of_an_ended_server_left_does_not_take_its_port() -> None:
    with _bind("127.0.0.1", 0) as ended:
        port = ended.getsockname()[1]
        _share(ended)
        ended.listen()
        ended.setblocking(True)
        with socket.create_connection(("127.0.0.1", port)) as client:
            ended.accept()[0].close()  # the side that closes first waits for stragglers
            assert client.recv(1) == b""
    _bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_another_address_needs_a_key(start: Start, host: str) -> None:
    served = start("--host", host)
    assert served.wait() == 2
    (line,) = served.lines
    assert "SPARKCHAT_API_KEY" in line


def test_with_a_key_nothing_but_health_is_answered_without_it_and_sigterm_lets_answers_end(
    start: Start, tmp_path: Path
) -> None:
    trace = tmp_path / "t.spark.jsonl"
    options = ("--host", "0.0.0.0", "--trace", trace)
    served = start(*options, variables={"SPARKCHAT_API_KEY": "s3cret"}).ready()
    served.host = "127.0.0.1"
    assert served.get("/health")[0] == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        assert served.get("/v1/models", headers)[0] == 401
        assert served.get("/metrics", headers)[0] == 401
        assert served.post(TEXT, {"prompt": "x"}, headers)[0] == 401
    right = {"authorization": "Bearer s3cret", "host": "any.example"}
    assert served.get("/v1/models", right)[0] == 200
    assert served.post(TEXT, {"prompt": "x", "max_tokens": 30}, right)[1]["choices"][0]["text"] == HELLO
    opened = served.begin(TEXT, LONG, right)
    served.wait_for(lambda: served.metric("vllm:num_requests_running", right) == 1)
    served.process.send_signal(signal.SIGTERM)
    raw = b""
    while part := opened.recv(65536):
        raw += part
    assert b'"finish_reason":"length"' in raw
    assert served.wait() == 143
    with pytest.raises(OSError):
        socket.create_connection((served.host, served.port))
    assert "s3cret" not in trace.read_text() + "".join(served.lines)
    assert "Traceback" not in "".join(served.lines)


def test_a_typed_key_is_left_out_of_the_command_line_that_a_trace_keeps() -> None:
    typed = ("sparkchat", "serve", "--api-key", "s3cret", "m", "--api-key=s3cret")
    assert without_key(typed) == ("sparkchat", "serve", "--api-key", "(hidden)", "m", "--api-key=(hidden)")


@pytest.mark.parametrize(
    "options", [("--port", "70000"), ("--concurrency", "0"), ("--max-waiting", "-1"), ("--grace", "-1")]
)
def test_impossible_options_are_usage_errors(start: Start, options: tuple[str, str]) -> None:
    served = start(*options, "--api-key", "")
    assert served.wait() == 2
    assert len(served.lines) == 1
