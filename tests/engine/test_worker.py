"""The engine process under bad commands: each is answered, none ends it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkchat.client import EngineClient
from sparkchat.engine import worker
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams

Record = dict[str, Any]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def client(tiny_pair: Any) -> Iterator[EngineClient]:
    """A real engine process with F-tiny, loaded once."""
    paths = {"model_path": str(tiny_pair.target), "drafter_path": str(tiny_pair.drafter)}
    with EngineClient(LoadSpec(name="tiny", device="cpu", context=256, threads=1, **paths)) as running:
        until(running, "ready")
        yield running


def until(client: EngineClient, kind: str, request_id: str | None = None, seconds: float = 300) -> list[Record]:
    """Events up to the first of this kind (of this request)."""
    events: list[Record] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        events += client.poll(0.2)
        for n, event in enumerate(events):
            if event["event"] == kind and request_id in (None, event.get("id")):
                assert n == len(events) - 1 or kind != "end", "events behind the awaited one"
                return events
        assert client.is_running, events
    raise AssertionError(f"no {kind} event in {seconds} s: {events[-3:]}")


def answer(client: EngineClient, request_id: str = "good") -> list[int]:
    client.generate(GenerateRequest(id=request_id, prompt_ids=(301, 302), sampling=GREEDY))
    result = until(client, "end", request_id)[-1]["result"]
    assert result["error"] is None
    return result["token_ids"]


def write(client: EngineClient, line: bytes) -> None:
    os.write(client._commands, line + b"\n")


def request(**fields: Any) -> Record:
    return {"op": "generate", "request": {"id": "bad", "prompt_ids": [301], "sampling": {}, **fields}}


class Quiet:
    """A channel that asks for nothing but the end."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self.commands.put({"spec": LoadSpec(name="tiny", model_path="none").to_json()})
        self.commands.put({"op": "shutdown"})
        self.told: list[str] = []
        self.next_command = self.commands.get

    def send(self, *events: Record) -> None:
        self.told += [event["event"] for event in events]


def test_what_was_loaded_is_set_aside_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Quiet()
    monkeypatch.setattr(worker, "_load", lambda spec, channel: SimpleNamespace(info={}, has_work=False))
    monkeypatch.setattr(worker, "take_over", lambda: channel.told.append("set aside"))
    worker._serve(channel)  # type: ignore[arg-type]
    assert channel.told == ["set aside", "ready"]


def test_setting_aside_leaves_the_collector_little_to_look_at() -> None:
    code = "import gc, json; from sparkchat.collector import set_aside; set_aside(1234); "
    code += "print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 100, gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "1234"]


BAD_REQUESTS: list[Any] = [
    request(sampling={"temperature": -1}),
    request(sampling={"temperature": "hot"}),
    request(sampling={"warmth": 1}),
    request(sampling={"logit_bias": [["a", 1.0]]}),
    request(sampling={"logit_bias": 5}),
    request(sampling={"stop": 7}),
    request(sampling={"stop": [""]}),
    request(sampling={"max_tokens": 0}),
    request(sampling=None),
    request(sampling=[1]),
    request(unknown=1),
    request(mode="fast"),
    request(mode=["static"]),
    request(block_size=99),
    request(block_size="5"),
    request(prompt="two of them"),
    request(prompt_ids=None),
    request(prompt_ids=5),
    request(prompt_ids=["a"]),
    request(prompt_ids=[10**30]),
    request(prompt_ids=[[1]]),
    request(prompt_ids=None, messages=[{"role": "user"}]),
    request(prompt_ids=None, messages=[["role", "user"]]),
    request(prompt_ids=None, messages="hello"),
    request(prompt_ids=None, messages=[{"role": "user", "content": {"a": 1}}]),
    request(prompt_ids=None, prompt={"text": "hello"}),
    request(prompt_ids=None, prompt="x", system=5),
    request(session=[1]),
    request(session={"a": 1}),
]


def test_a_bad_request_ends_with_its_reason_and_harms_no_one(client: EngineClient) -> None:
    expected = answer(client)
    for command in BAD_REQUESTS:
        write(client, json.dumps(command).encode())
        (end,) = until(client, "end", "bad")
        assert end["result"]["finish_reason"] == "error", command
        assert end["result"]["error"] and "\n" not in end["result"]["error"], command
        assert end["result"]["token_ids"] == []
    assert answer(client) == expected


