"""Runs the kernels on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from importlib import metadata

import pytest
import torch

from fixtures.triton_interpreter import interpreter_that_copes  # noqa: F401


def has_triton(version: str) -> bool:
    try:
        return metadata.version("triton").startswith(version)
    except metadata.PackageNotFoundError:
        return False


collect_ignore_glob = []
if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    if not has_triton("3.6."):
        # The interpreter of other versions differs in what has to be mended.
        collect_ignore_glob = ["test_*.py"]
elif not has_triton(""):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
