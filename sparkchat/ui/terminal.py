"""Leaving the terminal as it was found, however the program ends.

The full-screen app restores the screen itself when it gets to. This guard covers the other ways out: signals, an
exception, a thread that hangs, and through its keeper even a sudden death. It also turns signals into exit codes.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from sparkchat.ui.terminal_keeper import TerminalKeeper

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
_SCREEN_EXIT_CODES = {**EXIT_CODES, signal.SIGABRT: 134}

_MODES_OFF = (
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1016l\x1b[?1006l"  # every form of mouse reporting
    "\x1b[?1004l"  # focus reports
    "\x1b[?2048l"  # resize reports
    "\x1b[?2026l"  # synchronised output
    "\x1b[?2004l"  # bracketed paste
    "\x1b[?7h"  # wrap at the edge
)
_SHOW = "\x1b[0m\x1b[?25h"
# Only when the app could not do it itself: they undo one level, and once is what was done.
_LEAVE_SCREEN = "\x1b[<u\x1b[?1049l"

GRACE_SECONDS = 1.5
"""How long an orderly end may take after a signal."""


class TerminalGuard:
    """Context: remembers the terminal's settings, and puts them back.

    ``on_signal`` is called once, in the main thread, with the exit code; it should begin an orderly end. When that
    takes longer than ``GRACE_SECONDS``, or a second signal comes, the guard restores the terminal and exits itself.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._settings: list[Any] | None = None
        self._before: dict[int, Any] = {}
        self._watchdog: threading.Timer | None = None
        self._keeper: TerminalKeeper | None = None
        self.exit_code: int | None = None
        self.is_clean = False
        """Set by the caller when the app has left the screen itself."""

    def __enter__(self) -> TerminalGuard:
        try:
            self._settings = termios.tcgetattr(sys.__stdin__.fileno())
        except (termios.error, ValueError, AttributeError):
            self._settings = None
        for number in _SCREEN_EXIT_CODES:
            self._before[number] = signal.signal(number, self._handle)
        with suppress(ValueError, AttributeError):
            self._keeper = TerminalKeeper(sys.__stderr__.fileno(), _LEAVE_SCREEN + _MODES_OFF + _SHOW)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.restore()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def restore(self) -> None:
        """Write the reset sequences and put the line settings back; safe to call twice and with the terminal gone."""
        sequences = ("" if self.is_clean else _LEAVE_SCREEN) + _MODES_OFF + _SHOW
        self.is_clean = True
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.__stderr__.fileno(), sequences.encode("ascii"))
        if self._settings is not None:
            with suppress(termios.error, ValueError, AttributeError):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._settings)
        if self._keeper is not None:
            self._keeper.dismiss()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.exit_code = _SCREEN_EXIT_CODES[signal.Signals(number)]
        if self._watchdog is not None:
            self._leave_now()
        self._watchdog = threading.Timer(GRACE_SECONDS, self._leave_now)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._on_signal(self.exit_code)

    def _leave_now(self) -> None:
        self.restore()
        os._exit(self.exit_code or 1)
