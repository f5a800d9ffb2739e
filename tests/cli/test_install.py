"""The install script and the Makefile, with stand-ins for Python: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install", folder / "scripts" / "install")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def python(folder: Path, name: str, *, version_ok: bool = True, venv_ok: bool = True) -> str:
    """A program that answers the script's questions, makes a .venv of its own kind, and notes what pip is asked."""
    program = folder / name
    program.write_text(
        f"""#!/bin/sh
case "$*" in
    *ensurepip*) exit {0 if venv_ok else 1};;
    *"[:2] != (3, 11)"*) exit {0 if name.endswith("3.11") else 1};;
    *version_info*) exit {0 if version_ok else 1};;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
    "-m pip install"*) echo "$@" >> pip-was-asked;;
esac
""".replace("$0", str(program))
    )
    program.chmod(0o755)
    return str(program)


def install(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    merged = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "TORCH")} | env
    return subprocess.run(
        ["bash", "scripts/install"], cwd=checkout, env=merged, capture_output=True, text=True, check=False, timeout=60
    )


def test_no_python_is_said_with_what_to_install(checkout: Path, tmp_path: Path) -> None:
    done = install(checkout, PYTHON=python(tmp_path, "old", version_ok=False))
    assert done.returncode != 0
    assert "no Python 3.11 or newer" in done.stderr and "apt-get install" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_without_venv_is_said_with_what_to_install(checkout: Path, tmp_path: Path) -> None:
    done = install(checkout, PYTHON=python(tmp_path, "bare", venv_ok=False))
    assert done.returncode != 0
    assert "apt-get install python3-venv" in done.stderr


@pytest.mark.parametrize(
    ("name", "torch", "wanted"),
    [
        ("python3.11", None, "torch==2.13.0"),
        ("python3.12", None, "torch>=2.11,<2.14"),
        ("python3.12", "torch==2.12.0", "torch==2.12.0"),
    ],
)
def test_torch_fits_the_machine(checkout: Path, tmp_path: Path, name: str, torch: str | None, wanted: str) -> None:
    if shutil.which("nvidia-smi") or os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        pytest.skip("the choice is checked where there is no GPU, on Linux x86-64")
    done = install(checkout, PYTHON=python(tmp_path, name), **({"TORCH": torch} if torch else {}))
    assert done.returncode == 0, done.stderr
    asked = (checkout / "pip-was-asked").read_text()
    assert f" {wanted} -e .[test]" in asked
    assert (checkout / ".venv" / ".sparkchat-installed").is_file()


def test_an_unusable_environment_is_made_again(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    assert install(checkout, PYTHON=python(tmp_path, "python3.11")).returncode == 0
    assert (checkout / ".venv" / "bin" / "python").is_file()


def test_make_installs_again_only_when_the_project_file_changes(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".sparkchat-installed"
    stamp.parent.mkdir()

    def planned() -> str:
        return subprocess.run(["make", "-n", "test"], cwd=checkout, capture_output=True, text=True, check=True).stdout

    assert "scripts/install" in planned()
    stamp.touch()
    assert "scripts/install" not in planned()
    os.utime(checkout / "pyproject.toml", (4_000_000_000, 4_000_000_000))
    assert "scripts/install" in planned()
