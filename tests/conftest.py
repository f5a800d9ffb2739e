"""Keeps every test away from the user's folders and the network, and builds the shared checkpoints once."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkchat.kernels.cpu import compiled_folder

sys.path.insert(0, str(Path(__file__).parent))

# Set before torch is imported anywhere, and inherited by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every process that a test starts would compile our sources again, half a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A runner that was started in the background ignores these, and what it starts would as well.
if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
# Triton reads this when a kernel is defined, and whichever test comes first may be the one that imports them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Compiling for the processor takes some seconds, and every test has folders of its own.
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(compiled_folder(Path(__file__).parents[1] / ".pytest_cache" / "cpu_kernels"))
)

from fixtures.surroundings import DEAD_SERVERS, USER_FOLDERS

sys.dont_write_bytecode = False

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the user's folders into ``tmp_path`` and clear whatever the developer's shell sets."""
    for name in list(os.environ):
        if name.startswith(("SPARKCHAT_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    for name, folder in USER_FOLDERS.items():
        path = tmp_path / "user" / folder
        path.mkdir(parents=True, mode=0o700)
        monkeypatch.setenv(name, str(path))
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, url in DEAD_SERVERS.items():
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return tmp_path / "user"


@pytest.fixture(autouse=True)
def no_outside_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to anything but loopback and local sockets."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise RuntimeError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keep torch on one thread where it is loaded; tests that never import it do not pay for it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds every checkpoint built in this run."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def build_once(checkpoints: Path) -> Iterator[Callable[[str, Callable[[Path], Any]], Any]]:
    """Return ``build(name, builder)``: what ``builder(checkpoints / name)`` gave the first time it was asked for."""
    built: dict[str, Any] = {}

    def build(name: str, builder: Callable[[Path], Any]) -> Any:
        if name not in built:
            built[name] = builder(checkpoints / name)
        return built[name]

    yield build
    built.clear()


@pytest.fixture(scope="session")
def tiny_pair(build_once: Callable[..., Any]) -> Any:
    """F-tiny: ``.target`` and ``.drafter`` folders of a random pair."""
    from fixtures.tiny import write_tiny

    return build_once("tiny", write_tiny)


@pytest.fixture(scope="session")
def mix_folders(build_once: Callable[..., Any]) -> dict[str, Path]:
    """F-mix: ``target`` and ``window`` (sliding window 16 in every other layer), ``oracle``, ``half``, ``anti``."""
    from fixtures.mix import write_mix_family

    return build_once("mix", write_mix_family)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: the full size of a test whose small size always runs; run with -m slow")


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay to the end: collecting garbage need not look at them, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked slow unless the marker expression names it."""
    if "slow" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="slow; run with -m slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
