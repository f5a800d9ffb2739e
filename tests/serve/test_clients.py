"""Many clients, slow clients, and clients that leave: nobody waits for them, and what was received is what was made."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serve.conftest import CONTEXT, HELLO, TAPE
from serve.served import Served, recorded
from sparkchat.trace import verify

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": CONTEXT - 1, "ignore_eos": True, "mode": "off"}
SECONDS = 1.0
"""Within this the place of a client that left is free again."""


def idle_within(server: Served, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not server.is_idle():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def reset(opened: socket.socket) -> None:
    """Close with a RST, as a crashed client's machine does."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


def after_one_chunk(server: Served) -> socket.socket:
    opened = server.begin(TEXT, {**ENDLESS, "stream": True})
    assert b"200 OK" in opened.recv(4096)
    return opened


def before_the_first_chunk(server: Served) -> socket.socket:
    return server.begin(TEXT, {**ENDLESS, "stream": True})


def without_a_stream(server: Served) -> socket.socket:
    opened = server.begin(CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
    return opened


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("begin", [after_one_chunk, before_the_first_chunk, without_a_stream])
def test_a_client_that_leaves_takes_its_request_along(
    server: Served, begin: Callable[[Served], socket.socket], leave: Callable[[socket.socket], None]
) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    generated = server.metric("vllm:generation_tokens_total")
    num_lines = len(server.lines)
    leave(begin(server))
    server.wait_for(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)
    assert idle_within(server, SECONDS)
    assert server.metric("vllm:generation_tokens_total") - generated < ENDLESS["max_tokens"] / 2
    server.wait_for(lambda: len(server.lines) == num_lines + 1)
    assert "its answer was stopped" in server.lines[-1]
    assert server.text(max_tokens=30)["choices"][0]["text"] == HELLO


def test_many_that_leave_in_a_row_leave_nothing_behind(server: Served) -> None:
    for _ in range(25):
        after_one_chunk(server).close()
    assert idle_within(server, 5)
    assert server.text(max_tokens=30)["choices"][0]["text"] == HELLO


def test_clients_that_leave_while_they_wait_free_the_queue(server: Served) -> None:
    waiting = [server.begin(TEXT, ENDLESS) for _ in range(12)]
    server.wait_for(lambda: server.metric("vllm:num_requests_waiting") == 8)
    for opened in waiting:
        opened.close()
    assert idle_within(server, 10)
    assert server.text(max_tokens=30)["choices"][0]["text"] == HELLO


def test_64_clients_at_once_receive_what_the_trace_records(start: Callable[..., Served], tmp_path: Path) -> None:
    trace = tmp_path / "all.spark.jsonl"
    served = start("--concurrency", "8", "--trace", trace).ready()

    def ask(number: int) -> tuple[str, list[int], str]:
        body = {"prompt": f"client {number}", "max_tokens": 5 + number % 12, "ignore_eos": True, "seed": number}
        if number % 3 == 0:
            body["temperature"] = 0.8
        if number % 2:
            answer = served.text(**body, return_token_ids=True)
            (choice,) = answer["choices"]
            return answer["id"], choice["token_ids"], choice["text"]
        *chunks, end = served.stream(TEXT, {**body, "return_token_ids": True})
        assert end == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        ids = [i for choice in choices for i in choice.get("token_ids", ())]
        return chunks[0]["id"], ids, "".join(choice["text"] for choice in choices)

    with ThreadPoolExecutor(64) as pool:
        received = list(pool.map(ask, range(64)))
    assert served.metric("vllm:generation_tokens_total") == sum(len(ids) for _, ids, _ in received)
    assert served.metric("sglang:num_requests_total") == 64
    assert served.end() == 143
    ends = {lines[0]["id"]: lines[-1] for lines in recorded(trace).values()}
    assert len(ends) == 64
    for request_id, ids, text in received:
        end = ends[f"{request_id}-0"]
        assert (end["type"], end["token_ids"], end["text"]) == ("end", ids, text)
    assert verify(trace).ok


def test_a_slow_reader_gets_everything_and_holds_up_nobody(server: Served) -> None:
    asked = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True, "return_token_ids": True}
    slow = socket.create_connection((server.host, server.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps(asked).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    slow.sendall(f"{head}\r\n\r\n".encode() + data)
    server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
    # The engine ends its answer although nothing of it was read, and others are answered meanwhile.
    assert server.text(max_tokens=30)["choices"][0]["text"] == HELLO
    assert idle_within(server, 30)
    response = http.client.HTTPResponse(slow)
    response.begin()
    chunks = [json.loads(line[6:]) for line in response.read().split(b"\n\n") if line.startswith(b"data: {")]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
    assert len(ids) == 250
    assert ids[: len(TAPE.ids[0])] == list(TAPE.ids[0])
    slow.close()
