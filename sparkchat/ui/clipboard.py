"""Copying through the terminal itself (OSC 52): works over ssh and needs no display, but nobody answers.

Inside tmux its own buffer is filled as well: that is the one place of which it is known that the text is there.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Mapping

from sparkchat.ui.markdown import Fence, closes_fence, opened_fence

MAX_BYTES = 100_000
"""Beyond this, terminals begin to drop the sequence in silence."""
_SCREEN_CHUNK = 240
"""GNU screen passes on control strings of at most 256 bytes or so."""
_TMUX_SECONDS = 1.0


def osc52(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The sequence that asks the terminal to put ``text`` on the clipboard, wrapped when tmux or screen is between."""
    data = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    sequence = f"\x1b]52;c;{data}\x07"
    if environment.get("TMUX"):
        return f"\x1bPtmux;{sequence.replace(chr(27), chr(27) * 2)}\x1b\\"
    if environment.get("STY"):
        chunks = [sequence[at : at + _SCREEN_CHUNK] for at in range(0, len(sequence), _SCREEN_CHUNK)]
        return "".join(f"\x1bP{chunk}\x1b\\" for chunk in chunks)
    return sequence


def is_too_long(text: str) -> bool:
    return len(text.encode("utf-8", "replace")) > MAX_BYTES


def fill_tmux_buffer(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Put ``text`` into tmux's newest buffer, and have tmux hand it to its terminal; True when tmux says it did.

    This works with tmux's own defaults, under which it passes on no sequence of a program's.
    """
    if not environment.get("TMUX"):
        return False
    try:
        done = subprocess.run(
            ["tmux", "load-buffer", "-w", "-"],
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TMUX_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def copied_message(text: str, environment: Mapping[str, str] = os.environ, *, in_tmux: bool = False) -> str:
    """What can honestly be said after sending the sequence."""
    if in_tmux:
        return f"{len(text)} characters are in tmux's buffer (prefix ]); the clipboard was asked too"
    sent = f"{len(text)} characters sent"
    if environment.get("TMUX"):
        return f"{sent} (OSC 52); if pasting fails: tmux's allow-passthrough on"
    way = "through screen" if environment.get("STY") else "to the clipboard"
    return f"{sent} {way} (OSC 52); if it fails: /export FILE"


def code_blocks(text: str) -> list[str]:
    """The contents of the code blocks of a Markdown text, as the screen numbers them; one that was cut off counts."""
    blocks: list[str] = []
    fence: Fence | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if fence is None:
            fence, lines = opened_fence(line), []
        elif closes_fence(line, fence):
            blocks.append("\n".join(lines))
            fence = None
        else:
            lines.append(line)
    if fence is not None and lines:
        blocks.append("\n".join(lines))
    return blocks
