"""Where the processor's kernels cannot be used, torch's operations are, and the reason is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparkchat.kernels import cpu
from sparkchat.models.linear import make_lanes
from sparkchat.models.native import LaneLinear


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    cpu.why_not.cache_clear()
    yield
    cpu.why_not.cache_clear()


def makes_lanes() -> bool:
    linear = make_lanes(torch.zeros(32, 64), None, device=torch.device("cpu"), dtype=torch.bfloat16)
    x = torch.ones(2, 64).to(linear.dtype)
    assert linear(x).shape == (2, 32)
    return isinstance(linear, LaneLinear)


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.OFF, "0")
    assert cpu.why_not() == "SPARKCHAT_CPU_KERNELS=0 is set"
    assert not makes_lanes()


def test_a_folder_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    if cpu.why_not() is None or "cannot be kept" not in str(cpu.why_not()):
        pytest.skip(f"no kernels for this processor: {cpu.why_not()}")
    assert not makes_lanes()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not cpu.is_supported():
        pytest.skip(f"no kernels for this processor: {cpu.why_not()}")
    cpu.why_not.cache_clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu, "ROOM", 10**18)
    assert "the disk is full" in str(cpu.why_not())
    assert not makes_lanes()


def test_compiled_code_is_kept_apart_by_what_it_was_made_from(tmp_path: Path) -> None:
    folder = cpu.compiled_folder(tmp_path)
    assert folder.parent == tmp_path and len(folder.name) == 16


def test_what_other_versions_left_long_ago_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not cpu.is_supported():
        pytest.skip(f"no kernels for this processor: {cpu.why_not()}")
    cpu.why_not.cache_clear()
    kept = tmp_path / "kept"
    names = {"old": "0" * 16, "recent": "1" * 16, "foreign": "notes"}
    for name in names.values():
        (kept / name).mkdir(parents=True)
        (kept / name / "file").write_text("x")
    for name in (names["old"], names["foreign"]):
        os.utime(kept / name, (0, 0))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kept / ("2" * 16)))
    assert cpu.why_not() is None
    assert {path.name for path in kept.iterdir()} == {names["recent"], names["foreign"], "2" * 16}
