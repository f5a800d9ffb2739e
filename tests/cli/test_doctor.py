"""The report of a machine: what the driver's tool says is read right, and everything that is off has its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli
from sparkchat import environment
from sparkchat.environment import Gpu
from sparkchat.features import features
from sparkchat.paths import user_paths

TOOL = """#!/bin/sh
case "$*" in
*compute_cap*) [ -n "$OLD" ] && { echo 'Field "compute_cap" is not a valid field to query.'; exit 2; }
  echo "0, NVIDIA H200, 143771, 140000, 580.95.05, 9.0"; echo "1, NVIDIA H200, 143771, 143000, 580.95.05, 9.0";;
*query-gpu*) echo "0, NVIDIA H200, 143771, 140000, 580.95.05";;
*p2p*)
  printf ' \\tGPU0\\tGPU1\\t\\n GPU0\\tX\\t%s\\t\\n GPU1\\t%s\\tX\\t\\n\\nLegend:\\n\\n  X    = Self\\n' $PEER $PEER;;
*) echo "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |";;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as the driver's tool tells."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PEER", "OK")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")


def reasons() -> dict[str, str | None]:
    return {feature.name: feature.reason_off for feature in features(user_paths())}


def test_the_drivers_tool_is_read(driver: None, main: Cli) -> None:
    report = main("doctor", "--json", "--offline").json
    assert report["cuda"] == {"torch": "13.0", "driver": "13.0"}
    assert [(g["index"], g["name"], g["compute"], g["driver"]) for g in report["gpus"]] == [
        (0, "NVIDIA H200", "9.0", "580.95.05"),
        (1, "NVIDIA H200", "9.0", "580.95.05"),
    ]
    assert report["gpus"][0]["free_bytes"] == 140000 << 20
    assert {"from": 0, "to": 1, "state": "OK"} in report["peer_access"]
    text = main("doctor", "--offline").out
    for words in ("compute capability 9.0", "peer access 0 - 1: OK", "CUDA of driver: 13.0", "driver 580.95.05"):
        assert words in text


def test_an_older_driver_that_knows_no_compute_capability(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "1")
    assert environment.gpus() == (Gpu(0, "NVIDIA H200", 143771 << 20, 140000 << 20, "580.95.05"),)


def test_gpus_that_do_not_reach_each_other_are_named(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons()["peer access between GPUs"] is None and reasons()["several GPUs"] is None
    monkeypatch.setenv("PEER", "CNS")
    assert "GPU 0 and GPU 1: CNS" in str(reasons()["peer access between GPUs"])


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda m: m.setattr(environment, "torch_cuda", lambda: None), "has no CUDA; install"),
        (lambda m: m.setenv("CUDA_VISIBLE_DEVICES", ""), "CUDA_VISIBLE_DEVICES is ''"),
        (lambda m: m.setattr(environment, "has_gpu_tool", lambda: False) or m.setenv("PATH", ""), "no NVIDIA driver"),
    ],
)
def test_every_way_to_have_no_gpu_has_its_reason(
    driver: None, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    assert reasons()["GPU"] is None
    prepare(monkeypatch)
    found = reasons()
    for name in ("GPU", "fused kernels", "CUDA graphs", "several GPUs", "peer access between GPUs"):
        assert words in str(found[name]), name


def test_what_is_off_on_this_machine_is_said(main: Cli, monkeypatch: pytest.MonkeyPatch, profiles: Path) -> None:
    (profiles / "bad.toml").write_text("[run")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(environment, "has_bf16_product", lambda: False)
    found = reasons()
    assert found["colour"] == "NO_COLOR is set"
    assert "no terminal" in str(found["full screen"])
    assert "held in float32" in str(found["bfloat16 products on the CPU"])
    assert "bad.toml" in str(found["profiles"]) and "not valid TOML" in str(found["profiles"])
    assert found["speculation of smollm2-135m"] is None and found["package index"] is None
    lines = main("doctor", "--offline").out.splitlines()
    start = lines.index("off, and why")
    assert any("bad.toml" in line for line in lines[start : lines.index("on")])
    report = main("doctor", "--offline", "--json").json["features"]
    assert all(feature["on"] is (feature["reason_off"] is None) for feature in report)


def test_the_torch_that_is_installed_says_its_own_cuda() -> None:
    import torch

    assert environment.torch_cuda() == torch.version.cuda
    assert environment.package_versions()["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__


def test_bfloat16_products_are_told_without_torch() -> None:
    from sparkchat.models.linear import has_bf16_product

    assert environment.has_bf16_product() == has_bf16_product()


def test_memory_that_a_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": "4000\n", "memory.current": "3000\n", "memory.stat": "anon 1\ninactive_file 500\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "_GROUP", tmp_path)
    memory = environment.memory()
    assert (memory.total_bytes, memory.available_bytes) == (4000, 1500)
    (tmp_path / "memory.max").write_text("max\n")
    assert (environment.memory().total_bytes or 0) > 4000
