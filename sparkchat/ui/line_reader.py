"""Reading what the user types, line by line, with the terminal's own editing."""

from __future__ import annotations

import codecs
import os
import sys

from sparkchat.errors import UsageError
from sparkchat.paths import user_paths
from sparkchat.ui.commands import completions
from sparkchat.ui.history import History


class LineReader:
    """Reads one input at a time, of one or more lines, with the terminal's line editing where there is one."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.history = History(user_paths().history if self.is_interactive else None)
        self._readline = None
        self._num_lines = 0
        if self.is_interactive:
            import readline

            self._readline = readline
            for entry in self.history.entries:
                readline.add_history(entry)
            readline.set_auto_history(True)
            readline.set_completer_delims(" ")
            readline.set_completer(_complete)
            readline.parse_and_bind("tab: complete")
            # A dumb terminal would show the request for it in front of every line.
            pastes = "off" if os.environ.get("TERM", "dumb") in ("", "dumb") else "on"
            readline.parse_and_bind(f"set enable-bracketed-paste {pastes}")

    def prefill(self, text: str) -> None:
        """Put ``text`` into the next line to edit it."""
        readline = self._readline
        if readline is None:
            raise UsageError("/edit needs a terminal; send the changed question instead")

        def insert() -> None:
            readline.insert_text(text)
            readline.set_startup_hook(None)

        readline.set_startup_hook(insert)

    def read(self) -> str | None:
        """The next input, or None at the end."""
        line = self._line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith('"""'):
            return self._block(line.lstrip()[3:])
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line("... ")
        lines.append(line or "")
        return "\n".join(lines)

    def _block(self, first: str) -> str | None:
        lines: list[str] = []
        line: str | None = first
        while line is not None:
            if line.rstrip().endswith('"""'):
                lines.append(line.rstrip()[:-3])
                break
            lines.append(line)
            line = self._line("... ")
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Raises UsageError for a line that is no UTF-8: the model would be asked something else."""
        try:
            if not self.is_interactive:
                return self._piped_line()
            line = input(prompt)
            line.encode("utf-8")
        except EOFError:
            return None
        except UnicodeError:
            raise UsageError("that line is not UTF-8 and was not sent; check the terminal's encoding") from None
        return line

    def _piped_line(self) -> str | None:
        """In UTF-8, whatever the locale says, as all that is piped in."""
        self._num_lines += 1
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        if self._num_lines == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"line {self._num_lines} is not UTF-8 and was not sent; convert it first") from None


def _complete(text: str, state: int) -> str | None:
    found = completions(text) if text.startswith("/") else []
    return found[state] if state < len(found) else None
