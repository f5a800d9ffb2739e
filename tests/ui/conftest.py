"""Fixtures of the front-end tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ui.chat import open_chat


@pytest.fixture
def chat() -> Callable[..., Any]:
    return open_chat
