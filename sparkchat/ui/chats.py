"""The user's chats: where they lie, which there are, and the one that is being written."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkchat.errors import SparkchatError, UsageError
from sparkchat.options import unknown
from sparkchat.ui.chat_file import (
    SUFFIX,
    ChatFile,
    KeptChat,
    answer_line,
    at_line,
    chat_line,
    part_line,
    question_line,
    read_chat,
    read_head,
)
from sparkchat.ui.conversation import Conversation, Turn
from sparkchat.ui.safe_text import fit, one_line

PART_SECONDS = 1.0
"""How much of an answer in the making a killed program may lose."""
MOST_LISTED = 500


@dataclass(frozen=True)
class ChatEntry:
    """One line of the list."""

    id: str
    title: str
    """The first question."""
    model: str
    changed: float
    """Seconds since the epoch."""
    num_bytes: int

    def line(self, number: int, now: float, width: int = 78) -> str:
        head = f"{number:>3}  {ago(now - self.changed):>8}  "
        return head + fit(one_line(self.title), max(width - len(head), 8)).rstrip()


def ago(seconds: float) -> str:
    """How long something was ago, in the largest whole unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"


class ChatStore:
    """The folder of kept chats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self, words: str = "") -> list[ChatEntry]:
        """Chats, newest first; with ``words`` only those that contain all of them anywhere."""
        try:
            paths = [path for path in self.folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file()]
            stats = sorted(((path.stat().st_mtime, path) for path in paths), reverse=True)
        except OSError:
            return []
        found: list[ChatEntry] = []
        for changed, path in stats:
            entry = _entry(path, changed, words.lower().split())
            if entry is not None:
                found.append(entry)
            if len(found) == MOST_LISTED:
                break
        return found

    def find(self, word: str) -> Path:
        """The file that ``word`` names: ``last``, a number of the list, an id, or how an id begins."""
        entries = self.entries()
        if not entries:
            raise UsageError("there is no kept chat yet; ask something first")
        if word == "last":
            return self.path(entries[0].id)
        if word.isdecimal() and len(word) < 8:
            if not 1 <= int(word) <= len(entries):
                raise UsageError(f"there is no chat {word}; give 1 (the newest) to {len(entries)}, or last")
            return self.path(entries[int(word) - 1].id)
        matching = [entry.id for entry in entries if entry.id.startswith(word)]
        if len(matching) != 1:
            names = [entry.id for entry in entries[:20]]
            raise UsageError(
                unknown("chat", word, names) if not matching else f"chat {word} names {len(matching)} chats"
            )
        return self.path(matching[0])

    def path(self, chat_id: str) -> Path:
        return self.folder / f"{chat_id}{SUFFIX}"

    def delete(self, chat_id: str) -> None:
        try:
            self.path(chat_id).unlink(missing_ok=True)
        except OSError as error:
            raise SparkchatError(f"chat {chat_id} cannot be deleted: {error.strerror}") from None


def _entry(path: Path, changed: float, words: Sequence[str]) -> ChatEntry | None:
    """What the list says of a file; None when it does not match, or is no chat."""
    try:
        chat = read_chat(path) if words else read_head(path)
    except SparkchatError:
        return None
    if not chat.every_turn:
        return None
    if words:
        texts = "\n".join(f"{turn.prompt}\n{turn.answer.text}" for turn in chat.every_turn).lower()
        if not all(word in texts for word in words):
            return None
    title = " ".join(chat.every_turn[0].prompt.split())[:200]
    return ChatEntry(chat.id, title, chat.model or "", changed, path.stat().st_size)


class ChatKeeper:
    """Writes the present chat as it goes on. When the disk refuses, it says so once, and the chat goes on unkept."""

    def __init__(self, store: ChatStore, conversation: Conversation, model: str, is_on: bool = True) -> None:
        self.store = store
        self.is_on = is_on
        self.problem: str | None = None
        """A sentence for the user that has not been shown yet."""
        self._conversation = conversation
        self._model = model
        self._file: ChatFile | None = None
        self._id: str | None = None
        self._parts: dict[str, str] = {}
        self._last_part = 0.0

    @property
    def id(self) -> str | None:
        """The present chat's name on disk; None before its first question."""
        return self._id

    def question(self, turn: Turn) -> None:
        """A question was asked; the chat's file is made at the first."""
        self._parts.clear()
        self._last_part = time.monotonic()
        self._write(question_line(turn, self._conversation.system))

    def text(self, turn: Turn, channel: str, text: str) -> None:
        """Text of an answer came; it is on disk a second later at most, or with the next call."""
        self._parts[channel] = self._parts.get(channel, "") + text
        if time.monotonic() - self._last_part >= PART_SECONDS:
            self._last_part = time.monotonic()
            parts, self._parts = self._parts, {}
            self._write(*(part_line(turn, channel, text) for channel, text in parts.items()))

    def answer(self, turn: Turn) -> None:
        """An answer has ended."""
        self._parts.clear()
        self._write(answer_line(turn))

    def moved(self) -> None:
        """The chat stands at another place of its tree."""
        if self._file is not None:
            self._write(at_line(self._conversation.turns[-1] if self._conversation.turns else None))

    def new(self) -> None:
        """The next question begins another file."""
        self.close()
        self._id = None

    def open(self, path: Path) -> KeptChat:
        """Go on with a kept chat: the conversation becomes it, and what follows is written to its file.

        A chat that is open in another window is gone on with in a copy. Raises SparkchatError when it cannot be read.
        """
        chat = read_chat(path)
        try:
            file = ChatFile(path) if self.is_on and chat.id != self._id else self._file
        except UsageError as error:
            file = None
            self.problem = f"{error.message}; this one goes on in a copy"
        self._conversation.take_over(chat.every_turn, chat.path, chat.system)
        if file is not self._file:
            self.close()
        self._file, self._id = file, chat.id if file is not None else None
        return chat

    def set_on(self, is_on: bool) -> None:
        """Keep the chat from here on, or no longer; what is on disk stays there."""
        self.is_on = is_on
        if not is_on:
            self.new()
        elif self._file is None and self._conversation.every_turn:
            self._write()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, *lines: dict) -> None:
        if not self.is_on:
            return
        try:
            if self._file is None:
                lines = self._begin()
            assert self._file is not None
            self._file.append(*lines)
        except (OSError, SparkchatError) as error:
            reason = error.message if isinstance(error, SparkchatError) else error.strerror
            self.problem = f"this chat is not kept on disk any more: {reason}"
            self.is_on = False
            self.close()

    def _begin(self) -> tuple[dict, ...]:
        """A new file; returns what it begins with: the chat so far, which already holds the newest question."""
        self._id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self._file = ChatFile(self.store.path(self._id))
        lines = [chat_line(self._id, self._model)]
        talk = self._conversation
        for turn in talk.every_turn:
            lines.append(question_line(turn, talk.system))
            if turn.answer.result is not None or turn.answer.text:
                lines.append(answer_line(turn))
        if talk.turns and talk.turns[-1] is not talk.every_turn[-1]:
            lines.append(at_line(talk.turns[-1]))
        return tuple(lines)
