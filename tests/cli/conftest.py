"""Runs the command line as a user does, and builds the small files it works on."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.mock_hub import Hub, Repo, start_hub


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error; fails when there is more than that or a traceback."""
        lines = self.err.splitlines()
        assert "Traceback" not in self.err, self.err
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("sparkchat: ")


Cli = Callable[..., Done]
ROOT = Path(__file__).parents[2]


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "sparkchat", *map(str, args)]


def child_environment(**extra: str | None) -> dict[str, str]:
    merged = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    return {key: value for key, value in (merged | extra).items() if value is not None}


@pytest.fixture
def cli() -> Cli:
    """Run one command in its own process: ``cli("list", "--json")``."""

    def run(*args: str | Path, stdin: str | bytes = b"", env: dict[str, str | None] | None = None) -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            command(*args),
            input=data,
            capture_output=True,
            env=child_environment(**(env or {})),
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Run one command in this process, with nothing on stdin; faster, for commands that leave it as it was."""
    from sparkchat.cli.main import main as entry

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    before = signal.getsignal(signal.SIGTERM)

    def run(*args: str | Path) -> Done:
        code = entry([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    yield run
    signal.signal(signal.SIGTERM, before)


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Fail when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for never came"
        time.sleep(0.02)


@pytest.fixture
def profiles(own_folders: Path) -> Path:
    folder = own_folders / "config" / "sparkchat" / "profiles"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def write_profile(profiles: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        file = profiles / f"{name}.toml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return file

    return write


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a model; nothing here is ever loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text('{"block_size": 5}')
    return folder


def safetensors_bytes(num_bytes: int) -> bytes:
    """A valid file with one tensor of that many bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    body = bytes(i * 7 % 251 for i in range(min(num_bytes, 4096)))
    return struct.pack("<Q", len(header)) + header + (body * (num_bytes // len(body) + 1))[:num_bytes]


def model_files(num_bytes: int = 300_000) -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes(num_bytes),
        "README.md": b"# not needed",
        "onnx/model.onnx": b"not needed",
    }


def _use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For child processes by the environment; for this one in the client, which has read it long ago."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def no_hub(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_hub(os.environ["HF_ENDPOINT"], monkeypatch)


@pytest.fixture
def hub(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that holds ``org/model``."""
    hub, server = start_hub({"org/model": Repo(model_files())})
    _use_hub(hub.url, monkeypatch)
    yield hub
    server.shutdown()
    server.server_close()