@pytest.mark.parametrize("fields", [{}, {"request": 5}, {"request": []}], ids=str)
def test_a_request_that_is_none_still_ends(fields: Record, client: EngineClient) -> None:
    write(client, json.dumps({"op": "generate", **fields}).encode())
    (end,) = until(client, "end")
    assert (end["id"], end["result"]["finish_reason"]) == (None, "error")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"op": NaN}', b'{"op": "dance"}', b'{"op": ["load"]}', b"{}",
     b'{"op": "set_mode"}', b'{"op": "set_mode", "mode": "fast"}', b'{"op": "set_mode", "mode": {"a": 1}}',
     b"[" * 5000],
    ids=lambda line: repr(line[:30]),
)  # fmt: skip
def test_a_command_that_makes_no_sense_is_a_notice(line: bytes, client: EngineClient) -> None:
    write(client, line)
    (notice,) = until(client, "notice")
    assert notice["id"] is None
    assert len(notice["message"]) < 200


def test_cancelling_nobody_says_nothing(client: EngineClient) -> None:
    for data in ({"op": "cancel"}, {"op": "cancel", "id": "nobody"}, {"op": "cancel", "id": [1]}):
        write(client, json.dumps(data).encode())
    client.set_mode("off")
    assert [e["event"] for e in until(client, "mode_change")] == ["mode_change"]
    client.set_mode("static")
    until(client, "mode_change")


def test_bad_commands_in_the_middle_of_an_answer_change_nothing(client: EngineClient) -> None:
    expected = answer(client)
    client.generate(GenerateRequest(id="long", prompt_ids=(301, 302), sampling=SamplingParams(ignore_eos=True)))
    seen = until(client, "delta")
    write(client, json.dumps(BAD_REQUESTS[0]).encode())
    write(client, b"nonsense")
    client.set_mode("off")
    seen += until(client, "mode_change")
    client.cancel("long")
    seen += until(client, "end", "long")
    assert {"notice", "end", "mode_change"} <= {e["event"] for e in seen}
    result = seen[-1]["result"]
    assert result["finish_reason"] in ("cancelled", "length")
    shared = min(len(expected), len(result["token_ids"]))
    assert result["token_ids"][:shared] == expected[:shared]
    deltas = [e for e in seen if e["event"] == "delta" and e["id"] == "long"]
    assert [i for e in deltas for i in e["token_ids"]] == result["token_ids"]
    client.set_mode("static")
    until(client, "mode_change")
    assert answer(client) == expected


def test_many_requests_at_once_all_end(client: EngineClient) -> None:
    for n in range(40):
        prompt = (301, 302) if n % 2 else ()
        client.generate(GenerateRequest(id=f"q{n}", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1 + n % 3)))
    results: dict[str, Record] = {}
    while len(results) < 40:
        results |= {e["id"]: e["result"] for e in client.poll(30) if e["event"] == "end"}
    for n in range(40):
        assert len(results[f"q{n}"]["token_ids"]) == (1 + n % 3 if n % 2 else 0)


def test_what_a_library_prints_stays_out_of_the_events(client: EngineClient) -> None:
    """Standard output and error of the process go to its log; its pipes are not inherited by what it starts."""
    listed = {os.readlink(f"/proc/{client.pid}/fd/{fd}") for fd in (1, 2)}
    assert all("pipe" not in target for target in listed)
    for entry in os.listdir(f"/proc/{client.pid}/fdinfo"):
        if int(entry) > 2 and "pipe" in os.readlink(f"/proc/{client.pid}/fd/{entry}"):
            with open(f"/proc/{client.pid}/fdinfo/{entry}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
            assert flags & os.O_CLOEXEC


def test_killed_in_the_middle_then_started_with_a_model_that_is_not_there(client: EngineClient, tmp_path: Path) -> None:
    """Last in this file: the shared engine does not survive it."""
    client.generate(GenerateRequest(id="cut", prompt_ids=(301,), sampling=SamplingParams(ignore_eos=True)))
    seen = until(client, "step", "cut")
    os.kill(client.pid or 0, signal.SIGKILL)
    seen += list(client.events())
    assert [e["event"] for e in seen].count("crashed") == 1
    assert (seen[-1]["event"], "SIGKILL" in seen[-1]["message"]) == ("crashed", True)
    client.spec = LoadSpec(name="none", model_path=str(tmp_path / "none"), device="cpu")
    client.start()
    events = list(client.events())
    assert [e["event"] for e in events if e["event"] != "loading"] == ["error"]
    assert events[-1]["error"] == "ModelNotFound"
    assert "\n" not in events[-1]["message"]
    assert not client.is_running
