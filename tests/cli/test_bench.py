"""What a bench keeps, shows and says, whatever ends it."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cli.conftest import Cli, Done, child_environment, command
from sparkchat.cli import bench as command_module
from sparkchat.params import GenerateRequest, LoadSpec

INFO = {
    "model": "m",
    "drafter": "d",
    "block_size": 5,
    "device": "cpu",
    "versions": {},
    "temperatures": None,
    "graphs": False,
    "heads": {"confidence": False},
    "chat_template": "none",
    "vocab_size": 512,
    "dtype": "float32",
    "kv_bytes_per_token": 8,
}
BEFORE = 2 + 8
"""Requests ahead of the measuring: a first answer of each arm, and four that are compared."""


class FakeEngine:
    """Answers at once with as many tokens as were asked for."""

    act_at: ClassVar[dict[int, Callable[[FakeEngine], None]]] = {}
    """What happens when so many requests have come."""
    differs: ClassVar[bool] = False
    num_started: ClassVar[int] = 0
    captured: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, spec: LoadSpec) -> None:
        FakeEngine.num_started += 1
        self.told: list[dict[str, Any]] = []
        self.num_requests, self.now = 0, 0
        self.is_running = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_running = False

    def events(self) -> Iterator[dict[str, Any]]:
        for done in (0, 3):
            yield {"event": "loading", "stage": "graphs", "message": "capturing graphs", "done": done, "total": 3}
        yield {"event": "notice", "id": None, "message": "an old [b]table[/b] is not used"}
        yield {"event": "ready", "info": INFO}

    def send(self, command: dict[str, Any]) -> None:
        if command["op"] == "plan_by_table":
            self.told.append({"event": "info", "info": INFO})
            return
        if command["op"] in ("measure_together", "cancel"):
            return
        if command["op"] == "capture_ahead":
            FakeEngine.captured.append(json.loads(json.dumps(command)))
        else:
            assert command["op"] == "num_graphs"
        self.told.append({"event": "num_graphs", "count": 3})

    def generate(self, request: GenerateRequest) -> None:
        self.num_requests += 1
        token = 2 if self.differs and request.mode == "static" else 1
        result = {
            "token_ids": [token] * (request.sampling.max_tokens or 0),
            "prompt_token_ids": [7],
            "finish_reason": "length",
            "error": None,
        }
        self.told += [{"event": "delta", "id": request.id}, self.step(), self.step()]
        self.told.append({"event": "end", "id": request.id, "result": result})
        if (act := self.act_at.get(self.num_requests)) is not None:
            act(self)

    def step(self) -> dict[str, Any]:
        self.now += 1_000_000
        counts = {"requests": 1, "tokens": 3, "proposed": 4, "verified": 3, "accepted": 2, "limited": 0}
        times = {"t_ns": self.now, "step_ms": 1.0, "predicted_step_ms": None}
        return {"event": "batch_step", **counts, **times, "expected": None, "num_graphs": 3 * INFO["graphs"]}

    def poll(self, _timeout: float | None = 0.0) -> list[dict[str, Any]]:
        told, self.told = self.told, []
        return told

    def crash(self) -> None:
        self.told = [{"event": "crashed", "message": "the engine was ended by SIGKILL"}]

    def get_signal(self, number: int) -> None:
        os.kill(os.getpid(), number)


@pytest.fixture
def run(main: Cli, model_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """A bench of two arms: two rounds of one request, one of two, one of four."""
    monkeypatch.setattr("sparkchat.bench.engine_runs.EngineClient", FakeEngine)
    monkeypatch.setattr(FakeEngine, "act_at", {})
    monkeypatch.setattr(FakeEngine, "num_started", 0)
    monkeypatch.setattr(FakeEngine, "captured", [])
    monkeypatch.setattr(command_module, "_LEAST_ROUNDS", 1)
    words = ("--drafter", drafter_folder, "--concurrency", "1,2,4", "--prompts", "2", "--tokens", "8", "--seconds", "0")

    def run(*args: str | Path) -> Done:
        return main("bench", model_folder, *words, *args)

    return run


def rows_of(report: dict[str, Any]) -> list[tuple[int, str, int]]:
    return [(row["concurrency"], row["arm"], row["rounds"]) for row in report["results"]]


WHOLE = [(n, arm, 2 if n == 1 else 1) for n in (1, 2, 4) for arm in ("off", "static")]


def test_every_row_is_told_on_stderr_as_it_comes(run: Callable[..., Done], tmp_path: Path) -> None:
    done = run("--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert rows_of(done.json) == WHOLE
    assert (done.json["complete"], done.json["missing"]) == (True, [])
    assert {name for name, seconds in done.json["seconds"].items() if seconds > 0.0} == {
        *("load", "first_answers", "comparison", "rounds"),
    }
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == done.json
    lines = [line.removeprefix("sparkchat: ") for line in done.err.splitlines()]
    assert lines[:2] == ["capturing graphs, 0 of 3", "an old [b]table[/b] is not used"]
    rows = [line for line in lines if "tokens/s" in line]
    # In the second round of one together the other arm was first, and so it was the first to have both.
    assert [line.split(":")[0] for line in rows] == [
        f"{n} together, {arm}" for n in (1, 2, 4) for arm in (("static", "off") if n == 1 else ("off", "static"))
    ]
    assert "(1 of 6, at least" in rows[0]
    assert "(3 of 6, about" in rows[2]
    assert rows[-1].endswith("(6 of 6)")
    assert FakeEngine.num_started == 1


def test_on_a_terminal_one_line_changes_and_is_gone_at_the_end(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.cli.bench_progress.can_draw", lambda: True)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    done = run()
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 2 + 6
    assert "\x1b" not in done.out
    assert "an old [b]table[/b] is not used\n" in done.err
    assert "4 together, static: " in done.err
    # What stays: the notice, and the line that is wiped.
    assert done.err.count("\n") == 2
    assert done.err.endswith("\x1b[2K")


def test_verbose_tells_every_round(run: Callable[..., Done]) -> None:
    done = run("--verbose")
    assert [line.split(", ")[1].split(":")[0] for line in done.err.splitlines() if "round 1 of 2" in line] == [
        "off",
        "static",
    ]


def test_stderr_that_takes_nothing_stops_no_measuring(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sparkchat.cli.bench_progress.note", full)
    done = run()
    assert (done.code, len(done.out.splitlines())) == (0, 2 + 6)


def test_steps_are_captured_before_rounds_of_many(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INFO, "graphs", True)
    done = run("--concurrency", "8,16,32", "--json")
    assert done.code == 0, done.err
    assert [(c["above"], c["most"]) for c in FakeEngine.captured] == [(7, 8), (15, 16), (31, 32)]
    assert FakeEngine.captured[0]["blocks"] == [[0, False], [5, False]]
    assert done.err.index("capturing steps of 16 together") < done.err.index("16 together, off")
    assert done.json["seconds"]["captures_ahead"] > 0.0


def test_the_file_is_there_after_every_concurrency(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.json"
    seen: list[Any] = []

    def look(_engine: FakeEngine) -> None:
        seen.append(json.loads(file.read_text()) if file.exists() else None)

    # In the middle of each concurrency.
    monkeypatch.setattr(FakeEngine, "act_at", dict.fromkeys((BEFORE + 2, BEFORE + 4 + 2, BEFORE + 8 + 2), look))
    assert run("--out", tmp_path).code == 0
    assert seen[0] is None
    assert [rows_of(report) for report in seen[1:]] == [WHOLE[:2], WHOLE[:4]]
    assert [report["complete"] for report in seen[1:]] == [False, False]
    assert {lack["concurrency"] for lack in seen[1]["missing"]} == {2, 4}
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "bench.svg").stat().st_mode) == 0o600


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_keeps_and_prints_what_there_is(
    number: int, code: int, run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = BEFORE + 4 + 3  # two together: while the second arm answers
    monkeypatch.setattr(FakeEngine, "act_at", {at: lambda engine: engine.get_signal(number)})
    done = run("--out", tmp_path)
    assert done.code == code
    (lack,) = [line for line in done.err.splitlines() if "not measured" in line]
    assert lack == "sparkchat: ended early; not measured: static at 2 together, everything at 4 together"
    assert [line.split()[:2] for line in done.out.splitlines()[2:]] == [["1", "off"], ["1", "static"], ["2", "off"]]
    report = json.loads((tmp_path / "bench.json").read_text())
    assert rows_of(report) == WHOLE[:3]
    assert not report["complete"]
    assert "not complete" in (tmp_path / "bench.svg").read_text()


def test_without_a_folder_it_is_printed_all_the_same(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "act_at", {BEFORE + 3: lambda engine: engine.get_signal(signal.SIGTERM)})
    done = run("--json")
    assert done.code == 143
    # Of two rounds one was answered by both.
    assert rows_of(done.json) == [(1, "off", 1), (1, "static", 1)]
    assert not done.json["complete"]
    assert "1 of 2 rounds at 1 together, everything at 2 and 4 together" in done.err


def test_an_output_that_nobody_reads_does_not_hold_it(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "act_at", {BEFORE + 4 + 1: lambda engine: engine.get_signal(signal.SIGTERM)})
    monkeypatch.setattr(command_module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(command_module, "data", lambda _text: time.sleep(30))
    done = run("--out", tmp_path)
    assert (done.code, done.out) == (143, "")
    assert rows_of(json.loads((tmp_path / "bench.json").read_text())) == WHOLE[:2]


def test_before_anything_is_measured_there_is_nothing_to_keep(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench.json").write_text("of another run")
    monkeypatch.setattr(FakeEngine, "act_at", {BEFORE: lambda engine: engine.get_signal(signal.SIGTERM)})
    done = run("--out", tmp_path)
    assert (done.code, done.out) == (143, "")
    assert "everything at 1, 2 and 4 together, so there is nothing to tell" in done.err
    assert (tmp_path / "bench.json").read_text() == "of another run"


def test_an_engine_that_dies_loses_nothing_that_was_measured(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "act_at", {BEFORE + 8 + 1: FakeEngine.crash})
    done = run("--out", tmp_path)
    assert done.code == 70
    assert done.err.splitlines()[-1] == "sparkchat: the engine was ended by SIGKILL"
    assert "not measured: everything at 4 together\n" in done.err
    assert rows_of(json.loads((tmp_path / "bench.json").read_text())) == WHOLE[:4]
    assert len(done.out.splitlines()) == 2 + 4


def test_no_part_of_a_report_tells_a_speed_up_of_other_answers(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "differs", True)
    kept: list[Any] = []
    monkeypatch.setattr(
        FakeEngine,
        "act_at",
        {
            BEFORE + 4 + 1: lambda _: kept.append(json.loads((tmp_path / "bench.json").read_text())),
            BEFORE + 8 + 1: lambda engine: engine.get_signal(signal.SIGTERM),
        },
    )
    done = run("--out", tmp_path)
    assert done.code == 143
    assert "no speed-up is told of static" in done.err
    for report in (*kept, json.loads((tmp_path / "bench.json").read_text())):
        assert report["equality"]["static"]["difference"]
        assert {row["arm"]: row["speed_up"] for row in report["results"]} == {"off": 1.0, "static": None}
    assert [line.split()[3] for line in done.out.splitlines() if line.split()[1] == "static"] == ["refused"] * 2
    monkeypatch.setattr(FakeEngine, "act_at", {})
    whole = run("--out", tmp_path)
    assert whole.code == 1
    assert "no speed-up is told of static" in whole.err.splitlines()[-1]


def test_a_full_disk_stops_no_measuring(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fails = command_module.write_private, [True, True, True]

    def full(path: Path, text: str) -> None:
        if path.name == "bench.json" and fails.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(command_module, "write_private", full)
    done = run("--out", tmp_path)
    assert done.code == 5
    assert len(done.out.splitlines()) == 2 + 6
    assert done.err.count("measuring goes on") == 1
    assert "no space is left" in done.err.splitlines()[-1]
    # There is room again before the end.
    fails[:] = [True, False, False]
    assert run("--out", tmp_path).code == 0
    assert json.loads((tmp_path / "bench.json").read_text())["complete"]


def test_a_folder_that_cannot_be_written_is_refused_at_once(run: Callable[..., Done], tmp_path: Path) -> None:
    if os.access("/proc/self", os.W_OK):
        pytest.skip("everything can be written here")
    done = run("--out", "/proc/self")
    assert (done.code, FakeEngine.num_started) == (2, 0)
    assert "cannot be written" in done.error


def test_a_terminated_process_leaves_its_rows(mix_folders: dict[str, Path], tmp_path: Path) -> None:
    options = ("--drafter", mix_folders["half"], "--context", "640", "--arms", "static", "--prompts", "1")
    counts = ",".join(map(str, range(1, 7)))
    process = subprocess.Popen(
        command("bench", mix_folders["target"], *options, "--tokens", "16", "--concurrency", counts, "--out", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(OMP_NUM_THREADS="1"),
    )
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("sparkchat: 2 together, static"):
            process.terminate()
            break
    out, rest = process.communicate(timeout=60)
    assert process.returncode == 143, (told, rest)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {(1, "off"), (1, "static"), (2, "off"), (2, "static")} <= {row[:2] for row in rows_of(report)}
    assert not report["complete"]
    assert rest.splitlines()[-1] == "sparkchat: ended by SIGTERM"
    assert "not measured" in rest
    lines = out.splitlines()
    assert lines[1].startswith("TOGETHER")
    assert len(lines) == 2 + len(report["results"])
    assert not [f.name for f in tmp_path.iterdir() if f.name.startswith(".bench")]
