"""Engines that the tests of one file share: one for each pair of folders and settings, loaded when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.harness import Runner, open_runner

OpenRunner = Callable[..., Runner]


@pytest.fixture(scope="module")
def runner() -> Iterator[OpenRunner]:
    """Return ``runner(target, drafter, **options)``, cached by its arguments."""
    opened: dict[Any, Runner] = {}

    def get(target: Path, drafter: Path | None = None, **options: Any) -> Runner:
        key = (target, drafter, *sorted(options.items()))
        if key not in opened:
            opened[key] = open_runner(target, drafter, **options)
        return opened[key]

    yield get
    opened.clear()
