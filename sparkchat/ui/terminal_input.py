"""What the terminal sends, as keys and pastes. No byte of it ends the reading: without keys nobody leaves the chat.

The library's thread ends at a byte that is no UTF-8 (a Latin-1 terminal, alt with its eighth bit set) and at a key
number that is no character.
"""

from __future__ import annotations

import os
import select
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from itertools import groupby

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, Paste
from textual.message import Message

from sparkchat.ui.commands import is_known_command
from sparkchat.ui.prompt_text import typed_character

LOOK_SECONDS = 0.1
"""How often the end of the program is looked for."""
REST_SECONDS = 0.01
"""How long the rest of a pasted text may take: the time between two keys that a hand presses is several times this."""
_BULK = 256
"""Bytes of one read that no hand types."""
_LONG = 64
"""Characters that no hand types at once; as keys, each is drawn by itself."""
_MOST = 1 << 20
_WHITE = {"enter": "\n", "ctrl+j": "\n", "tab": "\t"}


class TerminalDriver(LinuxDriver):
    """The library's driver with a reader of its own."""

    def run_input_thread(self) -> None:
        decoder = getincrementaldecoder("utf-8")("replace")
        parser = XTermParser(self._debug)
        while not self.exit_event.is_set():
            text = decoder.decode(self._read())
            messages: list[Message] = []
            try:
                messages.extend(parser.feed(text) if text else ())
                messages.extend(parser.tick())
            except (ValueError, OverflowError):
                # What stands behind it in this read is lost.
                parser = XTermParser(self._debug)
            for message in with_pastes(messages):
                self.process_message(message)

    def _read(self) -> bytes:
        """What is there, and when that looks like the beginning of a paste, the rest of it."""
        data = last = self._read_some(LOOK_SECONDS)
        while last and len(data) < _MOST and (last[-1:] in b"\r\n" or len(last) >= _BULK):
            last = self._read_some(REST_SECONDS)
            data += last
        return data

    def _read_some(self, seconds: float) -> bytes:
        readable, _, _ = select.select([self.fileno], [], [], seconds)
        data = os.read(self.fileno, 4096) if readable else b""
        if readable and not data:
            self.exit_event.wait(seconds)  # the terminal has gone; a signal says so
        return data


def with_pastes(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages of one read, with text that came in one piece as a :class:`Paste`.

    A terminal that does not mark what is pasted sends it as keys, and each line end would send a line to the model.
    Commands that were typed while nobody read are no paste.
    """
    for is_text, run in groupby(messages, lambda message: _character(message) is not None):
        keys = list(run)
        num_pasted = _num_pasted("".join(_character(key) or "" for key in keys)) if is_text else 0
        if num_pasted:
            yield Paste("".join(_character(key) or "" for key in keys[:num_pasted]))
        yield from keys[num_pasted:]


def _num_pasted(text: str) -> int:
    """How many characters of a text are a paste: several lines, or more of one line than a hand types at once."""
    lines = text.split("\n")
    if any(map(is_known_command, lines)):
        return 0
    if any(line.strip() for line in lines[1:]):
        return len(text)
    return len(lines[0]) if len(lines[0]) >= _LONG else 0


def _character(message: Message) -> str | None:
    """What a key writes; None for anything else."""
    if not isinstance(message, Key):
        return None
    return _WHITE.get(message.key) or typed_character(message)
