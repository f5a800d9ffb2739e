"""The batch loop: order, flushing, bad lines among good ones, and an engine that dies."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cli.conftest import Cli
from sparkchat.cli.main import _terminate
from sparkchat.errors import EngineCrash
from sparkchat.params import GenerateRequest, LoadSpec

INFO = {"model": "m", "drafter": "d", "mode": "static", "reason_off": None, "load_ms": 1.5, "notices": []}


class FakeEngine:
    """Speaks the engine's events; answers each prompt with itself, the shortest prompt first."""

    opened: ClassVar[list[FakeEngine]] = []
    dies_on = ""
    fails_to_load = False
    signalled: ClassVar[list[signal.Signals]] = []
    """Sent to this process when a request with the prompt "wait" arrives, which is answered by a cancel alone."""
    obeys_cancel = True

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.requests: list[GenerateRequest] = []
        self.most_in_flight = 0
        self.pending: list[GenerateRequest] = []
        self.is_running = True
        self.read, self.write = os.pipe()
        self.closed = False
        self.cancelled: set[str] = set()
        FakeEngine.opened.append(self)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def fileno(self) -> int:
        return self.read

    def events(self) -> Iterator[dict[str, Any]]:
        if FakeEngine.fails_to_load:
            yield {"event": "error", "error": "NotEnoughMemory", "message": "too large"}
        yield {"event": "loading", "stage": "weights", "message": "loading", "done": None, "total": None}
        yield {"event": "ready", "info": INFO}

    def generate(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        self.pending.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.pending))
        os.write(self.write, b".")
        if request.prompt == "wait":
            for number in FakeEngine.signalled:
                os.kill(os.getpid(), number)

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)
        os.write(self.write, b".")

    def poll(self, _timeout: float | None = 0.0) -> list[dict[str, Any]]:
        os.read(self.read, 1 << 16)
        waits = [r for r in self.pending if r.prompt == "wait" and not (self.obeys_cancel and r.id in self.cancelled)]
        done = sorted((r for r in self.pending if r not in waits), key=lambda r: len(r.prompt or ""))
        self.pending = waits
        if FakeEngine.dies_on and any(r.prompt == FakeEngine.dies_on for r in done):
            return [{"event": "crashed", "message": "the engine was ended by SIGKILL"}]
        deltas = [{"event": "delta", "id": r.id, "text": "partly", "token_ids": [7, 8]} for r in waits]
        return deltas + [self.end(r) for r in done]

    def end(self, request: GenerateRequest) -> dict[str, Any]:
        reason = "cancelled" if request.id in self.cancelled else "stop"
        result = {"text": request.prompt, "error": None, "finish_reason": reason}
        return {"event": "end", "id": request.id, "result": result, "thinking": ""}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr("sparkchat.cli.batch.EngineClient", FakeEngine)
    monkeypatch.setattr(FakeEngine, "opened", [])
    return FakeEngine


class Pipe:
    """A stdin that is a real pipe, so that it can be waited for."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def fileno(self) -> int:
        return self.read

    def isatty(self) -> bool:
        return False

    def send(self, *lines: Any, end: bool = True) -> None:
        for line in lines:
            os.write(self.write, (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        if end:
            os.close(self.write)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    pipe = Pipe()
    monkeypatch.setattr("sys.stdin", pipe)
    return pipe


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_results_come_in_input_order_with_their_ids(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    stdin.send(
        {"id": 7, "prompt": "a long prompt"},
        {"id": {"x": [1]}, "prompt": "b"},
        {"prompt": "cc"},
        {"id": 7, "prompt": "d"},
        {"id": "\ud800 \u00e9", "prompt": "e"},
        b'{"id": "nan", "temperature": NaN}',
    )
    done = main("batch", model_folder, "--concurrency", "4")
    found = results(done.out)
    assert done.code == 0, done.err
    assert [r["text"] for r in found] == ["a long prompt", "b", "cc", "d", "e", ""]
    assert [r.get("id", "absent") for r in found] == [7, {"x": [1]}, "absent", 7, "\ud800 \u00e9", "nan"]
    assert engine.opened[0].spec.concurrency == 4
    assert engine.opened[0].closed


def test_bad_lines_give_error_results_in_their_place(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    stdin.send(
        b"\xef\xbb\xbf" + b'{"prompt": "one"}',
        b"{broken",
        b"",
        b"\xff",
        {"id": 2, "prompt": "x", "max_tokens": 0},
        {"prompt": "two"},
    )
    done = main("batch", model_folder)
    assert done.code == 0
    found = results(done.out)
    assert [r.get("finish_reason") for r in found] == ["stop", "error", "error", "error", "stop"]
    assert "not JSON" in found[1]["error"] and "not UTF-8" in found[2]["error"] and "max_tokens 0" in found[3]["error"]
    assert found[3]["id"] == 2
    assert found[1]["schema"] == "sparkchat.result/1" and found[1]["timing"]["ttft_ms"] is None
    assert set(found[1]["speculation"]) >= {"num_steps", "mean_acceptance_length", "acceptance_histogram", "reason_off"}
    assert (found[0]["text"], found[4]["text"]) == ("one", "two")


def test_a_line_without_a_newline_at_the_end_counts(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    os.write(stdin.write, b'{"prompt": "last"}')
    os.close(stdin.write)
    assert [r["text"] for r in results(main("batch", model_folder).out)] == ["last"]


def test_no_input_is_no_error(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    stdin.send()
    done = main("batch", model_folder)
    assert (done.code, done.out, done.err) == (0, "", "")


def test_each_result_is_written_before_the_next_request_is_needed(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may wait for each answer before it sends the next request."""
    answered = threading.Event()
    seen: list[str] = []

    def keep(text: str) -> None:
        seen.append(text)
        answered.set()

    monkeypatch.setattr("sparkchat.cli.batch.json_text", keep)
    waited = []

    def ask() -> None:
        for number in range(3):
            answered.clear()
            stdin.send({"prompt": str(number)}, end=False)
            waited.append(answered.wait(10))
        os.close(stdin.write)

    thread = threading.Thread(target=ask)
    thread.start()
    assert main("batch", model_folder).code == 0
    thread.join()
    assert waited == [True, True, True]
    assert [json.loads(text)["text"] for text in seen] == ["0", "1", "2"]


