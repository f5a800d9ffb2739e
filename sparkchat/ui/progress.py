"""What a front end without a screen says while it waits, always on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from sparkchat.config import RunConfig
from sparkchat.ui.safe_text import one_line


def use_color(config: RunConfig, stream: TextIO) -> bool:
    """Whether ``stream`` may get colours and other attributes."""
    if config.color == "auto":
        return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return config.color == "always"


def loading_text(event: dict[str, Any]) -> str:
    """One line about a ``loading`` event."""
    message = one_line(str(event.get("message") or event.get("stage") or "loading"))
    done, total = event.get("done"), event.get("total")
    return (
        f"{message} {100 * done // total}%" if isinstance(done, int) and isinstance(total, int) and total else message
    )


class LoadingLine:
    """One line that is written over, on a terminal; elsewhere lines, and only with ``--verbose``."""

    def __init__(self, config: RunConfig) -> None:
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._is_verbose = config.verbose
        self._is_open = False

    def show(self, event: dict[str, Any]) -> None:
        text = loading_text(event)
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{text[:78]}")
            self._is_open = True
        elif self._is_verbose:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_open = False

    def note(self, sentence: str) -> None:
        """A sentence that the user must not miss."""
        self.clear()
        sys.stderr.write(f"sparkchat: {one_line(sentence)}\n")
        sys.stderr.flush()
