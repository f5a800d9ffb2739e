"""A rank that fails is told in one line with its cause, whenever it does; nothing waits for it or is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import ROOT, open_runner
from fixtures import broken_rank
from fixtures.deepseek_v4 import write_tiny_v4
from models.deepseek_v4.test_ranks import FEW
from sparkchat.client import EngineClient
from sparkchat.engine import ranks
from sparkchat.errors import EngineCrash, NotEnoughMemory
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(build_once: Callable[..., Any]) -> Path:
    return build_once("v4-ranks", lambda path: write_tiny_v4(path, **FEW))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no temporary file and no group stays behind."""
    room = tmp_path / "tmp"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    for pid in started_with(f"TMPDIR={room}"):
        is_gone(pid)
    assert not list(room.iterdir())
    assert not torch.distributed.is_initialized()


def started_with(variable: str) -> set[int]:
    """Processes that have this in their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found - {os.getpid()}


def children_of(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def wait_for(client: EngineClient, *kinds: str, seconds: float = 300) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in client.poll(1):
            if event["event"] in kinds:
                return event
    raise AssertionError(f"none of {kinds} came within {seconds} s")


def start(folder: Path, size: int = 2) -> EngineClient:
    return EngineClient(LoadSpec("v4", str(folder), str(folder), device="cpu", context=4000, threads=1, tp=size))


def answer(client: EngineClient) -> None:
    """Begin a long answer, and wait for its first words."""
    assert wait_for(client, "ready", "crashed", "error")["event"] == "ready"
    sampling = SamplingParams(max_tokens=3900, ignore_eos=True)
    client.generate(GenerateRequest("r", prompt_ids=(5, 6), mode="static", sampling=sampling))
    assert wait_for(client, "delta", "crashed", "end")["event"] == "delta"


def ended(client: EngineClient) -> str:
    """The last words of an engine that ends."""
    event = wait_for(client, "crashed", "end", "error")
    assert event["event"] == "crashed"
    return event["message"].removeprefix("the engine ended with code 70; its last words: ")


def is_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while (alive := Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_one_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PROGRAM", "raise ImportError('libnccl.so.2: no such file')")
    with pytest.raises(EngineCrash) as told:
        ranks.Team(2, CPU)
    assert told.value.message == (
        "rank 1 of 2 ended with code 1; its last words: ImportError: libnccl.so.2: no such file"
    )


def test_one_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PROGRAM", "import time; time.sleep(60)  # rank_process")
    monkeypatch.setattr(ranks, "_START_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "_CLOSE_SECONDS", 0.2)
    with pytest.raises(EngineCrash, match=r"rank 1 of 2 has not started after 0\.2 s"):
        ranks.Team(2, CPU)


def test_one_whose_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PROGRAM", broken_rank.program("rank", "device"))
    with pytest.raises(NotEnoughMemory, match=r"rank 1 of 2: .*CUDA error: out of memory"):
        ranks.Team(2, CPU)


def test_one_that_fails_while_it_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PROGRAM", broken_rank.program("rank", "load"))
    with pytest.raises(EngineCrash) as told:
        open_runner(folder, folder, context=80, tp=2)
    assert told.value.message == "rank 1 of 2: KeyError: 'layers.9'"


@pytest.mark.slow
def test_one_that_dies_while_the_engine_waits_to_meet_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.client._PROGRAM", broken_rank.program("engine", "join"))
    with start(folder) as client:
        assert ended(client) == "rank 1 of 2 was ended by SIGKILL"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_that_fails_in_an_answer(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.client._PROGRAM", broken_rank.program("engine", "step"))
    with start(folder, size) as client:
        answer(client)
        event = wait_for(client, "crashed", "end")
        assert event["message"].endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
        assert event["message"].startswith("the engine ended with code 70; its last words: rank ")
        # Where it happened stands above that line, for whoever looks into the log.
        assert "in fails" in event["log"]


def test_one_that_is_killed_and_an_engine_that_is(folder: Path) -> None:
    with start(folder) as client:
        answer(client)
        (other,) = children_of(client.pid or 0)
        os.kill(other, signal.SIGSTOP)  # it cannot see that the engine has gone
        os.kill(client.pid or 0, signal.SIGKILL)
        assert "SIGKILL" in wait_for(client, "crashed")["message"]
        is_gone(other)
        client.start()
        assert wait_for(client, "ready", "crashed", "error")["event"] == "ready"
        os.kill(*children_of(client.pid or 0), signal.SIGKILL)  # nothing runs
        assert ended(client) == "rank 1 of 2 was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("size, killed", [(2, 0), (4, 1)])
def test_one_that_is_killed_in_an_answer(size: int, killed: int, folder: Path) -> None:
    """With four, the collectives of the others fail too; the one that was killed is told."""
    with start(folder, size) as client:
        answer(client)
        os.kill(sorted(children_of(client.pid or 0))[killed], signal.SIGKILL)
        assert ended(client) == f"rank {killed + 1} of {size} was ended by SIGKILL"


def test_a_rank_ends_when_the_engine_is_gone_before_it_has_joined() -> None:
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    fds = (command_read, event_write)
    rank = subprocess.Popen([sys.executable, "-c", ranks._PROGRAM, *map(str, fds)], cwd=ROOT, pass_fds=fds)
    for fd in (command_read, command_write, event_read, event_write):
        os.close(fd)
    assert rank.wait(60) == 0
