"""A last resort for the terminal: a tiny shell that puts it right when this program dies without a word.

A signal handler cannot help against SIGKILL, the out-of-memory killer, or an abort inside a library. The shell waits
on a pipe that closes with this program, and writes the same sequences that the program would have.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

_SECONDS = 2.0
# The inner shell is no child of ours, ignores what is meant for us, and ends with the pipe, whatever happens.
_SCRIPT = """trap '' HUP INT TERM QUIT TTOU
exec 3<&0 4>&1
( read -r word <&3 || { printf %b "$0" >&4; [ -z "$1" ] || stty "$1" <&4; } ) >/dev/null 2>&1 &
"""


class TerminalKeeper:
    """Watches over the terminal at ``fd`` until :meth:`dismiss`; does nothing where there is no shell."""

    def __init__(self, fd: int, sequences: str) -> None:
        self._pipe = -1
        try:
            settings = _settings(fd)
            reading, writing = os.pipe()
        except OSError:
            return
        try:
            subprocess.run(
                ["sh", "-c", _SCRIPT, sequences.replace("\x1b", "\\033"), settings],
                stdin=reading,
                stdout=fd,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=_SECONDS,
                check=True,
            )
            self._pipe = writing
        except (OSError, subprocess.SubprocessError):
            os.close(writing)
        finally:
            os.close(reading)

    def dismiss(self) -> None:
        """The terminal is in order; safe to call twice."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            with suppress(OSError):
                os.write(pipe, b"done\n")
            with suppress(OSError):
                os.close(pipe)


def _settings(fd: int) -> str:
    """The line settings in the words of ``stty``; empty when they cannot be had."""
    try:
        done = subprocess.run(["stty", "-g"], stdin=fd, capture_output=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("ascii", "ignore").strip()
