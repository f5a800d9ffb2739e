"""A chat as a file: Markdown to read, JSON with every result, or what a trace can be made into. Never overwrites."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sparkchat import strict_json
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.paths import typed_path
from sparkchat.ui.conversation import Conversation, Turn
from sparkchat.ui.export_job import ExportJob
from sparkchat.ui.stats import result_line

OF_TRACE = (".html", ".csv", ".svg", ".jsonl")
"""Endings of files that are made from the session's trace."""
FORMATS_OF_TRACE = ("csv", "perfetto", "html", "svg", "markdown", "confidence")
"""As ``trace convert --to`` names them."""


def export_chat(conversation: Conversation, path: Path) -> str:
    """Write the chat to ``path`` (by its ending); returns a sentence saying where it is."""
    writers = {".md": chat_markdown, ".json": chat_json}
    if path.suffix not in writers:
        endings = ", ".join((*writers, *OF_TRACE))
        raise UsageError(f"/export {path} is not possible; give a file name that ends in one of {endings}")
    if not conversation.turns:
        raise UsageError("/export has nothing to save: the chat is empty")
    text = writers[path.suffix](conversation)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already; give another name") from None
    except OSError as error:
        raise SparkchatError(f"/export to {path} failed: {error.strerror}; give a folder that can be written") from None
    return f"chat saved to {path}"


def export_wish(argument: str) -> tuple[Path, str | None]:
    """What follows ``/export``: FILE, or FORMAT FILE with a format of the trace. Raises UsageError."""
    word, _, rest = argument.partition(" ")
    if word.lower() in FORMATS_OF_TRACE and rest.strip():
        return typed_path(rest.strip()), word.lower()
    if not argument or word.lower() in FORMATS_OF_TRACE:
        raise UsageError(
            f"/export needs a file name that ends in one of .md, .json, {', '.join(OF_TRACE)}; "
            f"or of the trace: /export {'|'.join(FORMATS_OF_TRACE)} FILE"
        )
    return typed_path(argument), None


def begin_trace_export(
    trace: Path | None, path: Path, name: str | None, told: Callable[[ExportJob], None]
) -> ExportJob:
    """Make ``path`` from the trace, in a process of its own. Raises UsageError where no trace is."""
    if trace is None:
        raise UsageError(f"/export {path} is made from a trace, and none is being written; /trace FILE starts one")
    return ExportJob(trace, path, name, told)


def chat_markdown(conversation: Conversation) -> str:
    """The messages as they were received, byte for byte, with the numbers of each answer below it."""
    parts = [f"<!-- system: {strict_json.dumps(conversation.system)} -->\n"] if conversation.system else []
    parts += [_turn_markdown(turn) for turn in conversation.turns]
    return "\n".join(parts)


def _turn_markdown(turn: Turn) -> str:
    thinking = f"<details><summary>thinking</summary>\n\n{turn.answer.thinking}\n\n</details>\n\n"
    numbers = f"\n\n*{result_line(turn.answer.result)}*" if turn.answer.result else ""
    answer = f"{thinking if turn.answer.thinking else ''}{turn.answer.text}{numbers}"
    return f"## User\n\n{turn.prompt}\n\n## Assistant\n\n{answer}\n"


def chat_json(conversation: Conversation) -> str:
    turns = [
        {
            "prompt": turn.prompt,
            "text": turn.answer.text,
            "thinking": turn.answer.thinking,
            "result": turn.answer.whole_result(),
        }
        for turn in conversation.turns
    ]
    data = {"schema": "sparkchat.chat/1", "system": conversation.system, "turns": turns}
    return strict_json.dumps(data, indent=2) + "\n"
