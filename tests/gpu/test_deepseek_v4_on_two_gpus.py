"""Two GPUs that share DeepSeek V4 by NCCL. From the least that can fail to the most: run with ``-x``.

Needs torch, transformers, safetensors and pytest, and no other package. ``-m slow`` runs the same over gloo on the CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import varied_cost
from fixtures.deepseek_v4 import write_tiny_v4
from fixtures.deepseek_v4_mix import write_v4_mix, write_v4_mix_mtp
from sparkchat.client import EngineClient
from sparkchat.models.symmetric import SWITCH as SHARED_SUMS
from sparkchat.params import GenerateRequest, LoadSpec, SamplingParams

PROGRAM = Path(__file__).with_name("two_devices.py")
SECONDS = {"cuda": 300, "cpu": 600}
"""For a check, which takes a tenth of it. Behind them the program says where it stands, and ends."""
WRITE = {
    "tiny": write_tiny_v4,
    "half": lambda path: write_v4_mix(path, "half", dspark_block_size=8),
    "mtp": write_v4_mix_mtp,
}
on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.multigpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4")


def checkpoint(root: Path, kind: str) -> Path:
    return root / kind if (root / kind).exists() else WRITE[kind](root / kind)


def passes(check: str, device: str, folder: Path, *, has_shared_sums: bool = True) -> None:
    """Run a check of the program; what it and its ranks wrote is shown where it fails.

    ``has_shared_sums``: small messages may go through memory that both GPUs read; else all go through NCCL.
    """
    seconds = SECONDS[device]
    paths = [*map(str, PROGRAM.parents[1:3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(PROGRAM), str(seconds), check, device, str(folder)]
    environment = {**os.environ, "NCCL_DEBUG": "WARN", "PYTHONPATH": os.pathsep.join(paths)}
    environment[SHARED_SUMS] = str(int(has_shared_sums))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            said = process.communicate(timeout=seconds + 60)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
        if process.returncode:
            shown = said.decode("utf-8", "replace")[-8000:]
            pytest.fail(f"{check} on two of {device} ended with {process.returncode}\n{shown}", pytrace=False)


@on_devices
def test_ranks_reach_each_other(device: str, root: Path) -> None:
    passes("group", device, root, has_shared_sums=False)


@on_devices
def test_logits_are_those_of_one(device: str, root: Path) -> None:
    passes("logits", device, checkpoint(root, "half"), has_shared_sums=False)


@on_devices
@pytest.mark.parametrize("kind", ["half", "mtp"])
def test_tokens_are_those_of_one(kind: str, device: str, root: Path) -> None:
    passes("tokens", device, checkpoint(root, kind), has_shared_sums=False)


@on_devices
def test_small_messages_go_through_shared_memory(device: str, root: Path) -> None:
    passes("group", device, root)


@on_devices
@pytest.mark.parametrize("kind", ["half", "mtp"])
def test_captured_steps_give_the_tokens_of_one(kind: str, device: str, root: Path) -> None:
    passes("captured_tokens", device, checkpoint(root, kind))


@on_devices
def test_bfloat16_stays_close_to_one(device: str, root: Path) -> None:
    passes("half_precision", device, checkpoint(root, "half"))


@on_devices
def test_a_rank_that_dies_ends_the_engine_with_one_line(device: str, root: Path) -> None:
    path = str(checkpoint(root, "tiny"))
    spec = LoadSpec("v4", path, path, device=device, context=4000, tp=2, threads=1, cost_table=varied_cost())
    with EngineClient(spec) as client:
        first = wait_for(client, "ready", "crashed", "error")
        assert first["event"] == "ready", first
        sampling = SamplingParams(max_tokens=3900, ignore_eos=True)
        client.generate(GenerateRequest("r", prompt_ids=(5, 6), mode="static", sampling=sampling))
        first = wait_for(client, "delta", "crashed", "end")
        assert first["event"] == "delta", first
        (other,) = ranks_of(client.pid or 0)
        os.kill(other, signal.SIGKILL)
        end = wait_for(client, "crashed", "end")
        assert end["event"] == "crashed", end
        assert end["message"] == "the engine ended with code 70; its last words: rank 1 of 2 was ended by SIGKILL"


def ranks_of(pid: int) -> list[int]:
    """Its children that are ranks: libraries start others."""
    children = [
        word for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [int(word) for word in children if b"rank_process" in Path(f"/proc/{word}/cmdline").read_bytes()]


def wait_for(client: EngineClient, *kinds: str) -> dict[str, Any]:
    seconds = SECONDS[client.spec.device]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in client.poll(1):
            if event["event"] in kinds:
                return event
    raise AssertionError(f"none of {kinds} came within {seconds} s")