def test_reading_ahead_is_bounded(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    lines = [{"prompt": "x" * 40_000} for _ in range(12)]
    thread = threading.Thread(target=lambda: stdin.send(*lines))
    thread.start()
    done = main("batch", model_folder, "--concurrency", "1")
    thread.join()
    assert len(results(done.out)) == 12
    assert engine.opened[0].most_in_flight <= 6


def test_an_engine_that_dies_fails_what_waits_and_ends_with_70(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "dies_on", "boom")
    stdin.send({"id": 1, "prompt": "boom"}, {"id": 2, "prompt": "later"})
    done = main("batch", model_folder)
    assert done.code == EngineCrash.exit_code
    assert [(r["id"], r["finish_reason"]) for r in results(done.out)] == [(1, "error"), (2, "error")]
    assert "SIGKILL" in done.error


def test_debug_shows_the_traceback_of_an_engine_that_died(
    main: Cli, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.client._PROGRAM", "1 / 0")
    stdin.send({"id": 1, "prompt": "hi"})
    for flags, is_shown in (((), False), (("--debug",), True)):
        done = main("batch", model_folder, *flags)
        assert done.code == EngineCrash.exit_code
        assert ('File "<string>", line 1, in <module>' in done.err) is is_shown
        assert "ZeroDivisionError" in done.err.splitlines()[-1]


def test_a_model_that_does_not_load_gives_its_own_code(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "fails_to_load", True)
    stdin.send({"prompt": "hi"})
    done = main("batch", model_folder)
    assert (done.code, done.out, done.error) == (4, "", "too large")


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_concurrency_must_be_a_count(main: Cli, engine: Any, stdin: Pipe, model_folder: Path, value: str) -> None:
    assert main("batch", model_folder, "--concurrency", value).code == 2
    assert engine.opened == []


def test_run_level_options_reach_every_request(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    stdin.send({"prompt": "a"}, {"prompt": "b", "temperature": 0.9})
    main("batch", model_folder, "--temperature", "0.2", "--system", "s", "--mode", "off")
    first, second = engine.opened[0].requests
    assert (first.sampling.temperature, second.sampling.temperature) == (0.2, 0.9)
    assert first.system == "s" and engine.opened[0].spec.mode == "off"


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), SIGNALS, ids=lambda value: str(value))
def test_a_signal_gives_every_line_that_was_read_its_result(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(FakeEngine, "signalled", [number])
    before = signal.getsignal(number)
    stdin.send({"id": 1, "prompt": "wait"}, b"{broken", {"id": 3, "prompt": "done"}, end=False)
    done = main("batch", model_folder, "--concurrency", "2")
    assert done.code == code, done.err
    assert [r["finish_reason"] for r in results(done.out)] == ["cancelled", "error", "stop"]
    assert "Traceback" not in done.err and engine.opened[0].closed
    assert signal.getsignal(number) in (before, _terminate) and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_what_the_engine_does_not_stop_in_time_is_cut_off(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "signalled", [signal.SIGTERM])
    monkeypatch.setattr(FakeEngine, "obeys_cancel", False)
    monkeypatch.setattr("sparkchat.cli.batch._CANCEL_SECONDS", 0.3)
    stdin.send({"id": 1, "prompt": "wait", "mode": "off"}, end=False)
    done = main("batch", model_folder)
    (result,) = results(done.out)
    assert (done.code, result["id"], result["finish_reason"], result["mode"]) == (143, 1, "cancelled", "off")
    assert result["text"] == "partly" * (len(result["token_ids"]) // 2) != ""


def test_a_second_signal_ends_it_at_once(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "signalled", [signal.SIGTERM, signal.SIGTERM])
    monkeypatch.setattr("sparkchat.cli.batch._CANCEL_SECONDS", 1000.0)
    stdin.send({"id": 1, "prompt": "wait"}, end=False)
    done = main("batch", model_folder)
    assert (done.code, done.out, done.error) == (143, "", "ended by SIGTERM")


def test_an_output_that_nobody_reads_does_not_hold_it(
    main: Cli, engine: Any, stdin: Pipe, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is larger than a pipe, and whoever started us (a service manager) sends one signal."""

    def write(_text: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)

    monkeypatch.setattr("sparkchat.cli.batch.json_text", write)
    monkeypatch.setattr("sparkchat.cli.batch._CANCEL_SECONDS", 0.1)
    stdin.send({"id": 1, "prompt": "x"})
    assert main("batch", model_folder).code == 143


def test_an_ignored_hangup_stays_ignored(main: Cli, engine: Any, stdin: Pipe, model_folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        FakeEngine.signalled = [signal.SIGHUP, signal.SIGTERM]
        stdin.send({"id": 1, "prompt": "wait"})
        assert main("batch", model_folder).code == 143
    finally:
        FakeEngine.signalled = []
        signal.signal(signal.SIGHUP, before)
