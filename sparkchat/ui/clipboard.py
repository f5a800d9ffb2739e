"""Copying through the terminal itself (OSC 52): works over ssh and needs no display, but nobody answers."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping

MAX_BYTES = 100_000
"""Beyond this, terminals begin to drop the sequence in silence."""


def osc52(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The sequence that asks the terminal to put ``text`` on the clipboard, wrapped when tmux stands between."""
    data = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    sequence = f"\x1b]52;c;{data}\x07"
    if environment.get("TMUX"):
        return f"\x1bPtmux;{sequence.replace(chr(27), chr(27) * 2)}\x1b\\"
    return sequence


def is_too_long(text: str) -> bool:
    return len(text.encode("utf-8", "replace")) > MAX_BYTES


def copied_message(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """What can honestly be said after sending the sequence."""
    sent = f"{len(text)} characters sent to the terminal's clipboard (OSC 52)"
    if environment.get("TMUX"):
        return f"{sent} through tmux; if pasting gives something else, tmux needs 'set -g allow-passthrough on'"
    return f"{sent}; if pasting gives something else, the terminal does not allow it: use /export FILE"


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks of a Markdown text; a block that was cut off counts."""
    blocks: list[str] = []
    fence, lines = "", []
    for line in text.split("\n"):
        mark = line.strip()
        if fence:
            if len(mark) >= len(fence) and not mark.strip(fence[0]):
                blocks.append("\n".join(lines))
                fence = ""
            else:
                lines.append(line)
        elif mark.startswith(("```", "~~~")):
            fence = mark[: len(mark) - len(mark.lstrip(mark[0]))]
            lines = []
    if fence and lines:
        blocks.append("\n".join(lines))
    return blocks
