"""Past prompts, one JSON string a line, readable by the user alone; shared by the TUI and the line REPL."""

from __future__ import annotations

import os
from pathlib import Path

from sparkchat import strict_json

MAX_ENTRIES = 1000


class History:
    """Entries oldest first. A file that cannot be read or written is left alone: history is a convenience."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.is_kept = True
        """Whether new prompts go to the file."""
        self.entries = self._load()
        self._position: int | None = None
        self._draft = ""

    def add(self, text: str) -> None:
        """Remember a prompt and stop browsing."""
        self._position = None
        if not text.strip() or (self.entries and self.entries[-1] == text):
            return
        self.entries.append(text)
        self._append(text)

    def older(self, current: str) -> str | None:
        """The entry before the one shown; what was being written is kept for the way back."""
        if self._position is None:
            self._draft = current
        position = len(self.entries) if self._position is None else self._position
        if position == 0:
            return None
        self._position = position - 1
        return self.entries[self._position]

    def newer(self) -> str | None:
        """The entry after the one shown, at last what was being written."""
        if self._position is None:
            return None
        self._position += 1
        if self._position >= len(self.entries):
            self._position = None
            return self._draft
        return self.entries[self._position]

    def search(self, text: str, before: int | None = None) -> int | None:
        """Position of the newest entry that contains ``text`` and lies before ``before``."""
        for position in range((len(self.entries) if before is None else before) - 1, -1, -1):
            if text.lower() in self.entries[position].lower():
                return position
        return None

    def stop_browsing(self) -> None:
        self._position = None

    def _load(self) -> list[str]:
        if self._path is None:
            return []
        try:
            lines = self._path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        return [text for line in lines[-MAX_ENTRIES:] if (text := _decode(line)) is not None]

    def _append(self, text: str) -> None:
        if self._path is None or not self.is_kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(strict_json.dumps(text) + "\n")
        except OSError:
            return


def _decode(line: str) -> str | None:
    try:
        value = strict_json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
