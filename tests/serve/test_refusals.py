"""Every client mistake is a 4xx that names the field, and the server answers the next request."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from serve.conftest import CONTEXT, HELLO
from serve.served import Served

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

RAW_BODIES = {
    "empty": (b"", 400),
    "cut": (b"{", 400),
    "list": (b"[]", 400),
    "null": (b"null", 400),
    "text": (b'"x"', 400),
    "deep": (b"[" * 5_000_000, 400),
    "bad UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
    "keys twice": (b'{"messages": [{"role":"user","content":"hi"}], "n": 1, "n": 2}', 400),
    "NaN": (b'{"messages": [{"role":"user","content":"hi"}], "temperature": NaN}', 400),
    "huge number": (b'{"messages": [{"role":"user","content":"hi"}], "temperature": 1e999}', 400),
    "huge integer": (b'{"messages": [{"role":"user","content":"hi"}], "seed": ' + b"9" * 6000 + b"}", 400),
    "too large": (b" " * (9 << 20), 413),
}

WRONG_FIELDS: list[tuple[str, Json, str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "colour": "red"}]}, "messages[0].colour"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": -5}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 10**12}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": HI, "temperature": 10**400}, "temperature"),
    (CHAT, {"messages": HI, "logit_bias": {"5": 10**400}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": [[5.5, 1]]}, "logit_bias"),
    (CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": CONTEXT + 1}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "temperature": "warm"}, "temperature"),
    (CHAT, {"messages": HI, "temperature": 1000}, "temperature"),
    (CHAT, {"messages": HI, "top_p": -0.1}, "top_p"),
    (CHAT, {"messages": HI, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "n": True}, "n"),
    (CHAT, {"messages": HI, "seed": -1}, "seed"),
    (CHAT, {"messages": HI, "stop": [""]}, "stop"),
    (CHAT, {"messages": HI, "stop": ["x"] * 17}, "stop"),
    (CHAT, {"messages": HI, "stop": {"a": 1}}, "stop"),
    (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HI, "stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"messages": HI, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": HI, "store": True}, "store"),
    (CHAT, {"messages": HI, "mode": "fast"}, "mode"),
    (CHAT, {"messages": HI, "block_size": 0}, "block_size"),
    (CHAT, {"messages": HI, "accept_cap": 0}, "accept_cap"),
    (CHAT, {"messages": HI, "draft_temperature": "hot"}, "draft_temperature"),
    (CHAT, {"messages": HI, "think": 1}, "think"),
    (CHAT, {"messages": HI, "reasoning_effort": 1}, "reasoning_effort"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"colour": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "temprature": 1}, "temprature"),
    (CHAT, {"messages": HI, "prompt": "hi"}, "prompt"),
    (CHAT, {"messages": HI, "session": "s", "n": 2}, "session"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": {}}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": ["x"] * 65}, "n"),
    (TEXT, {"prompt": "x", "echo": True}, "echo"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "x", "messages": HI}, "messages"),
]


def check_error(answer: Json) -> Json:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]
    return answer["error"]


def check_alive(server: Served) -> None:
    assert server.text(max_tokens=30)["choices"][0]["text"] == HELLO


@pytest.mark.parametrize("name", RAW_BODIES)
def test_garbage_is_refused(server: Served, name: str) -> None:
    body, wanted = RAW_BODIES[name]
    for path in (CHAT, TEXT):
        status, answer = server.post(path, body)
        assert status == wanted
        assert check_error(answer)["type"] == "invalid_request_error"
    check_alive(server)


@pytest.mark.parametrize(("path", "body", "param"), WRONG_FIELDS, ids=lambda v: json.dumps(v)[:60])
def test_a_wrong_field_is_named(server: Served, path: str, body: Json, param: str) -> None:
    status, answer = server.post(path, body)
    assert status == 400
    assert check_error(answer)["param"] == param


def test_a_misspelt_field_names_the_nearest(server: Served) -> None:
    _, answer = server.post(CHAT, {"messages": HI, "temprature": 1})
    assert "did you mean 'temperature'?" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": "x" * (CONTEXT + 5)}, "context_length_exceeded", None),
        ({"prompt": ""}, "invalid_value", None),
        ({"prompt": [5000]}, "invalid_value", None),
        ({"prompt": "x", "block_size": 9}, "invalid_value", "block_size"),
        ({"prompt": "x", "logit_bias": {"5000": 1}}, "invalid_value", "logit_bias"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_also_for_a_stream(
    server: Served, body: Json, code: str, param: str | None, stream: bool
) -> None:
    status, answer = server.post(TEXT, {**body, "stream": stream})
    assert status == 400
    error = check_error(answer)
    assert (error["code"], error["param"]) == (code, param)
    check_alive(server)


def test_values_without_effect_are_taken(server: Served) -> None:
    harmless = {
        "n": 1,
        "top_k": -1,
        "user": "me",
        "metadata": {},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "max_tokens": None,
        "logprobs": False,
        "stream": False,
        "stream_options": None,
    }
    assert server.chat(**harmless)["choices"][0]["message"]["content"] == HELLO


def test_other_paths_methods_types_and_models(server: Served) -> None:
    assert server.get("/v1/nothing")[0] == 404
    assert server.get(CHAT)[0] == 405
    assert server.get("/health", method="DELETE")[0] == 405
    assert server.get("/health", method="HEAD") == (200, "")
    assert server.get("/v1/models/other")[0] == 404
    assert server.post(CHAT, {"messages": HI}, {"content-type": "text/plain"})[0] == 415
    assert server.post(CHAT, {"messages": HI}, {"content-encoding": "gzip"})[0] == 415
    status, answer = server.post(CHAT, {"messages": HI, "model": "gpt-9"})
    assert (status, check_error(answer)["code"]) == (404, "model_not_found")


def test_a_foreign_host_name_is_not_answered(server: Served) -> None:
    """What a web page whose own name was made to point here would send."""
    status, answer = server.post(CHAT, {"messages": HI}, {"host": f"evil.example:{server.port}"})
    assert status == 403
    check_error(answer)
    for origin in ("https://evil.example", "null"):
        assert server.post(CHAT, {"messages": HI}, {"origin": origin})[0] == 403
    assert server.post(CHAT, {"messages": HI, "max_tokens": 1}, {"origin": "http://localhost:3000"})[0] == 200
    assert server.get("/health", {"host": f"localhost:{server.port}"})[0] == 200


def test_a_body_that_never_comes_holds_up_nobody(server: Served) -> None:
    lazy = socket.create_connection((server.host, server.port))
    lazy.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{{".encode())
    check_alive(server)
    lazy.close()
