"""The parent's end of the pipe: every way the engine process can end, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sparkchat import client as client_module
from sparkchat.client import EngineClient
from sparkchat.errors import EngineCrash, UsageError
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams

Record = dict[str, Any]
ROOT = Path(__file__).parents[2]
READY = 'event({"event": "ready", "info": {}})'
ECHO = 'for line in commands: event({"event": "echo", "command": json.loads(line)})'
PRELUDE = """
import json, os, sys, time, signal
commands = os.fdopen(int(sys.argv[1]), "rb")
def raw(data):
    while data: data = data[os.write(int(sys.argv[2]), data):]
def event(value): raw(json.dumps(value).encode() + b"\\n")
"""


def play(monkeypatch: pytest.MonkeyPatch, *script: str) -> EngineClient:
    """A client whose engine process runs this script instead."""
    monkeypatch.setattr(client_module, "_PROGRAM", PRELUDE + "\n".join(script))
    return EngineClient(LoadSpec(name="x", model_path="/x"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def is_reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


ENDS: dict[str, tuple[str, str]] = {
    # name: (how the process ends, what the message says)
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "segmentation fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "abort": ("os.abort()", "SIGABRT"),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
    "an exception": ("raise ValueError('odd thing')", "ValueError: odd thing"),
    "an exit code": ("os._exit(70)", "code 70"),
    "a silent exit": ("os._exit(0)", "code 0"),
    "closed its pipe and hangs": ("os.close(int(sys.argv[2])); time.sleep(60)", "SIGKILL"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_unasked_end_is_one_crashed_event_and_a_new_start_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_SHUTDOWN_SECONDS", 0.5)
    how, says = ENDS[name]
    client = play(monkeypatch, READY, "print('last words', file=sys.stderr, flush=True)", how)
    before = open_descriptors()
    client.start()
    pid = client.pid
    events = list(client.events())
    assert [e["event"] for e in events] == ["ready", "crashed"]
    assert says in events[-1]["message"]
    assert "last words" in events[-1]["log"]
    assert "\n" not in events[-1]["message"]
    assert not client.is_running
    assert client.poll(0) == []
    assert client.fileno() == -1
    assert is_reaped(pid)
    with pytest.raises(EngineCrash):
        client.cancel("x")
    monkeypatch.setattr(client_module, "_PROGRAM", PRELUDE + f"{READY}\n{ECHO}")
    client.start()
    client.cancel("x")
    found: list[Record] = []
    while len(found) < 3:
        found += client.poll(10)
    assert [e["event"] for e in found] == ["ready", "echo", "echo"]
    client.close()
    assert open_descriptors() == before


def test_an_error_event_is_the_whole_story(monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'event({"event": "error", "error": "UsageError", "message": "no"}); os._exit(0)'
    with play(monkeypatch, script) as client:
        assert [e["event"] for e in client.events()] == ["error"]


def test_a_process_that_ends_before_it_reads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LoadSpec(name="x" * 300_000, model_path="/x")  # more than the pipe holds
    monkeypatch.setattr(client_module, "_PROGRAM", "import os; os._exit(3)")
    client = EngineClient(spec)
    client.start()
    (event,) = client.events()
    assert (event["event"], "code 3" in event["message"]) == ("crashed", True)
    client.close()


def test_a_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    client = EngineClient(LoadSpec(name="x", model_path="/x"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineCrash, match="cannot be started"):
        client.start()
    assert not client.is_running
    client.close()
    assert open_descriptors() == before


def test_events_of_any_size_and_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    client = play(
        monkeypatch,
        'big = "é" * 3_000_000',
        'event({"event": "a", "text": big})',
        'data = json.dumps({"event": "b", "text": "x\\u2028y"}).encode() + b"\\n" + b\'{"event": "c"\'',
        "for byte in data: raw(bytes([byte])); time.sleep(0.002)",
        'raw(b\'}\\n\' + b\'{"event": "d"}\\n\' * 3 + b\'{"event": "cut\')',
        "os._exit(0)",
    )
    with client:
        started = time.monotonic()
        events = list(client.events())
    assert [e["event"] for e in events] == ["a", "b", "c", "d", "d", "d", "crashed"]
    assert events[0]["text"] == "é" * 3_000_000
    assert events[1]["text"] == "x\u2028y"
    assert time.monotonic() - started < 20


def test_polling_waits_no_longer_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_SHUTDOWN_SECONDS", 0.3)
    with play(monkeypatch, "raw(b'{\"event\": ')", "time.sleep(60)") as client:
        started = time.monotonic()
        assert client.poll(0) == []
        assert client.poll(0.3) == []
        assert 0.25 < time.monotonic() - started < 5


def test_closing_ends_the_process_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_SHUTDOWN_SECONDS", 0.3)
    busy = "while True: event({'event': 'noise', 'text': 'x' * 1000})"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    before = open_descriptors()
    for script in (ECHO, busy, deaf):
        client = play(monkeypatch, READY, script)
        client.start()
        assert client.poll(20)[0]["event"] == "ready"
        pid = client.pid
        client.close()
        client.close()
        assert is_reaped(pid)
        assert (client.pid, client.is_running, list(client.events())) == (None, False, [])
    assert open_descriptors() == before


def test_closing_an_engine_that_has_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = play(monkeypatch, READY, "os._exit(1)")
    client.start()
    pid = client.pid
    assert gone(pid)
    client.close()  # without having polled
    assert is_reaped(pid)


def test_commands_arrive_whole_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with play(monkeypatch, ECHO) as client:

        def send(name: str) -> None:
            for n in range(20):
                client.generate(GenerateRequest(id=f"{name}{n}", prompt="ä" * 20_000))

        threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        found: list[Record] = []
        while len(found) < 41:
            found += client.poll(20)
        for thread in threads:
            thread.join()
    requests = [e["command"]["request"] for e in found[1:]]
    assert sorted(r["id"] for r in requests) == sorted(f"{name}{n}" for name in "ab" for n in range(20))
    assert all(r["prompt"] == "ä" * 20_000 for r in requests)


def test_a_number_that_json_cannot_carry_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with play(monkeypatch, ECHO) as client:
        sampling = SamplingParams(logit_bias=((5, float("inf")),))
        with pytest.raises(UsageError, match="finite"):
            client.generate(GenerateRequest(id="a", prompt="x", sampling=sampling))
        assert client.is_running


def test_a_library_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('wrong numpy')")
    monkeypatch.chdir(tmp_path)
    with play(monkeypatch, 'import numpy; event({"event": "from", "file": numpy.__file__})') as client:
        assert "site-packages" in client.poll(60)[0]["file"]


def test_the_engine_starts_where_the_current_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with play(monkeypatch, 'event({"event": "in", "folder": os.getcwd()})') as client:
        assert client.poll(60)[0]["folder"] == "/"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=str,
)
def test_threads_of_the_engine_do_not_spin_for_long(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says how they wait."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    tell = 'event({"event": "told", "spins": os.environ.get("GOMP_SPINCOUNT")})'
    with play(monkeypatch, tell, "time.sleep(60)") as client:
        assert client.poll(10) == [{"event": "told", "spins": spins}]


PARENT = """
import sys
from sparkchat import client
from sparkchat.params import LoadSpec
target, drafter = sys.argv[1:]
running = client.EngineClient(LoadSpec(name="x", model_path=target, drafter_path=drafter, device="cpu", context=4000))
running.start()
for event in running.events():
    if event["event"] == "ready":
        break
from sparkchat.params import GenerateRequest, SamplingParams
running.generate(GenerateRequest(id="a", prompt_ids=(301,), sampling=SamplingParams(ignore_eos=True)))
print(running.pid, flush=True)
for event in running.events():
    pass
"""


def test_the_real_engine_dies_with_its_parent(tiny_pair: Any) -> None:
    """In the middle of an answer."""
    command = [sys.executable, "-c", PARENT, str(tiny_pair.target), str(tiny_pair.drafter)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        parent.wait()
        assert gone(child, 10)
