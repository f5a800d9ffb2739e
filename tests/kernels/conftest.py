"""Runs the kernels on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(autouse=True)
def interpreter_that_copes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let loops in the interpreter run to a bound read from memory: it holds numbers in arrays of one element, which
    numpy 2.4 no longer takes for a whole number. And make it faster."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    start, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    prepared: set[str] = set()

    def started(self: Any, *arguments: Any, **options: Any) -> Any:
        prepared.clear()
        return start(self, *arguments, **options)

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        # Once a launch is enough to prepare Triton's language in a module; doing so for every call of a function is
        # most of the interpreter's time.
        if self.fn.__module__ in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(self.fn.__module__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", started)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
    yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
