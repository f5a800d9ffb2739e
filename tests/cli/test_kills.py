"""Killed at any moment, a fetch or a removal leaves nothing that loads wrongly, and nothing whole is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import child_environment, safetensors_bytes
from cli.mock_hub import COMMIT, Hub, Repo, sha256
from sparkchat.catalog import parse_hub_name
from sparkchat.errors import DamagedFile
from sparkchat.paths import user_paths
from sparkchat.snapshot import PART, cached, repo_folder, size_of

BRANCH, PINNED = "hf:org/model", f"hf:org/model@{COMMIT}"
SOURCE = parse_hub_name(PINNED)
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def sharded_model() -> dict[str, bytes]:
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b'{"eos_token_id": 2}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: safetensors_bytes(200_000 + number) for number, name in enumerate(SHARDS)},
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"a": 1}',
    }


class Process:
    """One that fetches and removes in children; see fetching_process.py."""

    def __init__(self) -> None:
        file = Path(__file__).with_name("fetching_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def begin(self, do: str, kill_at: int | None = None, name: str = PINNED) -> int:
        """The id of the process that works now."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "name": name, "kill_at": kill_at}) + "\n")
        self._process.stdin.flush()
        return self._number()

    def end(self) -> int:
        """The exit code of the last one begun, -9 when it was killed."""
        return os.waitstatus_to_exitcode(self._number())

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def start(hub: Hub) -> Iterator[Callable[[], Process]]:
    hub.repos["org/model"] = Repo(sharded_model())
    begun: list[Process] = []

    def new() -> Process:
        begun.append(Process())
        return begun[-1]

    yield new
    for process in begun:
        process.close()


def whole_blobs() -> dict[str, int]:
    """Blobs that count as whole, all of which are; name -> bytes."""
    blobs = repo_folder(SOURCE, user_paths()) / "blobs"
    found = {blob.name: blob.read_bytes() for blob in blobs.glob("*") if not blob.name.endswith(PART)}
    assert all(sha256(data) == name for name, data in found.items()), "a blob under its final name is wrong"
    return {name: len(data) for name, data in found.items()}


def held_bytes() -> int:
    blobs = repo_folder(SOURCE, user_paths()) / "blobs"
    return sum(size_of(blob) for blob in blobs.glob("*"))


def check(files: dict[str, bytes]) -> bool:
    """What is offered as complete is complete, to the byte. Returns whether anything is offered."""
    whole_blobs()
    try:
        folder = cached(SOURCE, user_paths())
    except DamagedFile:
        pytest.fail("a fetched model counts as damaged")
    if folder is None:
        return False
    visible = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if not f.is_dir()}
    assert {name: data for name, data in visible.items() if not name.endswith(".sparkchat")} == files
    return True


STEPS = [pytest.param(8, id="every eighth"), pytest.param(1, id="each", marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("name", "begun_by_others"),
    [(PINNED, False), (PINNED, True), (BRANCH, False)],
    ids=["nothing there", "config there", "a branch"],
)
@pytest.mark.parametrize("step", STEPS)
def test_a_fetch_killed_before_each_of_its_changes(
    start: Callable[[], Process], hub: Hub, name: str, begun_by_others: bool, step: int
) -> None:
    files, process = hub.repos["org/model"].files, start()
    for number in range(1 + begun_by_others + 2 * (name == BRANCH), 200, step):
        remove_all(process)
        if begun_by_others:
            snapshot = repo_folder(SOURCE, user_paths()) / "snapshots" / hub.repos["org/model"].commit
            snapshot.mkdir(parents=True)
            (snapshot / "config.json").write_bytes(files["config.json"])
        process.begin("pull", number, name)
        code = process.end()
        is_offered = check(files)
        if code == 0:
            assert is_offered and number > 20
            return
        assert code == -9
        before, whole = held_bytes(), whole_blobs()
        process.begin("pull", None, name)
        assert process.end() == 0
        assert check(files) and whole.items() <= whole_blobs().items() and held_bytes() >= before
    pytest.fail("never came to an end")


@pytest.mark.parametrize("step", STEPS)
def test_a_removal_killed_before_each_of_its_changes(start: Callable[[], Process], hub: Hub, step: int) -> None:
    files, process = hub.repos["org/model"].files, start()
    for number in range(1, 200, step):
        process.begin("pull")
        assert process.end() == 0
        process.begin("rm", kill_at=number)
        code = process.end()
        check(files)
        if code == 0:
            assert not repo_folder(SOURCE, user_paths()).exists() and number > 5
            return
        assert code == -9
    pytest.fail("never came to an end")


def remove_all(process: Process) -> None:
    process.begin("rm")
    assert process.end() == 0
    assert not repo_folder(SOURCE, user_paths()).exists()


@pytest.mark.parametrize("rounds", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments(start: Callable[[], Process], hub: Hub, rounds: int) -> None:
    """Two processes pull at once, or one removes; one is killed at a random moment, and now and then the other too."""
    repo, luck = hub.repos["org/model"], random.Random(8)
    first, second = start(), start()
    num_offered = num_killed = 0
    for _ in range(rounds):
        repo.slow = luck.choice([0.0, 0.005, 0.02])
        repo.ignores_range = luck.random() < 0.2
        before, do = whole_blobs(), luck.choice(["pull", "pull", "pull", "rm"])
        victim = first.begin(do, None, luck.choice([PINNED, BRANCH]))
        other: Any = second.begin("pull") if luck.random() < 0.5 else None
        time.sleep(luck.uniform(0.0, 0.25))
        for pid in (victim, other) if luck.random() < 0.3 else (victim,):
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        codes = [first.end(), *([second.end()] if other is not None else [])]
        num_killed += codes.count(-9)
        assert set(codes) <= {0, -9} or do == "rm", codes
        num_offered += check(repo.files)
        if do == "pull":
            assert before.items() <= whole_blobs().items(), "a killed fetch lost what was whole"
    assert num_killed >= rounds // 4
    repo.slow, repo.ignores_range = 0.0, False
    first.begin("pull")
    assert first.end() == 0
    assert check(repo.files) and not list(repo_folder(SOURCE, user_paths()).rglob(f"*{PART}"))
