"""Every kernel compiles for the GPU it is written for, also where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.ahead import CARDS

AHEAD = Path(__file__).parent / "ahead.py"


def compiled(cache: Path, *arguments: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(AHEAD.parents[2]), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(AHEAD), *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def shared_bytes(line: str) -> int:
    return int(line.split(" shared ")[1].split()[0])


def test_products_compile_for_cards_before_an_h200(tmp_path: Path) -> None:
    """They lack early starts, a multiplication of pairs, and float8 in the compiler."""
    assert all(shared_bytes(line) <= CARDS["8.0"] for line in compiled(tmp_path, "--card=8.0", "norm", "gemm_of_codes"))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_all_kernels_compile_for_other_cards_and_fit(capability: str, tmp_path: Path) -> None:
    lines = compiled(tmp_path, f"--card={capability}")
    assert {"_attend", "_small_gemm", "_add_bias", "_judge", "_settle"} <= {line.split()[0] for line in lines}
    assert all(shared_bytes(line) <= CARDS[capability] for line in lines)


@pytest.mark.slow
def test_all_kernels_compile(tmp_path: Path) -> None:
    lines = compiled(tmp_path)
    assert {line.split()[0] for line in lines} == {
        "_add_bias", "_add_rms_norm", "_attend", "_count_bins", "_draw_draft", "_draw_next", "_enter_block",
        "_enter_rows", "_find_laws", "_join_spans", "_judge", "_limit", "_list_near", "_place_rows", "_plan", "_settle",
        "_silu_mul", "_small_gemm", "_test_drafts", "_weigh_rest", "_write_qkv", "_write_qkv_groups",
        "block_statistics",
    }  # fmt: skip
    # The search for thresholds keeps a few numbers in memory, of which it needs one between two passes.
    few = {"_find_laws": 80, "_draw_draft": 64}
    for line in lines:
        assert int(line.split(" stack ")[1].split()[0]) <= few.get(line.split()[0], 0), line


@pytest.mark.slow
def test_pages_leave_as_many_loads_under_way(tmp_path: Path) -> None:
    """A page's number and the keys behind it share the pipeline; with too little depth every tile is waited for."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join((str(AHEAD.parents[2]), str(AHEAD.parents[1])))
    env |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(AHEAD.with_name("ahead_attention.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, under_way, divisions, _, calls in lines:
        # Keys and values of one more tile at the least.
        assert int(under_way) >= 2, name
        assert int(divisions) == int(calls) == 0, name
