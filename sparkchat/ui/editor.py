"""Writing the prompt in the user's own editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from sparkchat.errors import SparkchatError, UsageError


def editor_command() -> list[str]:
    """Raises UsageError when none is set, or when what is set is no command line."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        raise UsageError("set VISUAL or EDITOR to use ctrl+g")
    try:
        return shlex.split(editor)
    except ValueError as error:
        raise UsageError(f"VISUAL or EDITOR {editor!r} is no command line: {error}") from None


def edited(command: list[str], text: str) -> str | None:
    """``text`` after the editor; None when it was left with an error. The terminal must be free.

    The file lies in a folder that no one else can enter. Raises SparkchatError when the editor cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.md"
        path.write_text(text, "utf-8", errors="replace")
        try:
            done = subprocess.run([*command, str(path)], check=False)
        except OSError as error:
            raise SparkchatError(f"the editor {command[0]} cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            return None
        return path.read_text("utf-8", "replace").rstrip("\n")
