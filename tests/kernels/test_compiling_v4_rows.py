"""V4's streams, latents, entries and choices compile for the GPU they are written for, also where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AHEAD = Path(__file__).parent / "ahead_v4_rows.py"


@pytest.mark.slow
def test_they_compile_and_keep_their_numbers_in_registers(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = AHEAD.parents[2], AHEAD.parents[1]
    env |= {"PYTHONPATH": os.pathsep.join(map(str, roots)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(AHEAD)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {
        "_attend_latents", "_attend_rows", "_balance_rows", "_choose_entries", "_compress_rows", "_connect_streams",
        "_join_latents", "_merge_rows", "_score_entries", "_write_latents",
    }  # fmt: skip
    for line in lines:
        # A program that is given half of a multiprocessor's registers puts a few numbers aside, once.
        assert int(line.split(" stack ")[1].split()[0]) <= 32, line
        assert int(line.split(" shared ")[1].split()[0]) <= 232_448, line
