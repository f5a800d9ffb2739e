"""One chat on disk: lines are only ever added, so a killed program loses at most the line in the making.

Schema ``sparkchat.session/1``, one JSON object a line, its kind under "type". A chat is a tree of turns.

chat      id, created (UTC), model
question  turn, parent (the turn it follows; null at the start), text, system, at (UTC)
part      turn, channel, text: a piece of an answer that was still coming
answer    turn, text, thinking, result, was_stopped, seed; takes the place of the parts
at        turn: where the chat stands, when that is not behind its newest question
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sparkchat import strict_json
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.finite import is_number
from sparkchat.ui.conversation import Answer, Turn

SCHEMA = "sparkchat.session/1"
SUFFIX = ".chat.jsonl"
MOST_BYTES = 256 << 20
"""A larger file is none of ours."""
_LEFT_OUT = ("prompt_token_ids", "text")
"""Of a result: the prompt grows with every turn, and the text is stored beside it."""


@dataclass
class KeptChat:
    """What a file holds."""

    id: str
    model: str | None
    every_turn: list[Turn] = field(default_factory=list)
    path: list[Turn] = field(default_factory=list)
    system: str | None = None
    num_damaged: int = 0
    """Lines that cannot be read."""


class ChatFile:
    """Appends to one file, mode 0600, and holds a lock on it, so that two programs do not write one chat.

    Raises UsageError when another program has the chat open, SparkchatError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SparkchatError(f"chats are not kept: {path} cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UsageError(f"the chat {path.name.removesuffix(SUFFIX)} is open in another window") from None
        self._end_cut_line()

    def _end_cut_line(self) -> None:
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            with suppress(OSError):
                os.write(self._file, b"\n")

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Raises OSError when the disk refuses; what was whole before stays whole."""
        data = "".join(strict_json.dumps(line) + "\n" for line in lines).encode()
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        with suppress(OSError):
            os.fsync(self._file)
        with suppress(OSError):
            os.close(self._file)


# Lines


def chat_line(chat_id: str, model: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "type": "chat", "id": chat_id, "created": _now(), "model": model}


def question_line(turn: Turn, system: str | None) -> dict[str, Any]:
    parent = turn.parent.number if turn.parent is not None else None
    return {
        "type": "question",
        "turn": turn.number,
        "parent": parent,
        "text": turn.prompt,
        "system": system,
        "at": _now(),
    }


def part_line(turn: Turn, channel: str, text: str) -> dict[str, Any]:
    return {"type": "part", "turn": turn.number, "channel": channel, "text": text}


def answer_line(turn: Turn) -> dict[str, Any]:
    answer = turn.answer
    result = {key: value for key, value in (answer.whole_result() or {}).items() if key not in _LEFT_OUT}
    return {
        "type": "answer",
        "turn": turn.number,
        "text": answer.text,
        "thinking": answer.thinking,
        "result": result or None,
        "was_stopped": answer.was_stopped,
        "seed": turn.seed,
    }


def at_line(turn: Turn | None) -> dict[str, Any]:
    return {"type": "at", "turn": None if turn is None else turn.number}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# Reading


def read_chat(path: Path) -> KeptChat:
    """The chat in a file; lines that cannot be read are counted and left out.

    Raises UsageError when it is not there, DamagedFile when nothing of a chat is in it.
    """
    reader = _Reader(KeptChat(path.name.removesuffix(SUFFIX), None))
    num_lines = 0
    for raw in _raw_lines(path):
        num_lines += 1
        line = _parsed(raw)
        if line is None or not reader.take(line):
            reader.chat.num_damaged += bool(raw.strip())
    if num_lines and not reader.has_header and not reader.chat.every_turn:
        raise DamagedFile(f"{path} is not a chat of sparkchat; remove it, or give another")
    return reader.chat


def read_head(path: Path) -> KeptChat:
    """The chat's header and first question alone: what a list says of it."""
    reader = _Reader(KeptChat(path.name.removesuffix(SUFFIX), None))
    for raw in islice(_raw_lines(path), 20):
        line = _parsed(raw)
        if line is not None and reader.take(line) and reader.chat.every_turn:
            break
    return reader.chat


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise DamagedFile(f"{path} is larger than {MOST_BYTES >> 20} MiB, so it is no chat of sparkchat")
            yield from file
    except FileNotFoundError:
        raise UsageError(f"there is no chat {path.name.removesuffix(SUFFIX)}; /chats lists those there are") from None
    except OSError as error:
        raise SparkchatError(f"the chat {path} cannot be read: {error.strerror}") from None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = strict_json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class _Reader:
    """Takes lines one by one; every value is looked at before it is believed."""

    def __init__(self, chat: KeptChat) -> None:
        self.chat = chat
        self.has_header = False
        self._by_number: dict[int, Turn] = {}
        self._has_answer: set[int] = set()

    def take(self, line: dict[str, Any]) -> bool:
        kind = line.get("type")
        if kind == "chat":
            self.has_header = self.has_header or line.get("schema") == SCHEMA
            self.chat.model = line["model"] if isinstance(line.get("model"), str) else None
            return self.has_header
        if kind == "question":
            return self._question(line)
        if kind == "at":
            return self._at(line.get("turn"))
        turn = self._by_number.get(line["turn"]) if isinstance(line.get("turn"), int) else None
        if turn is None or kind not in ("part", "answer") or not isinstance(line.get("text"), str):
            return False
        return self._part(turn, line) if kind == "part" else self._answer(turn, line)

    def _question(self, line: dict[str, Any]) -> bool:
        number, text, parent = line.get("turn"), line.get("text"), line.get("parent")
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(text, str):
            return False
        last = self.chat.every_turn[-1].number if self.chat.every_turn else 0
        if number <= last or (parent is not None and (type(parent) is not int or parent not in self._by_number)):
            return False
        turn = Turn(text, f"{self.chat.id}/{number}", number=number)
        turn.parent = None if parent is None else self._by_number[parent]
        self._by_number[number] = turn
        self.chat.every_turn.append(turn)
        self.chat.path = _path_to(turn)
        self.chat.system = line["system"] if isinstance(line.get("system"), str) else None
        return True

    def _part(self, turn: Turn, line: dict[str, Any]) -> bool:
        if turn.number not in self._has_answer:
            turn.answer.was_stopped = True  # until its answer line says otherwise
            turn.answer.add("thinking" if line.get("channel") == "thinking" else "answer", line["text"])
        return True

    def _answer(self, turn: Turn, line: dict[str, Any]) -> bool:
        result, thinking, seed = line.get("result"), line.get("thinking"), line.get("seed")
        self._has_answer.add(turn.number)
        turn.answer = Answer(
            text=line["text"],
            thinking=thinking if isinstance(thinking, str) else "",
            result={**result, "text": line["text"]} if _is_result(result) else None,
            was_stopped=line.get("was_stopped") is True,
        )
        turn.seed = seed if isinstance(seed, int) and 0 <= seed < 2**64 else None
        return True

    def _at(self, number: Any) -> bool:
        if number is None:
            self.chat.path = []
        elif isinstance(number, int) and number in self._by_number:
            self.chat.path = _path_to(self._by_number[number])
        else:
            return False
        return True


def _path_to(turn: Turn) -> list[Turn]:
    path, at = [], turn
    while at is not None:
        path.append(at)
        at = at.parent  # type: ignore[assignment]
    return path[::-1]


def _is_result(value: Any) -> bool:
    """Whether the numbers of an answer have the shape that every reader of them relies on."""
    if not isinstance(value, dict) or not isinstance(value.get("finish_reason"), str):
        return False
    parts = [value.get(name) for name in ("usage", "speculation", "timing")]
    if not all(isinstance(part, dict) for part in parts):
        return False
    usage, speculation, timing = parts
    numbers = [*usage.values(), *timing.values(), speculation.get("mean_acceptance_length")]
    return all(n is None or is_number(n) for n in numbers)
