"""Sums of ranks through memory that all GPUs read: right, message after message, in and out of graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("symmetric_ranks.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("way", ["torch", "push"])
def test_sums_of_two_gpus(way: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SPARKCHAT_SHARED_SUMS": way},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("all alike" in text for text in said), "\n".join(text[-2000:] for text in said)
