"""The kernels of V4's projections, router and experts compile for the GPU they are written for, also where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_add_parts", "_down", "_expand_weight", "_fp8_linear", "_gate_up", "_joint_product", "_list_choices",
    "_mix_experts", "_publish", "_publish_sum", "_route",
}  # fmt: skip
AHEAD = Path(__file__).parent / "ahead_v4_products.py"


@pytest.mark.slow
def test_they_compile_and_keep_their_numbers_in_registers(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = AHEAD.parents[2], AHEAD.parents[1]
    env |= {"PYTHONPATH": os.pathsep.join(map(str, roots)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(AHEAD)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == KERNELS
    for line in lines:
        # Experts in one launch: where twelve programs fit, numbers that no loop needs are put aside.
        most = 64 if line.startswith("_mix_experts") else 8 if line.startswith(("_route", "_down")) else 0
        assert int(line.split(" stack ")[1].split()[0]) <= most, line
