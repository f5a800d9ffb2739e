"""What captured steps of the fixtures' pairs launch compiles for a GPU, at the sizes that GPU tests use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ahead_fixtures.py"


@pytest.mark.slow
def test_steps_of_every_fixture_compile(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (SCRIPT.parents[2], SCRIPT.parents[1])
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    folder = tmp_path / "pairs"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["tiny", "plain", "mix", "window", "bigram", "shapes"]
